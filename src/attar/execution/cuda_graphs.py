"""Decode steps on a GPU: recorded as CUDA graphs, and replayed.

A step is some hundreds of kernels, most of them shorter than Python's time to launch one. Their work is the same for
every token; only numbers in fixed places change. So a step is recorded once for a few numbers of rows, the powers of
two and the largest, and replayed by one call: a step of n rows uses the smallest graph with n rows. Unused rows
are a sequence of one token whose key goes to a block that no sequence owns (`Graphs.spare`); their results are not
read.

A step's inputs, token ids, positions, slots, lengths and block tables, lie in one piece of memory for each graph. It is
filled on the host and sent in one copy, queued behind the step before. The next filling waits until that copy has been
made (`Inputs`). From one step to the next that is no wait, even where the next is launched before this one is over: the
step before it is, and so is the copy behind that. Within a step that runs in pieces it is a wait for the piece before.
Token ids that only the device knows are written there behind the copy.

All graphs take their memory from one pool, the largest first, so together they need little more than that one: they
never run at the same time, and a graph's results are read before the next runs. Only their logits are stored
separately.

Not recorded, for reasons that `against` gives and the log shows at the start:
* steps with pieces of prompts, whose launches cost little beside their work;
* mixtures of experts: in each layer the host reads the router's choice, once, and launches each expert on its own rows,
  so launches and shapes depend on the tokens. Running all experts on all rows would be the same in every step, but
  would read all weights where few are needed, in the very steps that are bound by reading. A kernel that takes an
  expert's number a row would solve this, and there is none;
* models whose angles depend on the length of a sequence;
* several processes: graphs would hold their exchanges, and all processes would have to record and replay the same ones
  in the same order. No obstacle is known, but it was never tried on two GPUs.

The way a step is recorded is an argument (`Record`): on a GPU `CudaRecorder`, in tests any function that runs it again.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attar.kernels.triton.store import GpuWeights
from attar.kv.pages import AttentionMetadata, PagedKV
from attar.model.cache import ALIGNED, ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.parallel import SplitDecoder


class Recorded(NamedTuple):
    """A recorded call: `replay` repeats it on the same tensors, and `result` is its result."""

    replay: Callable[[], None]
    result: Tensor


Record = Callable[[Callable[[], Tensor]], Recorded]  # a function that records a call, which it makes once or more


class CudaRecorder:
    """A recorder of calls as CUDA graphs of one pool of memory, on a stream of their own.

    A call first runs without recording: kernels are compiled then, and weights laid side by side, which a graph could
    not hold.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __call__(self, call: Callable[[], Tensor]) -> Recorded:
        outside = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            call()
        outside.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may use the GPU: operations forbidden during a recording are forbidden to this thread alone.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = call()
        return Recorded(graph.replay, result)


def against(decoder: Decoder) -> str | None:
    """Return why decode steps of this model cannot be recorded as graphs, or None where they can."""
    if isinstance(decoder, SplitDecoder):
        return "several processes compute a step together"
    if not isinstance(decoder.store, GpuWeights):
        return "the model is not laid out for the kernels of a GPU"
    if decoder.store.refused:
        name, reason = next(iter(decoder.store.refused.items()))
        return f"{name}: {reason}"
    if decoder.by_token is not None:
        return decoder.by_token
    if decoder.config.angles_grow:
        return "angles depend on how long a sequence can get"
    return None


def sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of rows that have a graph, for steps of at most `most`: powers of two, and `most`."""
    powers = itertools.takewhile(lambda rows: rows < most, (1 << i for i in itertools.count()))
    return (*powers, most)


class Mark:
    """A point in the work queued on a device: nothing on a CPU, whose calls return only when their work is done."""

    def set(self) -> None:
        """Move the mark behind all work queued until now."""

    def wait(self) -> None:
        """Wait until the device has reached the mark."""


class CudaMark(Mark):
    """A mark on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event()

    def set(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._event.synchronize()


def mark(device: torch.device) -> Mark:
    return CudaMark(device) if device.type == "cuda" else Mark()


class Inputs:
    """Inputs of a decode step of `rows` rows, with block tables `width` wide: on the host, and at fixed addresses on
    `device`.

    Blocks hold `block` tokens; no sequence owns the block `spare`. There are two where layers with a sliding window
    have blocks of their own. A GPU copies sent inputs when its turn comes, so `put` and `rest` wait for that before
    they write.
    """

    def __init__(self, rows: int, width: int, block: int, spare: tuple[int, ...], device: torch.device) -> None:
        self.block, self.spare = block, spare
        narrow, wide, table = (torch.int32, (rows,)), (torch.int64, (rows,)), (torch.int32, (rows, width))
        shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [wide, narrow, narrow, *[wide, table] * len(spare)]
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

        self._ids, self._positions, self._lengths, *host = (part.numpy() for part in parts(self._host))
        self._slots, self._tables = host[::2], host[1::2]  # of each group of layers
        self.ids, positions, filled, *there = parts(self._there)
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.place, *others = (
            AttentionMetadata(starts, filled, tables, positions, slots)
            for slots, tables in zip(there[::2], there[1::2], strict=True)
        )
        self.sliding = others[0] if others else None  # the placement in layers with a sliding window
        self._held: list[list[list[int]]] = [[[]] * rows for _ in spare]  # blocks that each row of the tables lists
        self.rest(0)

    def put(self, row: int, token: int, at: int, blocks: Sequence[int], sliding: Sequence[int] = ()) -> None:
        """Make the row the token at position `at` of a sequence in `blocks`, and in `sliding` where layers with a
        sliding window have blocks of their own."""
        self._wait()
        self._ids[row] = token
        self._positions[row] = at
        self._lengths[row] = at + 1
        for of, slots, tables, held in zip((blocks, sliding), self._slots, self._tables, self._held, strict=False):
            if held[row] != of:  # few steps bring a block, and fewer swap one for the prefix tree's
                tables[row, : len(of)] = of
                held[row] = list(of)
            slots[row] = of[at // self.block] * self.block + at % self.block

    def rest(self, first: int) -> None:
        """Clear the rows from `first` on, whatever was put there, even by a step that raised before it ran."""
        self._wait()
        self._ids[first:] = self._positions[first:] = 0
        self._lengths[first:] = 1
        for spare, slots, tables, held in zip(self.spare, self._slots, self._tables, self._held, strict=True):
            slots[first:] = spare * self.block
            tables[first:, 0] = spare
            held[first:] = [[spare]] * len(held[first:])

    def send(self) -> None:
        """Send the inputs to the device."""
        self._there.copy_(self._host, non_blocking=True)
        self._copied.set()
        self._sent = True

    def _wait(self) -> None:
        if self._sent:
            self._copied.wait()
            self._sent = False


class _Told(KVCache):
    """A cache whose next rows are placed by the inputs of a graph."""

    told: AttentionMetadata
    told_sliding: AttentionMetadata | None

    def place(self, lengths: tuple[int, ...]) -> AttentionMetadata:
        return self.told

    def place_sliding(self, place: AttentionMetadata, lengths: tuple[int, ...]) -> AttentionMetadata | None:
        return self.told_sliding


class Graph:
    """The decode step of `rows` rows, recorded: `inputs.put` the first of them, then `run`.

    Recording runs the step: on unused rows, or on those that `first` puts.
    """

    def __init__(
        self,
        decoder: Decoder,
        pages: list[PagedKV],
        rows: int,
        context: int,
        spare: tuple[int, ...],
        record: Record,
        first: Callable[[Inputs], None] | None = None,
    ) -> None:
        width, block = -(-context // pages[0].block), pages[0].block
        self.rows, self.inputs = rows, Inputs(rows, width, block, spare, pages[0].keys.device)
        if first is not None:
            first(self.inputs)
        self.inputs.send()
        view = _Told.over(pages, torch.zeros((rows, width), dtype=torch.int32), [0] * rows)
        assert isinstance(view, _Told)
        view.told, view.told_sliding = self.inputs.place, self.inputs.sliding

        def call() -> Tensor:
            view.filled = [0] * rows
            self._step = ForwardBatch((1,) * rows, context, view)  # holds the angles that the graph reads
            return decoder.forward(self.inputs.ids, self._step)

        self._recorded = record(call)

    def run(self, count: int, complete: Callable[[Tensor], None] | None = None) -> Tensor:
        """Return the logits behind the first `count` rows, float32 [count, vocab]. The next step overwrites them.
        `complete` writes token ids that only the device knows among those that were put [rows]."""
        if count < self.rows:
            self.inputs.rest(count)
        self.inputs.send()
        if complete is not None:
            complete(self.inputs.ids)
        self._recorded.replay()
        return self._recorded.result[:count]


class Graphs:
    """The graphs of steps of up to `most` rows, of sequences of up to `context` tokens, over `pages`.

    The last block of the pages belongs to no sequence. With `sliding`, layers with a sliding window have blocks of
    their own, and a last one. Each graph is recorded on first use, or all at once by `record_all`.
    """

    def __init__(
        self,
        decoder: Decoder,
        pages: list[PagedKV],
        context: int,
        most: int,
        record: Record,
        sliding: bool = False,
    ) -> None:
        last = {w is not None: each.blocks - 1 for each, w in zip(pages, decoder.config.windows, strict=True)}
        self.sizes, self.most = sizes(most), most
        self.spare = (last.get(False, 0), last[True]) if sliding else (pages[0].blocks - 1,)
        self._decoder, self._pages, self._context, self._record = decoder, pages, context, record
        self._made: dict[int, Graph] = {}

    def of(self, count: int) -> Graph:
        """Return the smallest graph that has `count` rows."""
        rows = self.sizes[bisect_left(self.sizes, count)]
        if rows not in self._made:
            self._made[rows] = Graph(self._decoder, self._pages, rows, self._context, self.spare, self._record)
        return self._made[rows]

    def record_all(self) -> None:
        """Record all graphs, the largest first: the others reuse its memory."""
        for rows in reversed(self.sizes):
            self.of(rows)
