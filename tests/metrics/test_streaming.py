"""The streamed loop against the whole computation done at once, on tiny decoders of random weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from attar.metrics import bootstrap, streaming
from attar.metrics.perplexity import plan_windows
from attar.metrics.streaming import decoder_logits, exp, stream
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from tests.errors import user_error

Make = Callable[..., Decoder]
FLOAT32 = 2e-5  # logits of the same rows, multiplied by the output matrix in other company
IDS = [(7 * i * i + 3) % 97 for i in range(50)]


def at_once(decoder: Decoder, inputs: tuple[int, ...]) -> Tensor:
    return decoder.forward(torch.tensor(inputs), ForwardBatch((len(inputs),), len(inputs))).double()


@pytest.mark.parametrize("stride", [16, 5])
def test_equals_the_whole_computation(tiny_decoder: Make, monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    monkeypatch.setattr(streaming, "LOGITS_AT_ONCE", 97 * 3)
    base, model = tiny_decoder(0), tiny_decoder(0, scheme="w4g32")
    windows = plan_windows(IDS, 16, stride, bos=1)
    told: list[tuple[int, int]] = []
    found = stream(decoder_logits(model), windows, decoder_logits(base), lambda done, total: told.append((done, total)))
    nll, kl, agree, accept = [], [], [], []
    for window in windows:
        p, q = (at_once(each, window.inputs)[window.first :] for each in (base, model))
        nll += torch.nn.functional.cross_entropy(q, torch.tensor(window.counted), reduction="none").tolist()
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        kl += torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).tolist()
        agree += (p.argmax(-1) == q.argmax(-1)).tolist()
        accept += torch.minimum(log_p.exp(), log_q.exp()).sum(-1).tolist()
    assert found.kl is not None
    assert found.agree is not None
    assert found.tokens == 50
    np.testing.assert_allclose(found.nll, nll, atol=FLOAT32)
    np.testing.assert_allclose(found.kl, kl, atol=FLOAT32)
    assert found.agree.tolist() == agree
    assert found.accept is not None
    np.testing.assert_allclose(found.accept, accept, atol=FLOAT32)
    assert found.kl_windows.sum() == pytest.approx(sum(kl), abs=1e-3)
    assert told[-1] == (50, 50)
    assert len(told) == len(windows)
    figures = found.figures()
    assert figures["ppl"].value == pytest.approx(np.exp(np.mean(nll)), rel=1e-5)
    assert figures["kl_mean"].value == pytest.approx(np.mean(kl), abs=FLOAT32)
    assert figures["kl_max"].value == max(found.kl) == figures["kl_p999"].value  # fewer than 1000 tokens
    assert figures["ppl_ratio"].value == pytest.approx(figures["ppl"].value / figures["ppl_base"].value)
    assert np.exp(figures["ln_ppl_change"].value) == pytest.approx(figures["ppl_ratio"].value)
    assert figures["ear"].value == pytest.approx(np.mean(accept), abs=FLOAT32)
    for name in figures.keys() - {"kl_max"}:
        assert figures[name].low <= figures[name].value <= figures[name].high, name  # type: ignore[operator]


def test_a_model_against_itself_diverges_by_nothing(tiny_decoder: Make) -> None:
    model = decoder_logits(tiny_decoder(0))
    found = stream(model, plan_windows(IDS, 16), model)
    assert found.kl is not None
    assert not found.kl.any()
    assert found.figures()["top1"] == found.figures()["ear"] == bootstrap.Interval(1.0, 1.0, 1.0)
    assert found.figures()["ppl_ratio"] == bootstrap.Interval(1.0, 1.0, 1.0)


def test_models_run_side_by_side_and_no_logits_are_kept() -> None:
    """Runs alternate between the models, and of each only the one that is compared and the one being made are alive."""
    order: list[str] = []
    made: list[weakref.ref[Tensor]] = []

    def fake(name: str) -> streaming.Logits:
        def run(ids: Tensor, first: int) -> Iterator[Tensor]:
            for _ in range(first, len(ids), 2):
                order.append(name)
                logits = torch.zeros(2, 11)
                made.append(weakref.ref(logits))
                assert sum(each() is not None for each in made) <= 4
                yield logits

        return run

    found = stream(fake("model"), plan_windows([1] * 17, 8), fake("base"))
    assert order == ["model", "base"] * 8
    assert found.tokens == 16


def test_without_a_base_there_is_only_perplexity(tiny_decoder: Make) -> None:
    found = stream(decoder_logits(tiny_decoder(0)), plan_windows(IDS, 16))
    assert found.kl is None
    assert set(found.figures()) == {"nll", "ppl"}


@pytest.mark.parametrize("which", ["model", "base model"])
def test_nan_logits_are_named(which: str) -> None:
    def fake(bad: bool) -> streaming.Logits:
        def run(ids: Tensor, first: int) -> Iterator[Tensor]:
            logits = torch.zeros(len(ids) - first, 11)
            if bad and ids[0] == 9:
                logits[2, 5] = torch.nan
            yield logits

        return run

    windows = plan_windows([1, 1, 1, 1, 9, 1, 1, 1, 1], 4)
    with user_error("not_finite"):
        stream(fake(which == "model"), windows, fake(which == "base model"))


def test_the_perplexity_of_a_broken_model_is_infinite_not_a_crash() -> None:
    assert exp(1e6) == np.inf
    assert exp(0.0) == 1.0
