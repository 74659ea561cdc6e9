"""Windows by hand and by property; losses by hand and against torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attar.metrics.perplexity import DOUBLES_AT_ONCE, Window, nll, plan_windows
from tests.errors import user_error

FLOAT64 = 1e-12


def test_windows_with_bos_predict_every_token() -> None:
    assert plan_windows([10, 11, 12, 13, 14], 2, bos=1) == [
        Window((1, 10), (10, 11)),
        Window((1, 12), (12, 13)),
        Window((1,), (14,)),
    ]


def test_windows_without_bos_predict_every_token_but_the_first() -> None:
    assert plan_windows([10, 11, 12, 13, 14], 2) == [Window((10, 11), (11, 12)), Window((12, 13), (13, 14))]


def test_overlapping_windows_count_only_what_is_new() -> None:
    windows = plan_windows([10, 11, 12, 13, 14, 15], 3, stride=2)
    assert windows == [Window((10, 11, 12), (11, 12, 13)), Window((12, 13, 14), (13, 14, 15), first=1)]
    assert [w.counted for w in windows] == [(11, 12, 13), (14, 15)]


@given(st.integers(2, 60), st.integers(1, 20), st.integers(1, 20), st.booleans())
def test_every_token_counts_once_with_its_own_past(count: int, context: int, stride: int, with_bos: bool) -> None:
    ids = list(range(100, 100 + count))
    if stride > context:
        with user_error("window_invalid"):
            plan_windows(ids, context, stride)
        return
    windows = plan_windows(ids, context, stride, bos=0 if with_bos else None)
    assert [t for w in windows for t in w.counted] == ids[0 if with_bos else 1 :]
    for w in windows:
        assert 1 <= len(w.inputs) == len(w.targets) <= context
        assert w.inputs[1:] == w.targets[:-1]
        assert w.inputs[0] == (0 if with_bos else w.targets[0] - 1)


@pytest.mark.parametrize("ids", [[], [5]])
def test_too_short_a_text_is_refused(ids: list[int]) -> None:
    with user_error("text_too_short"):
        plan_windows(ids, 8)


def test_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(3.0), 0.0]])
    found = nll(logits, torch.tensor([0, 1]))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([math.log(2), math.log(4)], abs=1e-7)


def test_loss_equals_torch_over_several_runs_of_rows() -> None:
    vocabulary = DOUBLES_AT_ONCE // 3  # three rows a run
    logits = torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(0)) * 5
    targets = torch.arange(8) * 7
    expected = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(nll(logits, targets), expected, rtol=FLOAT64, atol=FLOAT64)
