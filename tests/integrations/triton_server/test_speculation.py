"""Draft models, heads and lookahead of a TensorRT-LLM configuration: options, notes and warnings, and no refusal."""

from __future__ import annotations

from typing import Any

import pytest

from attar.integrations.triton_server.config import Imported, read
from tests.errors import user_error

INPUT = 'input [ { name: "num_draft_tokens" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]'


def found(top: str = "", **parameters: str) -> Imported:
    given = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
    )
    return read(f'backend: "python" max_batch_size: 4 {top} {given}')


@pytest.mark.parametrize(
    ("parameters", "options"),
    [
        ({"tensorrt_llm_draft_model_name": "small"}, {"draft": "small"}),
        ({"tensorrt_llm_draft_model_name": "small", "decoding_mode": "lookahead"}, {"draft": "small"}),
        ({"tensorrt_llm_draft_model_name": "${draft}"}, {}),
        ({"num_draft_tokens": "5"}, {"draft-tokens": 5}),
        ({"num_draft_tokens": "0"}, {"draft-tokens": 0}),
        ({"num_draft_tokens": "64"}, {"draft-tokens": 16}),
        ({"decoding_mode": "lookahead"}, {"draft": "lookahead"}),
        ({"decoding_mode": "eagle"}, {}),
        ({"decoding_mode": "top_k"}, {}),
    ],
)
def test_what_becomes_an_option(parameters: dict[str, str], options: dict[str, Any]) -> None:
    made = found(**parameters)
    assert {name: made.options[name] for name in ("draft", "draft-tokens") if name in made.options} == options
    assert all(f"--{name} {value}" in made.command() for name, value in options.items())


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"tensorrt_llm_draft_model_name": "small"}, "else name it with --draft"),
        ({"num_draft_tokens": "17"}, "17 drafts: a step has 16 at most"),
        ({"decoding_mode": "medusa"}, "decoding_mode: medusa: drafts are made by --draft FOLDER"),
        ({"medusa_choices": "{0}, {0, 0}"}, "medusa_choices: drafts are a chain"),
        ({"eagle_choices": "{0}"}, "--draft-tree N"),
        ({"lookahead_window_size": "4"}, "lookahead_window_size: the window"),
    ],
)
def test_what_is_lost_is_named(parameters: dict[str, str], says: str) -> None:
    [warning] = found(**parameters).warnings
    assert says in warning


def test_what_holds_anyhow_is_noted() -> None:
    made = found(INPUT, tensorrt_llm_model_name="large", guided_decoding_backend="xgrammar")
    assert not made.warnings
    said = "\n".join(made.notes)
    for words in ("speculation.max_tokens", "tensorrt_llm_model_name: the target", "guided_decoding_backend: llguid"):
        assert words in said


@pytest.mark.parametrize("count", ["-1", "four", "9" * 19])
def test_a_number_of_drafts_that_is_none_is_refused(count: str) -> None:
    with user_error("option_malformed", "num_draft_tokens"):
        found(num_draft_tokens=count)
