r"""Templates of configurations: filled in as by NVIDIA's tool, and nothing put where a value is that is more than one.

Row R2 of the list of methods: round trip, the escaped comma `0\,1` among it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.integrations.triton_server.config import read
from attar.integrations.triton_server.pbtxt import MAX_BYTES, parse
from attar.integrations.triton_server.template import export, fill, left, parse_values, values
from attar.protocol.scheduler_config import PRESETS, SchedulerConfig
from attar.protocol.settings import Settings
from tests.errors import user_error

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,10}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text(st.sampled_from(",:\\0a"), max_size=8)
TEMPLATE = """
max_batch_size: ${triton_max_batch_size}  # ${triton_max_batch_size} is named here as well
dynamic_batching {
  preferred_batch_size: [ ${triton_max_batch_size} ]
  max_queue_delay_microseconds: ${max_queue_delay_microseconds}
  default_queue_policy: { max_queue_size: ${max_queue_size} }
}
parameters: { key: "gpu_device_ids" value: { string_value: "${gpu_device_ids}" } }
parameters: { key: "gpt_model_path" value: { string_value: "${engine_dir}" } }
"""


def theirs(text: str) -> dict[str, str]:
    """How NVIDIA's tool takes a list apart: at commas, then at colons, a backslash away each time. For an oracle."""

    def split(piece: str, mark: str) -> list[str]:
        found, keep = [""], False
        for character in piece:
            if keep:
                found[-1], keep = found[-1] + character, False
            elif character == mark:
                found.append("")
            elif character == "\\":
                keep = True
            else:
                found[-1] += character
        return found

    made = {}
    for each in split(text, ","):
        name, value = split(each, ":")
        made[name] = value
    return made


def written(given_: dict[str, str]) -> str:
    """What a user gives the tool, each mark of a value escaped as often as it is taken apart."""

    def escape(text: str, mark: str) -> str:
        return text.replace("\\", "\\\\").replace(mark, "\\" + mark)

    return ",".join(escape(f"{name}:{escape(value, ':')}", ",") for name, value in given_.items())


@given(st.dictionaries(NAMES, TEXTS, min_size=1, max_size=5))
def test_values_are_read_here_as_there(given_: dict[str, str]) -> None:
    text = written(given_)
    assert parse_values(text) == given_
    assert theirs(text) == given_


def test_an_escaped_comma_belongs_to_the_value() -> None:
    r"""Row R2: `gpu_device_ids:0\,1`, there and back."""
    given_ = r"triton_max_batch_size:8,gpu_device_ids:0\,1,engine_dir:/engines/a\:b"
    assert parse_values(r"gpu_device_ids:0\,1") == {"gpu_device_ids": "0,1"} == theirs(r"gpu_device_ids:0\,1")
    assert written({"gpu_device_ids": "0,1"}) == r"gpu_device_ids:0\,1"
    filled = fill(TEMPLATE, parse_values(given_))
    assert 'string_value: "0,1"' in filled
    assert 'string_value: "/engines/a:b"' in filled
    assert parse_values("a:b:c") == {"a": "b:c"}
    [warning] = read(filled).warnings
    assert warning.startswith("gpu_device_ids: 0,1: how 2 GPUs")


def test_what_nobody_gives_stays_open_or_is_the_usual() -> None:
    filled = fill(TEMPLATE, {"triton_max_batch_size": "8"})
    assert "max_queue_size: 0 " in filled
    assert "max_queue_delay_microseconds: 0\n" in filled
    assert left(filled) == ["gpu_device_ids", "engine_dir"]
    assert read(filled).options["max-running"] == 8
    assert filled.count("8 is named here as well") == 1


