"""The format of calls is found from renderings of a template alone: the table of families is the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.text.tokenizer import Tokenizer
from attar.text.tools import formats
from attar.text.tools.formats import GENERIC, detect
from tests.text.tools.families import FAMILIES, Family, with_markers


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Tokenizer:
    return with_markers(Tokenizer.load(demo))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_family_is_recognized(tokenizer: Tokenizer, family: Family) -> None:
    found = detect(tokenizer, family.template)
    assert (found.name, found.parallel) == (family.format, family.parallel)


def test_the_syntax_is_the_template_s_own(tokenizer: Tokenizer) -> None:
    found = {name: detect(tokenizer, family.template) for name, family in FAMILIES.items()}
    hermes = found["hermes"]
    assert (hermes.opening, hermes.closing, hermes.separator) == ("<tool_call>", "</tool_call>", "\n")
    assert hermes.begin == '<tool_call>\n{"name": "'
    assert hermes.end == "}\n</tool_call>"
    assert not hermes.visible
    assert not hermes.arguments_as_text
    assert found["as_text"].arguments_as_text
    assert '"parameters"' in found["llama3"].middle
    assert found["llama3"].visible == ("<|python_tag|>",)
    mistral = found["mistral"]
    assert (mistral.prefix, mistral.suffix, mistral.separator) == ("[TOOL_CALLS] [", "]", ", ")
    assert (mistral.id_length, mistral.visible) == (9, ("[TOOL_CALLS]",))
    assert found["mistral_ids"].call_id
    assert set(found["mistral_ids"].visible) == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert found["liquid"].closing == "<|tool_call_end|>"
    assert found["pythonic"].opening == ""


@pytest.mark.parametrize("template", ["", "{{ missing.name.name }}", "{% if %}", "{{ tools | tojson }}"])
def test_a_template_that_shows_no_calls_gets_the_generic_format(tokenizer: Tokenizer, template: str) -> None:
    assert detect(tokenizer, template) == GENERIC


def test_a_turn_that_opens_with_another_marker_is_cut_before_it(tokenizer: Tokenizer) -> None:
    thinking = FAMILIES["hermes"].template.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")
    assert thinking != FAMILIES["hermes"].template
    assert detect(tokenizer, thinking).begin == '<tool_call>\n{"name": "'


def test_the_template_of_qwen_is_hermes(shared: Path) -> None:
    tokenizer = Tokenizer.load(shared / "tokenizers" / "qwen2.5")
    found = detect(tokenizer, (shared / "tokenizers" / "chat_templates" / "qwen2.5-instruct.jinja").read_text())
    assert (found.name, found.separator, found.parallel) == ("hermes", "\n", True)


def test_names_of_probes_are_no_words_of_a_syntax() -> None:
    assert formats._FIRST not in "".join(FAMILIES[name].template for name in FAMILIES)
