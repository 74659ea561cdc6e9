"""The compiled extension: loading it, what of it this machine can run, and the one way to call it.

The modules of this package are the CPU backend: operations of `ops.py` that exist as C++, checked here and called by
address. This module alone imports the extension, and it imports torch first: both then share one OpenMP runtime, whose
number of threads, set by `torch.set_num_threads`, holds for the kernels' own threads too (csrc/pool.h). Where the
extension does not load, the modules still do, and `supports` gives the reason, which `attar doctor` shows.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attar import env, machine
from attar.errors import UserError
from attar.kernels.native.workspace import Workspace

if TYPE_CHECKING:
    from attar._native import Arena as Arena
    from attar._native import Factors as Factors
    from attar._native import LookupFactors as LookupFactors
    from attar._native import LookupMatrix as LookupMatrix
    from attar._native import Matrix as Matrix
    from attar._native import ProgressiveFactors as ProgressiveFactors
    from attar._native import ProgressiveMatrix as ProgressiveMatrix

library: Any  # the extension itself, for the modules of this package; None where it does not load

try:
    from attar import _native

    library = _native
    _unavailable: str | None = None
except ImportError as error:
    library = None
    _unavailable = f"the compiled extension does not load ({error}); `pip install .` builds it"


def number_name(dtype: torch.dtype) -> str:
    """Return the extension's name of a dtype."""
    return str(dtype).removeprefix("torch.")


_FLOAT32 = ("embed", "norm", "linear", "activate", "write_kv", "paged_attention")
_DTYPES = dict.fromkeys(_FLOAT32, (torch.float32,)) | {
    "quantize_rows_int8": (torch.float32, torch.bfloat16),
    "gumbel_max": (torch.float64,),
}
"""Operations that exist in C++, and the row dtypes they take."""


def supports(op: str, device: str, dtype: torch.dtype) -> str | None:
    """Return why `op` cannot run natively on rows of `dtype` on a `device` type, or None where it can."""
    if op not in _DTYPES:
        return "has no CPU kernel"
    if device != "cpu":
        return f"is for cpu tensors, not {device}"
    if dtype not in _DTYPES[op]:
        return f"takes {' or '.join(map(number_name, _DTYPES[op]))} rows, not {number_name(dtype)}"
    return _unavailable


@functools.cache
def cpu_level() -> str:
    """Return the instruction set level of the kernels: the machine's highest, or `ATTAR_CPU`. Raises ValueError where
    `ATTAR_CPU` asks for one that this machine cannot run."""
    available, forced = library.levels(), env.get().cpu
    if forced is not None and forced not in available:
        raise UserError(
            "device_unsupported",
            f"ATTAR_CPU={forced}, but this machine runs only {', '.join(available)}: unset it or choose one",
        )
    return forced or available[-1]


def loaded() -> bool:
    """Return whether the compiled extension could be loaded."""
    return _unavailable is None


def features() -> Mapping[str, bool]:
    """Return the instruction sets that processor and operating system support; empty without the extension."""
    return library.features() if loaded() else {}


def openmp() -> bool:
    """Return whether the kernels were built to run on several threads."""
    return loaded() and library.openmp


def fit_threads() -> None:
    """Limit threads to the cores available: one for each pair of hyper-threads, and what a container may use. The limit
    holds for torch's own operations too. `OMP_NUM_THREADS`, if set, takes precedence."""
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > machine.cores():
        torch.set_num_threads(machine.cores())


class Recording:
    """Native calls in the order they were made, and the tensors whose addresses they hold."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.tensors: list[Tensor] = []

    def replay(self) -> None:
        """Make every call again, on the same memory."""
        for function, args in self.calls:
            function(*args)


_recording: Recording | None = None
_workspace = Workspace()


@contextmanager
def record() -> Iterator[Recording]:
    """Record every native call that this thread makes: the CPU's analogue of capturing a CUDA graph. A torch operation
    that computes would be missing from the replay, so it raises RuntimeError."""
    global _recording
    assert _recording is None, "recordings do not nest"
    _recording = recording = Recording()
    try:
        with _OnlyViews():
            yield recording
    finally:
        _recording = None


class _OnlyViews(TorchFunctionMode):
    """A torch function mode that refuses operations that compute, so that none is lost from a recording.

    A mode of the level below would see every operation, but importing it costs a second for torch's compiler.
    """

    LOOKS = frozenset(
        {"__get__", "__len__", "data_ptr", "dim", "empty", "frombuffer", "is_contiguous", "numel", "shape", "size"}
        | {"split", "stride", "unflatten", "view"}
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        views = name == "contiguous" and args[0].is_contiguous()
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            views = not any(isinstance(i, Tensor | list) for i in index)
        if name not in self.LOOKS and not views:
            raise RuntimeError(f"{name} is computed by torch, so a recorded step would lose it")
        return func(*args, **(kwargs or {}))


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the extension. Every hot call goes through here, so that a step can be recorded."""
    if _recording is not None:
        _recording.calls.append((function, args))
    return function(*args)


def empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uninitialised memory for a result, which a recording keeps."""
    out = _workspace.empty(shape, dtype)
    if _recording is not None:
        _recording.tensors.append(out)
    return out


def busy_seconds() -> float:
    """Return the seconds that this process has spent in kernels; 0 without the extension."""
    return float(library.busy_ns()) / 1e9 if loaded() else 0.0


def prefer_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for a large CPU tensor of zeros that were not touched yet."""
    if loaded() and tensor.device.type == "cpu":
        library.prefer_huge_pages(tensor.data_ptr(), tensor.nbytes)


def release() -> None:
    """Return idle memory of results to the system, for programs that are short of memory between models."""
    _workspace.free.clear()
