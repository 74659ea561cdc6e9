"""Settings of sparse prefill: what is read, what is shared between prompts, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.kv.sparse_prefill import LAST, LOST, SINKS, WINDOW, SparsePrefill
from tests.errors import user_error


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tri-shape", SparsePrefill(sinks=SINKS, window=WINDOW, last=LAST)),
        ("tri-shape:0+512+1", SparsePrefill(sinks=0, window=512, last=1)),
        ("skip", SparsePrefill(lost=LOST)),
        ("skip:0.001", SparsePrefill(lost=0.001)),
    ],
)
def test_settings_are_read_and_written(text: str, found: SparsePrefill) -> None:
    assert SparsePrefill.parse(text) == found
    assert SparsePrefill.parse(str(found)) == found


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "option_malformed"),
        ("a-shape", "option_malformed"),
        ("tri-shape:64", "option_malformed"),
        ("tri-shape:64+-1+2", "option_malformed"),
        ("skip:", "option_malformed"),
        ("skip:nan", "option_malformed"),
        ("skip:1e-3", "option_malformed"),
        ("tri-shape:" + "9" * 40 + "+1+1", "option_malformed"),
        ("tri-shape:64+8+128", "option_out_of_range"),
        ("tri-shape:64+512+0", "option_out_of_range"),
        ("tri-shape:64+999999999+1", "option_out_of_range"),
        ("skip:0", "option_out_of_range"),
        ("skip:0.9", "option_out_of_range"),
    ],
)
def test_other_settings_are_refused(text: str, code: str) -> None:
    with user_error(code):
        SparsePrefill.parse(text)


@given(
    prompt=st.integers(1, 9000), more=st.integers(0, 9000), sinks=st.integers(0, 64), window=st.integers(16, 4096),
    last=st.integers(1, 300), skips=st.booleans(),
)  # fmt: skip
def test_shared_tokens_read_the_same_in_every_prompt(
    prompt: int, more: int, sinks: int, window: int, last: int, skips: bool
) -> None:
    """A row that the tree keeps reads as much in a longer prompt, and one that it lacks may not."""
    settings = SparsePrefill(lost=0.1, last=last) if skips else SparsePrefill(sinks=sinks, window=window, last=last)
    longer = prompt + more

    def few(at: int, of: int) -> bool:
        return settings.whole <= at < settings.until(of)

    for at in {0, settings.whole - 1, settings.whole, settings.until(prompt) - 1, settings.alike(prompt) - 1}:
        if 0 <= at < min(prompt, settings.alike(prompt)):
            assert few(at, prompt) == few(at, longer)
    assert 0 < settings.tokens_read(longer) <= longer


@pytest.mark.parametrize("how", [{"device": "cuda"}, {"processes": 2}, {"trees": True}])
def test_what_it_does_not_go_with_is_refused(how: dict[str, object]) -> None:
    SparsePrefill.parse("skip").check()
    with user_error("option_conflict"):
        SparsePrefill.parse("skip").check(**how)  # type: ignore[arg-type]
