"""A whole decoder on Triton's kernels, interpreted: prompts in pieces, then tokens, by the numbers of the reference."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: `make test-triton` has it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 interprets the kernels: `make test-triton` sets it", allow_module_level=True)

from attar.execution.cuda_graphs import Record, Recorded
from attar.execution.model_runner import Runner
from attar.kernels import dispatch
from attar.kernels.triton.pages import PlainPages
from attar.kv.schemes import SCHEMES
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import ScheduledTokens, StepPlan

INT8 = 0.02  # of logits, where keys and values are codes, of which some fall to the neighbour
ROUNDED = 0.02  # of logits, where rows are: a number on the border of two codes may take the other
TOLERANCE = 2e-5  # of logits, relative to the largest: two orders of the same float32 sums, through three blocks


@pytest.mark.parametrize("scheme", [None, "w4g32-asym", "qserve-g64"])
def test_prompts_in_pieces_then_tokens(scheme: str | None, tiny_decoder: Callable[..., Decoder]) -> None:
    store = dispatch.store()
    assert isinstance(store, dispatch.GpuWeights)
    ours, theirs = tiny_decoder(scheme=scheme, store=store), tiny_decoder(scheme=scheme)
    assert not store.refused
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    cache = ours.cache(32, batch=2)
    assert isinstance(cache.layers[0], PlainPages)
    pieces, at = [], 0
    for rows in (13, 9, 1, 1):
        step = ForwardBatch((rows, rows), 32, cache)
        pieces.append(ours.forward(ids[:, at : at + rows].flatten(), step).view(2, rows, -1))
        at += rows
    expected = theirs.forward(ids.flatten(), ForwardBatch((24, 24), 32)).view(2, 24, -1)
    most = ROUNDED if scheme == "qserve-g64" else TOLERANCE
    assert (torch.cat(pieces, 1) - expected).abs().max() <= most * expected.abs().max()


def test_steps_in_graphs_of_more_rows(tiny_decoder: Callable[..., Decoder]) -> None:
    """What a server does on a card, but for the recording: two sequences in a graph of four rows, with int8 pages; the
    rows left over write to a block of their own."""
    ours, theirs = tiny_decoder(layers=2, store=dispatch.store()), tiny_decoder(layers=2)
    prompts = [[5, 9, 3, 7], [11]]

    def run(decoder: Decoder, record: Record | None) -> tuple[torch.Tensor, Runner]:
        runner = Runner(decoder, 2, 64, SCHEMES["int8"], 4, None, record)
        chunks = []
        for i, prompt in enumerate(prompts):
            sequence = Sequence(id=str(i), prompt_ids=prompt, max_tokens=4)
            sequence.blocks = [i]
            chunks.append(ScheduledTokens(sequence, 0, len(prompt), True))
        runner.run(StepPlan(chunks))
        found = []
        for token in (1, 2, 3):
            for chunk in chunks:
                chunk.sequence.tokens.append(token)
            chunks = [ScheduledTokens(each.sequence, len(each.sequence.tokens) - 1, 1, True) for each in chunks]
            found.append(runner.run(StepPlan(chunks)).clone())
        return torch.stack(found), runner

    def again(call: Callable[[], torch.Tensor]) -> Recorded:
        result = call()
        return Recorded(lambda: result.copy_(call()), result)

    found, runner = run(ours, again)
    expected, _ = run(theirs, None)
    assert (found - expected).abs().max() <= INT8 * expected.abs().max()
    assert isinstance(runner.pages[0], PlainPages)
    assert runner.pages[0].blocks == 3
    assert runner.pages[0].keys[2].any(), "nobody's block was written"
    assert runner.pages[0].keys[:2, :, 10:].abs().max() == 0
