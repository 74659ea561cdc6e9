"""Values that change nothing are taken, whoever invented their field; all others are refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from attar.server.api.body import Body
from attar.server.api.responses.schemas import ResponsesBody
from attar.server.api.schemas import ChatBody
from attar.server.errors import APIError
from tests.server.api.test_schemas import LEAST, chat, take


@pytest.mark.parametrize("kind", LEAST)
def test_null_and_neutral_values_are_welcome(kind: type[Body]) -> None:
    plain = take(kind)
    for name, neutral in kind.neutral.items():
        for value in (None, *neutral, *(float(value) for value in neutral if type(value) is int)):
            assert take(kind, **{name: value}) == plain, (name, value)


@pytest.mark.parametrize(
    "field, value",
    [
        ("cache_prompt", True), ("id_slot", -1), ("mirostat_mode", 0), ("typical_p", 1), ("dynatemp_range", 0),
        ("repeat_penalty", 1.0), ("spaces_between_special_tokens", True), ("add_special_tokens", False),
        ("return_token_ids", False), ("keep_alive", "5m"), ("early_stopping", False), ("session_id", "x"),
        ("thinking", {"type": "disabled"}), ("logit_bias", []), ("stop", ""), ("stop", [""]), ("store", True),
        ("service_tier", "flex"), ("metadata", {"a": 1}), ("user", 7),
    ],
)  # fmt: skip
def test_fields_of_other_servers_do_no_harm_where_they_change_nothing(field: str, value: Any) -> None:
    assert chat(take(ChatBody, seed=1, **{field: value})) == chat(take(ChatBody, seed=1))


@pytest.mark.parametrize("kind", LEAST)
def test_fields_that_change_no_token_are_taken_with_any_value(kind: type[Body]) -> None:
    ignored = [name for name in Body.__struct_fields__ if name != "model"]
    assert {"user", "metadata", "store", "service_tier", "session_id"} <= set(ignored)
    if kind is ResponsesBody:  # its answers repeat them, and it may store them
        ignored = [name for name in ignored if name not in ("metadata", "store")]
    for value in ("x", 1, True, {"a": [1]}, []):
        take(kind, **dict.fromkeys(ignored, value))


def test_of_several_fields_that_are_not_supported_the_first_is_named() -> None:
    """Not one by the seed of Python's hashes: a client was told of another after each start."""
    wrong = {"functions": [{}], "function_call": "f", "logits_processors": ["x"], "num_beams": 2}
    for order in itertools.permutations(wrong):
        with pytest.raises(APIError) as error:
            take(ChatBody, **{name: wrong[name] for name in order})
        assert error.value.param == order[0]


@pytest.mark.parametrize("kind", LEAST)
def test_other_values_of_unbuilt_fields_are_refused_by_name(kind: type[Body]) -> None:
    for name in kind.neutral.keys() - set(kind.__struct_fields__):
        with pytest.raises(APIError) as error:
            take(kind, **{name: {"some": "thing"}})
        assert (error.value.code, error.value.param) == ("unsupported_field", name)


def test_a_harmless_value_of_another_type_is_not_harmless() -> None:
    for name, value in (("safe_prompt", 0), ("no_stop_trim", 0), ("length_penalty", True)):
        with pytest.raises(APIError, match="unsupported_field"):
            take(ChatBody, **{name: value})
