"""Decode steps on a GPU: recorded as CUDA graphs, and replayed.

A step is some hundreds of kernels, most of them shorter than the time in which Python launches one. What they do does
not change from token to token, only numbers in fixed places do. So a step is recorded once for a few numbers of rows,
the powers of two and the largest, and replayed by one call: a step of n sequences in the smallest graph that has n
rows. Rows that are left over are a sequence of one token, whose key goes to a block that belongs to nobody
(`Graphs.spare`); nobody reads what they give.

Everything that is new in a step, token ids, positions, slots, lengths and block tables, lies in one piece of memory for
each graph. It is filled on the host and sent in one copy, which stands in line behind the step before. Whoever fills it
again waits until that copy has been made (`Inputs`). From one step to the next that is no wait, also where the next is
launched before this one is over: the step before it is, and so is the copy behind that. Of a step that runs in pieces
it is one, for the piece before. Token ids that only the device knows are written there behind the copy.

All graphs take their memory from one pool, the largest first, so together they need little more than that one: they
never run at the same time, and what a graph leaves is read before the next runs. Their logits alone are kept apart.

Not recorded, and `against` says which it is, in the log at the start:

* steps with pieces of prompts, where launches are few beside the work;
* mixtures of experts: in each layer the host reads whom the router chose, once, and launches each expert on its own
  rows, so launches and shapes are those of the tokens. All experts on all rows would be the same in every step, but
  read all weights where few are wanted, in the very steps that are bound by reading; a kernel that takes an expert's
  number a row would do, and there is none;
* models whose angles depend on the length of a sequence;
* several processes: graphs would hold their exchanges, and all processes would have to record and replay the same ones
  in the same order. Nothing in the way of it is known, and no card was at hand to find out on two of them.

How a step is recorded is an argument (`Record`): on a GPU `CudaRecorder`, in tests whatever runs it again.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attar.kernels.ops import TritonStore
from attar.kv.pages import Pages, Placement
from attar.model.cache import ALIGNED, KVCache, Step
from attar.model.decoder import Decoder
from attar.model.parallel import SplitDecoder


@dataclass(frozen=True, slots=True)
class Recorded:
    """A call that was recorded: `replay` does again what it did, on the same tensors, and `result` is what it gave."""

    replay: Callable[[], None]
    result: Tensor


Record = Callable[[Callable[[], Tensor]], Recorded]
"""How a call is recorded. It is made once or more."""


class CudaRecorder:
    """Calls as CUDA graphs of one pool of memory, on a stream of their own.

    A call first runs as it is: kernels are compiled then, and weights laid side by side, which a graph could not hold.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, call: Callable[[], Tensor]) -> Recorded:
        outside = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            call()
        outside.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the card: what is forbidden while a graph is recorded is forbidden to this one alone.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = call()
        return Recorded(graph.replay, result)


def against(decoder: Decoder) -> str | None:
    """The reason why decode steps of this model cannot be recorded as graphs, or None where they can."""
    if isinstance(decoder, SplitDecoder):
        return "several processes compute a step together"
    if not isinstance(decoder.store, TritonStore):
        return "the model is not laid out for the kernels of a GPU"
    if decoder.store.refused:
        name, reason = next(iter(decoder.store.refused.items()))
        return f"{name}: {reason}"
    if decoder.by_token is not None:
        return decoder.by_token
    if any(rope is not None and rope.grows for rope in decoder.config.ropes):
        return "angles depend on how long a sequence can get"
    return None


def sizes(most: int) -> tuple[int, ...]:
    """The numbers of rows that have a graph, where steps have at most `most`: powers of two, and that number."""
    powers = itertools.takewhile(lambda rows: rows < most, (1 << i for i in itertools.count()))
    return (*powers, most)


class Mark(Protocol):
    """A place in what a device has been told to do."""

    def set(self) -> None:
        """Behind all that it was told until now."""

    def wait(self) -> None:
        """Until the device has come there."""


