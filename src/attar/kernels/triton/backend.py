"""Availability of Triton's kernels on this machine. Nothing of Triton is imported before a kernel is needed.

Under `TRITON_INTERPRET=1`, Triton's own flag, the kernels are interpreted, and this backend takes tensors in ordinary
memory and no others. The kernels are tested in this way without a GPU; it is too slow for anything else.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from attar.errors import UserError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST = (8, 0)  # Ampere: bfloat16 in the tensor cores

OPS = frozenset({"embed", "norm", "linear", "activate", "write_kv", "paged_attention", "argmax", "gumbel_max", "mask"})
"""Operations that exist in Triton."""


def interpreted() -> bool:
    """Return whether kernels are interpreted, on tensors in ordinary memory."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kind_of(device: torch.device | str) -> str:
    """Return the device type, `cuda` of `cuda:1`. Text is split here: a recording of native calls refuses to make
    devices."""
    return device.type if isinstance(device, torch.device) else device.partition(":")[0]


def takes(device: torch.device | str) -> bool:
    """Return whether this backend takes tensors of this device."""
    return kind_of(device) == ("cpu" if interpreted() else "cuda")


def supports(op: str, device: str, dtype: torch.dtype) -> str | None:
    """Return why `op` cannot run in Triton on rows of `dtype` on a `device` type, or None where it can."""
    if op not in OPS:
        return "has no Triton kernel"
    if not takes(device):
        return f"is for {'cpu' if interpreted() else 'cuda'} tensors, not {device}"
    takes_rows = (torch.float64,) if op in ("gumbel_max", "mask") else DTYPES
    if dtype not in takes_rows:
        names = " or ".join(str(each).removeprefix("torch.") for each in takes_rows)
        return f"takes {names} rows, not {str(dtype).removeprefix('torch.')}"
    return unavailable()


@functools.cache
def unavailable() -> str | None:
    """Return why no kernel can run in this process, or None where they do."""
    if not interpreted() and not torch.cuda.is_available():
        built = "" if torch.version.cuda else ": this build of torch is for CPUs alone"
        return f"torch finds no CUDA device{built}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: `pip install triton`"
    if not interpreted() and torch.cuda.get_device_capability() < OLDEST:
        return f"{torch.cuda.get_device_name()} is older than Ampere, which the kernels need"
    return None


def require(device: torch.device | str) -> None:
    """Raise ValueError, with a message for users, where `device` is no CPU and attar cannot compute on it."""
    kind = kind_of(device)
    if kind == "cpu":
        return
    if kind != "cuda":
        raise UserError("device_unsupported", f"attar computes on cpu and cuda, not on {device}")
    reason = "TRITON_INTERPRET=1 keeps the kernels on CPUs" if interpreted() else unavailable()
    if reason is None:
        number, there = str(device).partition(":")[2], torch.cuda.device_count()
        if number and not (number.isdecimal() and int(number) < there):
            reason = f"torch finds {there} CUDA device{'s' if there > 1 else ''}, numbered from 0"
    if reason is not None:
        raise UserError("device_unavailable", f"cannot compute on {device}: {reason}")


def same_device(*tensors: Tensor | None) -> None:
    """Raise ValueError where tensors of one call lie on several devices."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"one kernel, several devices: {', '.join(sorted(map(str, devices)))}")
