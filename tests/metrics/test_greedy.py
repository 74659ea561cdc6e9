"""Greedy continuations: against two models that write alone, each from the start at every token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from attar.kv.schemes import SCHEMES
from attar.metrics import greedy
from attar.metrics.measure import measure
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from tests.errors import user_error

Make = Callable[..., Decoder]
EMBED = {"model.embed_tokens.weight": 0.1 * torch.randn(97, 64, generator=torch.Generator().manual_seed(5))}
"""So small that tokens do not predict themselves: then continuations wander."""
IDS = [(7 * i * i + 3) % 97 for i in range(90)]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of these tests have 64 positions."""
    monkeypatch.setattr(greedy, "PROMPT", 8)
    monkeypatch.setattr(greedy, "LENGTH", 20)


def alone(decoder: Decoder, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(greedy.LENGTH):
        logits = decoder.forward(torch.tensor(ids), ForwardBatch((len(ids),), len(ids)))
        ids.append(int(logits[-1].argmax()))
    return ids[len(prompt) :]


def test_as_if_each_wrote_alone(tiny_decoder: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greedy, "AT_ONCE", 4)
    base, model = tiny_decoder(0, tensors=EMBED), tiny_decoder(0, scheme="w4g32", tensors=EMBED)
    started = greedy.prompts([IDS], 9, None, 64)
    expected = []
    for prompt in started.tolist():
        pairs = list(zip(alone(model, prompt), alone(base, prompt), strict=True))
        expected.append(next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs)))
    assert len(set(expected)) > 3, "the prompts should tell"
    assert greedy.shared(model, base, started).tolist() == expected


def test_a_model_against_itself_never_differs(tiny_decoder: Make) -> None:
    base = tiny_decoder(0, tensors=EMBED)
    assert greedy.shared(base, base, greedy.prompts([IDS], 5, 1, 64)).tolist() == [20] * 5


def test_a_model_may_keep_keys_otherwise(tiny_decoder: Make) -> None:
    base, started = tiny_decoder(0, tensors=EMBED), greedy.prompts([IDS], 8, None, 64)
    kept = greedy.shared(base, base, started, cache=partial(base.cache, scheme=SCHEMES["int8"]))
    coarse = greedy.shared(base, base, started, cache=partial(base.cache, scheme=SCHEMES["int4"]))
    assert coarse.mean() < 20
    assert coarse.mean() < kept.mean()


def test_prompts_are_from_all_over_the_text() -> None:
    assert greedy.prompts([IDS], 2, None, 64).tolist() == [IDS[:8], IDS[40:48]]
    assert greedy.prompts([IDS[:20], IDS[:7], IDS[20:40]], 4, None, 64).tolist() == [
        IDS[:8], IDS[8:16], IDS[20:28], IDS[28:36],
    ]  # fmt: skip
    assert greedy.prompts([IDS], 3, 1, 64).tolist() == [[1, *IDS[at : at + 7]] for at in (0, 28, 56)]


def test_measure_has_them_with_their_protocol(tiny_decoder: Make) -> None:
    base, model = tiny_decoder(0, tensors=EMBED), tiny_decoder(0, scheme="w4g32", tensors=EMBED)
    report = measure(model, IDS, base=base, context=16, prompts=6)
    lengths = greedy.shared(model, base, greedy.prompts([IDS], 6, None, 64))
    found = report.to_dict()
    assert found["greedy"] == np.mean(lengths)
    low, high = found["intervals"]["greedy"]
    assert lengths.min() <= low <= found["greedy"] <= high <= lengths.max()
    assert found["protocol"]["greedy"] == "6 prompts of 8 tokens, continued by 20" == report.table().splitlines()[-1]
    plain = measure(model, IDS, base=base, context=16).to_dict()
    assert plain["greedy"] is None
    assert plain["protocol"].keys() == found["protocol"].keys() - {"greedy"}
    assert all(plain[name] == found[name] for name in plain.keys() - {"greedy", "intervals", "protocol"})


def test_what_cannot_be_is_refused_first(tiny_decoder: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_decoder(0, tensors=EMBED)
    with user_error("text_too_short"):
        measure(base, IDS, base=base, context=16, prompts=12)
    with user_error("option_missing"):
        measure(base, IDS, context=16, prompts=2)
    monkeypatch.setattr(greedy, "LENGTH", 60)
    with user_error("context_exceeded"):
        measure(base, IDS, base=base, context=16, prompts=2)