class CudaMark:
    """On the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()

    def set(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.synchronize()


class Here:
    """On a CPU, which has done everything by the time that the call comes back."""

    def set(self) -> None:
        pass

    def wait(self) -> None:
        pass


def mark(device: torch.device) -> Mark:
    return CudaMark(device) if device.type == "cuda" else Here()


class Inputs:
    """What a decode step of `rows` rows, with block tables `width` wide, is told: on the host, and on `device` in
    places that do not change. Blocks hold `block` tokens; the block `spare` belongs to nobody.

    A GPU copies what `send` sends when its turn comes, so `put` and `rest` wait for that before they write.
    """

    def __init__(self, rows: int, width: int, block: int, spare: int, device: torch.device) -> None:
        self.block, self.spare = block, spare
        narrow, wide = (torch.int32, (rows,)), (torch.int64, (rows,))
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [wide, wide, narrow, narrow, (torch.int32, (rows, width))]
        lengths = [-(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED for dtype, shape in shapes]
        self._host = torch.zeros(sum(lengths), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.zeros(sum(lengths), dtype=torch.uint8, device=device)
        self._copied = mark(device)
        self._sent = False  # and perhaps not copied yet

        def parts(whole: Tensor) -> list[Tensor]:
            pieces = zip(whole.split(lengths), shapes, strict=True)
            return [
                piece[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape) for piece, (dtype, shape) in pieces
            ]

        self._ids, self._slots, self._positions, self._lengths, self._tables = (
            part.numpy() for part in parts(self._host)
        )
        self.ids, slots, positions, filled, tables = parts(self._there)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.place = Placement(starts, filled, tables, positions, slots)
        self._held: list[list[int]] = [[]] * rows  # the blocks that each row of the table lists
        self.rest(0)

    def put(self, row: int, token: int, at: int, blocks: Sequence[int]) -> None:
        """The row is the token at position `at` of a sequence in `blocks`."""
        self._wait()
        if self._held[row] != blocks:  # few steps bring a block, and fewer swap one for the prefix tree's
            self._tables[row, : len(blocks)] = blocks
            self._held[row] = list(blocks)
        self._ids[row] = token
        self._positions[row] = at
        self._lengths[row] = at + 1
        self._slots[row] = blocks[at // self.block] * self.block + at % self.block

    def rest(self, first: int) -> None:
        """The rows from `first` on are nobody's, whatever was put there: also by a step that raised before it ran."""
        self._wait()
        self._ids[first:] = self._positions[first:] = 0
        self._lengths[first:] = 1
        self._slots[first:] = self.spare * self.block
        self._tables[first:, 0] = self.spare
        self._held[first:] = [[self.spare]] * len(self._held[first:])

    def send(self) -> None:
        """To the device."""
        self._there.copy_(self._host, non_blocking=True)
        self._copied.set()
        self._sent = True

    def _wait(self) -> None:
        if self._sent:
            self._copied.wait()
            self._sent = False


class _Told(KVCache):
    """A cache whose next rows are where the inputs of a graph say."""

    told: Placement

    @classmethod
    def by(cls, told: Placement, pages: list[Pages], tables: Tensor) -> _Told:
        made = cls.over(pages, tables, [0] * len(tables))
        assert isinstance(made, _Told)
        made.told = told
        return made

    def place(self, lengths: tuple[int, ...]) -> Placement:
        return self.told


class Graph:
    """The decode step of `rows` rows, recorded: `inputs.put` the first of them, then `run`.

    Recording runs the step: on nobody's rows, or on those that `first` puts.
    """

    def __init__(
        self,
        decoder: Decoder,
        pages: list[Pages],
        rows: int,
        context: int,
        spare: int,
        record: Record,
        first: Callable[[Inputs], None] | None = None,
    ) -> None:
        width, block = -(-context // pages[0].block), pages[0].block
        self.inputs = Inputs(rows, width, block, spare, pages[0].keys.device)
        self.rows = rows
        if first is not None:
            first(self.inputs)
        self.inputs.send()
        view = _Told.by(self.inputs.place, pages, torch.zeros((rows, width), dtype=torch.int32))

        def call() -> Tensor:
            view.filled = [0] * rows
            self._step = Step((1,) * rows, context, view)  # which holds the angles that the graph reads
            return decoder.forward(self.inputs.ids, self._step)

        self._recorded = record(call)

    def run(self, count: int, complete: Callable[[Tensor], None] | None = None) -> Tensor:
        """The logits behind the first `count` rows, float32 [count, vocab]. The next step overwrites them. `complete`
        writes token ids that only the device knows, among those that were put [rows]."""
        if count < self.rows:
            self.inputs.rest(count)
        self.inputs.send()
        if complete is not None:
            complete(self.inputs.ids)
        self._recorded.replay()
        return self._recorded.result[:count]


class Graphs:
    """The graphs of steps of up to `most` sequences, of up to `context` tokens, over `pages`, whose last block is
    nobody's. Each is recorded when it is first wanted, or all at once by `record_all`."""

    def __init__(self, decoder: Decoder, pages: list[Pages], context: int, most: int, record: Record) -> None:
        self.sizes, self.spare = sizes(most), pages[0].blocks - 1
        self._decoder, self._pages, self._context, self._record = decoder, pages, context, record
        self._made: dict[int, Graph] = {}

    def of(self, count: int) -> Graph:
        """The smallest that has so many rows."""
        rows = self.sizes[bisect_left(self.sizes, count)]
        if rows not in self._made:
            self._made[rows] = Graph(self._decoder, self._pages, rows, self._context, self.spare, self._record)
        return self._made[rows]

    def record_all(self) -> None:
        """The largest first, from whose memory the others take theirs."""
        for rows in reversed(self.sizes):
            self.of(rows)
