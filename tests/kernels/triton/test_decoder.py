"""A whole decoder on Triton's kernels, interpreted: prompts in pieces, then tokens, by the numbers of the reference."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: `make test-triton` has it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 interprets the kernels: `make test-triton` sets it", allow_module_level=True)

from attar.kernels import ops
from attar.kernels.triton.pages import PlainPages
from attar.model.cache import Step
from attar.model.decoder import Decoder

TOLERANCE = 2e-5  # of logits, relative to the largest: two orders of the same float32 sums, through three blocks


@pytest.mark.parametrize("scheme", [None, "w4g32-asym"])
def test_prompts_in_pieces_then_tokens(scheme: str | None, tiny_decoder: Callable[..., Decoder]) -> None:
    store = ops.store()
    assert isinstance(store, ops.TritonStore)
    ours, theirs = tiny_decoder(scheme=scheme, store=store), tiny_decoder(scheme=scheme)
    assert not store.refused
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    cache = ours.cache(32, batch=2)
    assert isinstance(cache.layers[0], PlainPages)
    pieces, at = [], 0
    for rows in (13, 9, 1, 1):
        step = Step((rows, rows), 32, cache)
        pieces.append(ours.forward(ids[:, at : at + rows].flatten(), step).view(2, rows, -1))
        at += rows
    expected = theirs.forward(ids.flatten(), Step((24, 24), 32)).view(2, 24, -1)
    assert (torch.cat(pieces, 1) - expected).abs().max() <= TOLERANCE * expected.abs().max()
