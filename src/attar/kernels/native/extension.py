"""The compiled extension: loading it, what of it this machine can run, and the one way to call it.

The modules of this room are the CPU backend: operations of `ops.py` that exist as C++, checked here and called by
address. This module alone imports the extension, and it imports torch first: both then share one OpenMP runtime, so one
pool of threads that `torch.set_num_threads` sizes. Where the extension does not load, the modules still do, and
`supports` gives the reason, which `attar doctor` shows.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from attar import env

try:
    from attar import _native as library

    _unavailable: str | None = None
except ImportError as error:
    _unavailable = f"the compiled extension does not load ({error}); `pip install .` builds it"

_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {"quantize_rows_int8": (torch.float32, torch.bfloat16)}
"""The operations that exist in C++, and the rows they take."""


def supports(op: str, device: str, dtype: torch.dtype) -> str | None:
    """The reason why `op` cannot run natively on rows of `dtype` on a `device` type, or None where it can."""
    if op not in _DTYPES:
        return "has no CPU kernel"
    if device != "cpu":
        return f"is for cpu tensors, not {device}"
    if dtype not in _DTYPES[op]:
        names = " or ".join(str(known).removeprefix("torch.") for known in _DTYPES[op])
        return f"takes {names} rows, not {str(dtype).removeprefix('torch.')}"
    return _unavailable


@functools.cache
def cpu_level() -> str:
    """The instruction set level that kernels run at: the machine's highest, or `ATTAR_CPU`.

    Raises ValueError where `ATTAR_CPU` asks for one that this machine cannot run.
    """
    available = library.levels()
    forced = env.get().cpu
    if forced is not None and forced not in available:
        raise ValueError(
            f"ATTAR_CPU={forced}, but this machine runs only {', '.join(available)}: unset it or choose one"
        )
    return forced or available[-1]


def loaded() -> bool:
    """Whether the compiled extension could be loaded."""
    return _unavailable is None


def features() -> Mapping[str, bool]:
    """Instruction sets that the processor has and the operating system supports; empty without the extension."""
    return library.features() if loaded() else {}


def openmp() -> bool:
    """Whether the kernels were built to run on several threads."""
    return loaded() and library.openmp


def physical_cores(topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Cores this process may run on, hyper-threads counted once: as many threads as are worth having.

    Where the system does not tell (no affinity or no /sys), its count of logical processors.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list" for cpu in allowed)
    try:
        return len({path.read_text() for path in siblings})
    except OSError:
        return len(allowed)


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the extension."""
    return function(*args)
