"""The parser of answers without markers."""

from __future__ import annotations

from attar.text.answers.events import AnswerParser, Plain, TextDelta


def test_all_is_text() -> None:
    parser: AnswerParser = Plain()
    assert [*parser.feed("<tool_call>"), *parser.feed(""), *parser.feed("{}"), *parser.close()] == [
        TextDelta("<tool_call>"),
        TextDelta("{}"),
    ]
