"""States that drafts learn from: kept on disk or computed again they are the same, and close to those of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attar.drafting.eagle import EagleLearner
from attar.drafting.lessons import Lessons
from attar.drafting.target import Target
from attar.kernels import tiles

LAYERS = (0, 1, 3)
CLOSE = 0.03  # relative, of states and losses by products in bfloat16
ALONG = 0.9  # cosine of gradients by such products, of a model of random weights


@pytest.mark.parametrize("kept", [0, 2, 6])
def test_states_are_the_same_kept_or_computed_again(target: Target, ids: Tensor, tmp_path: Path, kept: int) -> None:
    row = 2 * len(LAYERS) * target.config.hidden + 8
    made = Lessons(target, ids, LAYERS, True, tmp_path, kept * ids.shape[1] * row)
    wanted, served = target.quick_states(ids, LAYERS), target.states(ids, LAYERS)
    length = ids.shape[1]
    for which in ([0, 1, 5], [5, 1], [2, 0, 1]):
        some, found = made.of(which)
        assert torch.equal(some, ids[which])
        rows = torch.cat([torch.arange(n * length, (n + 1) * length) for n in which])
        for layer in LAYERS:
            assert torch.equal(found.of(layer), wanted.of(layer)[rows].bfloat16().float())
            assert (found.of(layer) - served.of(layer)[rows]).norm() < CLOSE * served.of(layer)[rows].norm()
        for mine, theirs in zip(found.predictions, wanted.predictions, strict=True):
            assert torch.equal(mine, theirs[rows])
    assert int(made._known.sum()) == len({0, 1, 2, 5} & set(range(kept)))
    assert list(tmp_path.iterdir()) == []


def test_sums_of_all_tokens_normalize_predictions(target: Target, ids: Tensor) -> None:
    states = target.states(ids[:1], LAYERS)
    p = (target.decoder.logits(states.of(3)) - states.predictions[1][:, None]).exp()
    assert torch.allclose(p.sum(1), torch.ones(len(p)), atol=1e-5)
    assert torch.equal(p.argmax(1), states.best)


@pytest.mark.skipif(not tiles.faster(), reason="this processor has no tiles")
@pytest.mark.parametrize("loss", ["published", "acceptance"])
def test_products_in_bfloat16_learn_the_same(
    tiny: Path, target: Target, ids: Tensor, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    losses, gradients = [], []
    for least in (1 << 30, 1):
        monkeypatch.setattr(tiles, "LEAST", least)
        own = Target(tiny)
        learner = EagleLearner(own, 2, torch.arange(64), loss, 0, ids)
        states = own.quick_states(ids[:2], learner.layers)
        losses.append(learner.learn(ids[:2], states))
        gradients.append([weight.grad for weight in learner.parameters()])
        assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in learner.parameters())
    assert losses[1] == pytest.approx(losses[0], rel=CLOSE)
    assert losses[1] != losses[0]
    for mine, theirs in zip(*gradients, strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), 0) > ALONG
