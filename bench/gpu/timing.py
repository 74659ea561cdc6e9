"""Time on a GPU, and the two roofs that it is set against, measured in the same run.

A call is recorded into a CUDA graph once for every set of operands, so that neither Python nor launches are in the
time, and the sets together are larger than the card's cache, so that each reads memory. Under Triton's interpreter,
where nothing of this exists, a call is run once: that shows that a bench runs, and its figures mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from attar.kernels.triton import backend

DEVICE = "cpu" if backend.interpreted() else "cuda"
HALF = torch.float16 if backend.interpreted() else torch.bfloat16  # the interpreter's bfloat16 is wrong
COLD = 512 << 20  # bytes of operands that no cache holds
REPEATS = 7
AT_LEAST = 0.02  # seconds of one measurement

Call = Callable[[], object]


def seconds(calls: Sequence[Call]) -> float:
    """Of one call: the median over repeats of the mean over `calls`, which do the same with other operands."""
    if backend.interpreted():
        start = time.perf_counter()
        calls[0]()
        return time.perf_counter() - start
    replay = recorded(calls)
    once = _elapsed(replay, 1)
    times = max(1, int(AT_LEAST / once))
    return statistics.median(_elapsed(replay, times) for _ in range(REPEATS)) / times / len(calls)


def recorded(calls: Sequence[Call]) -> Call:
    """The calls as one CUDA graph, replayed by calling it; first run once, so that everything is compiled."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph.replay


def eager(call: Call) -> float:
    """Seconds of a call that is too large for launches to matter, median of as many as the clocks need to rise."""
    if backend.interpreted():
        return _elapsed(call, 1)
    call()
    return statistics.median(_elapsed(call, 1) for _ in range(REPEATS))


def _elapsed(call: Call, times: int) -> float:
    if backend.interpreted():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    start_at, end_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_at.record()
    for _ in range(times):
        call()
    end_at.record()
    torch.cuda.synchronize()
    milliseconds: float = start_at.elapsed_time(end_at)
    return milliseconds / 1e3


def copies(size: int) -> int:
    """Sets of operands of `size` bytes that are cold together."""
    return 1 if backend.interpreted() else max(1, min(64, -(-COLD // size)))


def copy_bandwidth() -> float:
    """Bytes read and written a second by torch's copy of memory."""
    size = 1 << 16 if backend.interpreted() else 2 << 30
    source, target = (torch.ones(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    return 2 * size / eager(lambda: target.copy_(source))  # a graph would leave it to the slower copy engines


def dense_rate(kind: str) -> float:
    """Multiplications and additions a second of torch's own product of random numbers: bf16, int8 or fp8. NaN where the
    card has no such."""
    size = 64 if backend.interpreted() else 8192
    a, b = (torch.randn(size, size, device=DEVICE) for _ in range(2))
    if kind == "bf16" or backend.interpreted():
        half = (a.bfloat16(), b.bfloat16().t())
        call: Call = lambda: half[0] @ half[1]  # noqa: E731
    elif kind == "int8":
        codes = [(x * 30).round().clamp(-127, 127).to(torch.int8) for x in (a, b)]
        call = lambda: torch._int_mm(codes[0], codes[1].t())  # noqa: E731
    elif torch.cuda.get_device_capability() >= (8, 9):
        eights, one = [x.to(torch.float8_e4m3fn) for x in (a, b)], torch.ones((), device=DEVICE)
        call = lambda: torch._scaled_mm(  # noqa: E731
            eights[0], eights[1].t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    else:
        return float("nan")
    return 2.0 * size**3 / seconds([call])


ROOFS: Mapping[str, Callable[[], float]] = {
    "copy": copy_bandwidth, **{kind: partial(dense_rate, kind) for kind in ("bf16", "int8", "fp8")}
}  # fmt: skip
