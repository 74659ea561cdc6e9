"""Whether Triton's kernels run here, and on what; nothing of Triton is imported before one does.

Under `TRITON_INTERPRET=1`, Triton's own flag, the kernels are interpreted, and this backend takes tensors in ordinary
memory and no others. That is how the kernels are tested where there is no GPU, and too slow for anything else.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST = (8, 0)  # Ampere: bfloat16 in the tensor cores

OPS = frozenset({"embed", "norm", "linear", "activate", "write_kv", "paged_attention", "argmax"})
"""The operations that exist in Triton."""


def interpreted() -> bool:
    """Whether kernels are interpreted, on tensors in ordinary memory."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def kind_of(device: torch.device | str) -> str:
    """`cuda` of `cuda:1`. Text is cut by hand: making a device of it is what a recording of native calls refuses."""
    return device.type if isinstance(device, torch.device) else device.partition(":")[0]


def takes(device: torch.device | str) -> bool:
    """Whether tensors of this device are this backend's."""
    return kind_of(device) == ("cpu" if interpreted() else "cuda")


def supports(op: str, device: str, dtype: torch.dtype) -> str | None:
    """The reason why `op` cannot run in Triton on rows of `dtype` on a `device` type, or None where it can."""
    if op not in OPS:
        return "has no Triton kernel"
    if not takes(device):
        return f"is for {'cpu' if interpreted() else 'cuda'} tensors, not {device}"
    if dtype not in DTYPES:
        return f"takes bfloat16, float16 or float32 rows, not {str(dtype).removeprefix('torch.')}"
    return unavailable()


@functools.cache
def unavailable() -> str | None:
    """The reason why no kernel can run in this process, or None where they do."""
    if not interpreted() and not torch.cuda.is_available():
        built = "" if torch.version.cuda else ": this build of torch is for CPUs alone"
        return f"torch finds no CUDA device{built}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: `pip install triton`"
    if not interpreted() and torch.cuda.get_device_capability() < OLDEST:
        return f"{torch.cuda.get_device_name()} is older than Ampere, which the kernels need"
    return None


def require(device: torch.device | str) -> None:
    """Raises ValueError, a sentence for whoever asked for it, where `device` is no CPU and cannot be computed on."""
    kind = kind_of(device)
    if kind == "cpu":
        return
    if kind != "cuda":
        raise ValueError(f"attar computes on cpu and cuda, not on {device}")
    reason = "TRITON_INTERPRET=1 keeps the kernels on CPUs" if interpreted() else unavailable()
    if reason is None:
        number, there = str(device).partition(":")[2], torch.cuda.device_count()
        if number and not (number.isdecimal() and int(number) < there):
            reason = f"torch finds {there} CUDA device{'s' if there > 1 else ''}, numbered from 0"
    if reason is not None:
        raise ValueError(f"cannot compute on {device}: {reason}")


def same_device(*tensors: Tensor | None) -> None:
    """Raises ValueError where tensors of one call lie on several devices."""
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"one kernel, several devices: {', '.join(sorted(map(str, devices)))}")
