"""Recorded steps: a replay on new numbers gives the bits that the calls themselves would."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from attar import _native
from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels.native import extension, rows
from attar.kernels.native import linear as products
from attar.kernels.operands import Linear, Norm

HIDDEN, WIDE, VOCAB = 64, 96, 50


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Block:
    """A small feed-forward model: embedding, norm, gate and up side by side, activation, down, head."""

    def __init__(self) -> None:
        arena = _native.Arena()

        def linear(scheme: str, outputs: int, inputs: int) -> Linear:
            made = Linear(f"{outputs}x{inputs}", codec("int").quantize(randn(outputs, inputs), Scheme.parse(scheme)))
            products.prepare(made, arena)
            return made

        self.gate, self.up = linear("w4g32", WIDE, HIDDEN), linear("w4g32", WIDE, HIDDEN)
        self.down, self.head = linear("w8a8", HIDDEN, WIDE), linear("w8g32-asym", VOCAB, HIDDEN)
        self.norm = Norm("rms", torch.ones(HIDDEN), prepared=True)
        assert isinstance(self.head.weight, products.PackedWeight)
        self.table = rows.Table(self.head.weight)

    def __call__(self, ids: Tensor) -> Tensor:
        stream = rows.embed(self.table, ids, 1.0)
        stream, x = rows.norm(stream, None, self.norm)
        x = products.linear(x, [self.gate, self.up])
        x = products.linear(rows.activate(x, "silu", True), [self.down])
        stream, x = rows.norm(stream, x, self.norm)
        return products.linear(x[1:], [self.head])  # a view: nothing is computed


def test_a_replay_gives_the_bits_of_the_calls() -> None:
    block, ids = Block(), torch.tensor([3, 14, 15])
    with extension.record() as recording:
        out = block(ids)
    for seed in range(5):
        ids.copy_(torch.randint(0, VOCAB, (3,), generator=torch.Generator().manual_seed(seed)))
        out.fill_(torch.nan)
        recording.replay()
        assert torch.equal(out, block(ids))


def test_what_is_recorded_is_also_computed() -> None:
    block, ids = Block(), torch.tensor([1, 2, 3])
    plain = block(ids)
    with extension.record() as recording:
        out = block(ids)
    assert torch.equal(out, plain)
    assert [function.__name__ for function, _ in recording.calls] == [
        "embed", "norm", "linear", "activate", "linear", "norm", "linear",
    ]  # fmt: skip


def test_a_recording_keeps_the_memory_it_writes_to() -> None:
    block, ids = Block(), torch.tensor([1, 2, 3])
    with extension.record() as recording:
        out = block(ids)
    held = [torch.full((VOCAB, HIDDEN), torch.nan) for _ in range(50)]  # would take what was let go
    gc.collect()
    recording.replay()
    assert torch.equal(out, block(ids))
    assert all(each.isnan().all() for each in held)


def test_a_replay_of_many_rows_in_large_memory() -> None:
    """Results of megabytes come from memory that is used again: not from what a recording holds."""
    block, ids = Block(), torch.arange(6000) % VOCAB
    with extension.record() as recording:
        out = block(ids)
    want = block(ids).clone()
    ids.copy_(ids.flip(0))
    recording.replay()
    assert torch.equal(out, block(ids))
    assert not torch.equal(out, want)


@pytest.mark.parametrize(
    "operation",
    [lambda x: x + 1, lambda x: x.clone(), lambda x: x.contiguous() if x.t_() is x else x.t().contiguous(),
     lambda x: x.fill_(0), lambda x: x[torch.tensor([0])], lambda x: torch.cat([x, x]), lambda x: x.double()],
    ids=["add", "clone", "contiguous", "fill", "index", "cat", "to"],
)  # fmt: skip
def test_what_torch_computes_is_refused(operation: object) -> None:
    x = randn(3, 4)
    assert callable(operation)
    with pytest.raises(RuntimeError, match="computed by torch"), extension.record():
        operation(x)
    assert torch.equal(x, randn(3, 4))


def test_an_error_ends_the_recording() -> None:
    block, bad, ids = Block(), torch.tensor([VOCAB, 0]), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="a row that the table does not have"), extension.record():
        block(bad)
    assert torch.equal(block(ids) + 0, block(ids))  # torch computes again
    with extension.record() as recording:
        block(ids)
    assert len(recording.calls) == 7


def test_recordings_do_not_nest() -> None:
    with extension.record(), pytest.raises(AssertionError, match="do not nest"), extension.record():
        pass
