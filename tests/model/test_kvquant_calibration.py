"""Gradients that KVQuant is calibrated by: of the model's own loss, at the numbers that its cache keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from attar.execution import kv_cache
from attar.kv.published import PUBLISHED
from attar.model import kvquant_calibration
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from tests.errors import user_error

Make = Callable[..., Decoder]
STEP = 1e-2  # of a number, for a difference quotient in float32
SAME = 0.05  # of a gradient
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def decoder(request: pytest.FixtureRequest) -> Decoder:
    made: Decoder = request.getfixturevalue("tiny_decoder")()
    return made


def test_blocks_are_run_as_the_model_runs_them(decoder: Decoder) -> None:
    ids = torch.arange(5, 25)
    step = ForwardBatch((len(ids),), len(ids))
    hidden = decoder.embedding.forward(ids, step.positions).requires_grad_()
    for block in decoder.blocks:
        ours, theirs = kvquant_calibration._run(block, hidden, step, []), block.run(hidden, step)
        assert (ours - theirs).abs().max() <= ROUNDING * theirs.abs().max()


def test_gradients_are_those_of_the_loss(decoder: Decoder) -> None:
    """A bias that is added to all keys of a channel, or values, changes the loss as their gradients sum up to."""
    ids = torch.arange(5, 25)
    kept = kvquant_calibration._backward(decoder, ids)

    def loss(layer: int, side: int, by: float) -> float:
        def moved(self: object, x: torch.Tensor, rotation: object) -> tuple[torch.Tensor, ...]:
            found = list(heads(x, None))
            found[side] = found[side].clone()
            found[side][:, 0, 1] += by
            return tuple(found)

        attention = decoder.blocks[layer].attention
        heads = attention.heads
        hidden, step = decoder.embedding.forward(ids, torch.arange(len(ids))), ForwardBatch((len(ids),), len(ids))
        hidden.requires_grad_()
        for i, block in enumerate(decoder.blocks):
            with pytest.MonkeyPatch.context() as patch:
                if i == layer:
                    patch.setattr(type(attention), "heads", moved)
                hidden = kvquant_calibration._run(block, hidden, step, [])
        return functional.cross_entropy(decoder.logits(hidden[:-1]), ids[1:]).item()

    for layer, pair in enumerate(kept):
        for side, one in enumerate(pair, 1):
            assert one.grad is not None
            slope = (loss(layer, side, STEP) - loss(layer, side, -STEP)) / (2 * STEP)
            scale = float(one.grad[:, 0, 1].abs().sum())
            assert float(one.grad[:, 0, 1].sum()) == pytest.approx(slope, abs=SAME * scale + 1e-5)


def test_a_model_calibrates_on_its_own_text_and_is_measured(decoder: Decoder) -> None:
    form = PUBLISHED["nuq3-published"]
    made = kv_cache.calibrated(decoder, form, lambda: kv_cache.sample(decoder, 3, 1, length=40))
    assert len(made.codes) == decoder.config.layers
    for code in made.codes:
        assert code.keys is not None
        assert code.values is not None
        assert (code.keys.chosen.diff() >= 0).all()
        assert len(code.values.chosen) == 8
    cache, ids = made(40), torch.arange(5, 45)
    with torch.inference_mode():
        rounded = decoder.forward(ids, ForwardBatch((40,), 40, cache))
        plain = decoder.forward(ids, ForwardBatch((40,), 40, decoder.cache(40)))
    assert 0 < (rounded - plain).abs().max() < plain.abs().max()
    before = made.bits(40)
    made.codes[0].outliers += 1000
    assert made.bits(40) > before


def test_texts_that_do_not_fit(decoder: Decoder) -> None:
    with user_error("context_exceeded"):
        kvquant_calibration.measure(decoder, torch.zeros((1, decoder.config.context + 1), dtype=torch.int64))