@pytest.mark.parametrize(
    "given_, says",
    [
        ("x", "'x' is not NAME:VALUE"),
        ("", "is not NAME:VALUE"),
        (":1", "is not NAME:VALUE"),
        ("a b:1", "is not NAME:VALUE"),
        ("a:1,a:2", "a is given twice"),
        ("a:0,1", "'1' is not NAME:VALUE"),
    ],
)
def test_lists_that_are_none(given_: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_values(given_)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("triton_max_batch_size", "8 } evil { x: 1", "cannot be read"),
        ("triton_max_batch_size", "8 # and the rest", "cannot be read"),
        ("triton_max_batch_size", "", "cannot be read"),
        ("triton_max_batch_size", "[1, 2]", "cannot be read"),
        ("triton_max_batch_size", "9" * 100, "cannot be read"),
        ("triton_max_batch_size", "{ }", "has other fields than without"),
        ("max_queue_size", "0 evil: 1", "has other fields than without"),
        ("max_queue_size", "[0, 1]", "has other fields than without"),
        ("max_queue_size", "0 } evil { x: 1", "has other fields than without"),
    ],
)
def test_a_value_is_no_more_than_a_value(name: str, value: str, says: str) -> None:
    with pytest.raises(ValueError) as caught:
        fill(TEMPLATE, {name: value})
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", ['"', '" } } x: "', "a\nb", "\\", "\\q"])
def test_a_string_ends_where_it_ended(value: str) -> None:
    with user_error("option_malformed"):
        fill(TEMPLATE, {"engine_dir": value})


def test_the_text_with_all_of_them_is_what_is_read() -> None:
    half = "x" * (MAX_BYTES * 2 // 3)
    fill('a: "${a}${b}"', {"a": half, "b": "y"})
    with user_error("option_malformed"):
        fill('a: "${a}${b}"', {"a": half, "b": half})


def test_a_name_that_the_template_has_no_place_for() -> None:
    with user_error("name_unknown"):
        fill(TEMPLATE, {"max_batch": "1"})
    with user_error("name_unknown"):
        fill("a: 1", {"a": "1"})


LIMITS = st.builds(
    SchedulerConfig,
    policy=st.sampled_from(["continuous", "static", "dynamic"]),
    max_running=st.integers(1, 4096),
    max_step_tokens=st.integers(4096, 10**6),
    max_waiting=st.integers(1, 10**6),
    max_delay=st.integers(1, 10**9).map(lambda microseconds: microseconds / 1e6),
    max_preemptions=st.sampled_from([0, 4]),
)


@given(LIMITS, st.none() | st.integers(1, 10**9), st.integers(1, 1000).map(lambda share: share / 1000))
def test_what_is_exported_is_imported(limits: SchedulerConfig, tokens: int | None, fraction: float) -> None:
    """There and back, every option that both have."""
    text = export(values(limits, tokens=tokens, fraction=fraction, device="cpu", shared=1))
    found = read(text)
    assert not found.warnings
    settings = found.settings()
    assert (settings.get("max_cached_tokens"), settings["kv_fraction"]) == (tokens, fraction)
    again = Settings(model="", socket="", **settings).limits()
    expected = limits if limits.policy == "dynamic" else replace(limits, max_delay=SchedulerConfig().max_delay)
    of_engine = {name: getattr(again, name) for name in ("max_passed", "headroom", "max_drafts")}  # no options
    assert again == replace(expected, **of_engine)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_taken_along(preset: str) -> None:
    found = read(export(values(PRESETS[preset], tokens=None, fraction=None, device="cuda:1", shared=1)))
    assert found.options["max-running"] == PRESETS[preset].max_running
    assert found.options["max-step-tokens"] == PRESETS[preset].max_step_tokens
    assert (found.options["kv-fraction"], found.options["device"]) == (0.9, "cuda:1")


def test_one_at_a_time_is_a_batch_of_one() -> None:
    found = read(export(values(SchedulerConfig(policy="none"), tokens=None, fraction=None, device="cpu", shared=1)))
    assert (found.options["max-running"], found.options["policy"]) == (1, "static")


def test_a_template_of_theirs_is_filled_in_as_far_as_it_goes() -> None:
    made = values(SchedulerConfig(), tokens=None, fraction=None, device="cuda", shared=2)
    text = export(made, TEMPLATE)
    assert "max_batch_size: 32 " in text
    assert 'string_value: "0,1"' in text
    assert left(text) == ["engine_dir"]
    assert len(parse(fill(text, {"engine_dir": "/engines/x"})).fields) == 4
    with user_error("file_wrong_kind"):
        export(made, "a: ${other}")
    with user_error("device_unsupported"):
        values(SchedulerConfig(), tokens=None, fraction=None, device="tpu", shared=1)
