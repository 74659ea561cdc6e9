"""KL and acceptance by hand, against torch in float64, and their floor: of a model against itself, exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.metrics import perplexity
from attar.metrics.divergence import compare

FLOAT64 = 1e-12


def logits(seed: int, rows: int = 5, vocabulary: int = 300) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 4


def test_by_hand() -> None:
    base, model = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    found = compare(base, model, torch.tensor([1]))
    # p = (1/2, 1/2), q = (3/4, 1/4): KL = 1/2 ln(2/3) + 1/2 ln 2 = 1/2 ln(4/3)
    assert found.kl.item() == pytest.approx(0.5 * math.log(4 / 3), abs=1e-7)
    assert found.nll.item() == pytest.approx(math.log(4), abs=1e-7)
    assert found.base_nll.item() == pytest.approx(math.log(2), abs=1e-7)
    assert found.agree.item() is True
    assert found.accept.item() == pytest.approx(1 / 2 + 1 / 4, abs=1e-7)


def test_equals_torch() -> None:
    base, model, targets = logits(0), logits(1), torch.arange(5)
    found = compare(base, model, targets)
    p, q = base.double().log_softmax(-1), model.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found.kl, expected, rtol=FLOAT64, atol=FLOAT64)
    torch.testing.assert_close(found.nll, perplexity.nll(model, targets), rtol=0, atol=0)
    torch.testing.assert_close(found.base_nll, perplexity.nll(base, targets), rtol=0, atol=0)
    assert found.agree.tolist() == (base.argmax(-1) == model.argmax(-1)).tolist()
    torch.testing.assert_close(found.accept, torch.minimum(p.exp(), q.exp()).sum(-1), rtol=FLOAT64, atol=FLOAT64)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.01, 60))
def test_the_floor_is_zero(seed: int, scale: float) -> None:
    base = logits(seed, 2, 50) * scale
    found = compare(base, base.clone(), torch.zeros(2, dtype=torch.int64))
    assert found.kl.tolist() == [0.0, 0.0]
    assert found.accept.tolist() == [1.0, 1.0]
    assert found.agree.all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31))
def test_it_is_not_symmetric_and_never_negative(seed: int) -> None:
    a, b, targets = logits(seed, 3, 40), logits(seed + 1, 3, 40), torch.zeros(3, dtype=torch.int64)
    one, other = compare(a, b, targets), compare(b, a, targets)
    assert (one.kl > 0).all()
    assert not torch.allclose(one.kl, other.kl)
    assert one.accept.equal(other.accept), "acceptance is symmetric"
    # Pinsker and Bretagnolle-Huber bound the total variation, 1 - acceptance, by KL.
    bound = torch.minimum((one.kl / 2).sqrt(), (1 - (-one.kl).exp()).sqrt())
    assert ((one.accept >= 1 - bound - FLOAT64) & (one.accept <= 1)).all()


def test_runs_of_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    base, model, targets = logits(0), logits(1), torch.arange(5)
    whole = compare(base, model, targets)
    monkeypatch.setattr(perplexity, "DOUBLES_AT_ONCE", 2 * 300)
    for found, expected in zip(compare(base, model, targets), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=FLOAT64, atol=FLOAT64)
