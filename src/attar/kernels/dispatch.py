"""The choice of a backend for each operation, and of the layouts of weights and caches that it reads.

`native/` has C++ for CPUs, `triton/` kernels for NVIDIA's GPUs, and `ref.py` readable PyTorch. The first backend that
gives no reason against is chosen. `ATTAR_KERNELS=ref` forces the reference. `candidates` shows the choice with every
reason, which is what `attar doctor` prints. `ops.py` specifies the operations.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from attar import env
from attar.errors import UserError
from attar.kernels.native import extension
from attar.kernels.native.extension import release as release
from attar.kernels.native.linear import Activations as Activations
from attar.kernels.native.rows import Table as NativeTable
from attar.kernels.native.store import CpuWeights
from attar.kernels.triton import backend as gpu
from attar.kernels.triton.backend import require as require
from attar.kernels.triton.pages import NibblePages, PlainPages
from attar.kernels.triton.store import GpuWeights, TritonTable
from attar.kernels.triton.weights import knows_float8
from attar.kv.pages import Bases, PagedKV
from attar.kv.schemes import KvScheme, Layout

if TYPE_CHECKING:
    from types import ModuleType

BackendWeights: TypeAlias = CpuWeights | GpuWeights  # a model's weights in the layout of a backend
Table: TypeAlias = NativeTable | TritonTable  # an embedding whose rows a backend reads

OPS = (
    "embed", "norm", "linear", "rope", "attention", "write_kv", "paged_attention", "activate", "quantize_rows_int8",
    "argmax", "gumbel_max", "mask",
)  # fmt: skip


def candidates(op: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[tuple[str, str | None]]:
    """Return every backend in order of preference with the reason against it, or None where it would run. Raises
    ValueError for an unknown operation."""
    forced = env.get().kernels
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}: known are {', '.join(OPS)}")
    backends = {"triton": gpu.supports, "native": extension.supports}
    if not gpu.takes(device):
        del backends["triton"]
    against = "ATTAR_KERNELS=ref forces the reference" if forced == "ref" else None
    return [*((name, against or supports(op, device, dtype)) for name, supports in backends.items()), ("ref", None)]


def store(
    activations: str = "int8g128", device: str = "cpu", dtype: torch.dtype = torch.float32
) -> BackendWeights | None:
    """Return a store for the weights of a native model that computes in `dtype` on `device`; None where the reference
    runs.

    `activations` is the rounding of rows on CPUs. Raises ValueError, with a message for users, where attar cannot
    compute on the device.
    """
    require(device)
    name, _ = next(each for each in candidates("linear", gpu.kind_of(device), dtype) if each[1] is None)
    if name == "triton":
        return GpuWeights(device, dtype)
    if name == "ref":
        if gpu.kind_of(device) != "cpu":
            raise UserError(
                "device_unsupported", f"the reference computes on {device} only what is loaded there: it has no store"
            )
        return None
    extension.fit_threads()
    return CpuWeights(activations)


def pages(
    blocks: int,
    block: int,
    kv_heads: int,
    head_dim: int,
    scheme: KvScheme,
    device: str = "cpu",
    tails: int = 0,
    bases: Bases | None = None,
) -> PagedKV:
    """Return the KV cache of a layer in the layout of the device's kernels: `blocks` blocks of `block` slots.

    It includes what the scheme needs of a layer beside them (`PagedKV.zeros`). Raises ValueError where the slots are no
    multiple of 16, or the device's kernels do not support `scheme`.
    """
    if not gpu.takes(device) or env.get().kernels == "ref":
        made = PagedKV.zeros(blocks, block, kv_heads, head_dim, scheme, device, tails, bases)
        # A head's blocks lie apart, one to a small page: walking those costs a third of the speed.
        for part in made.parts():
            extension.prefer_huge_pages(part)
        return made
    if scheme.name == "int4":
        return NibblePages.rotated(blocks, block, kv_heads, head_dim, scheme, device)
    if not (scheme.unscaled or scheme.layout in (Layout.INT8, Layout.FP8)):
        raise UserError(
            "kv_unsupported",
            f"kernels of {device} keep the KV cache as float32, bfloat16, int8, fp8 or int4, not {scheme.name}",
        )
    dtype = torch.float8_e4m3fn if scheme.layout == Layout.FP8 else getattr(torch, scheme.name)
    if dtype == torch.float8_e4m3fn and not knows_float8(torch.device(device)):
        raise UserError("kv_unsupported", f"the KV cache cannot be kept as fp8 on {device}: this GPU has no float8")
    made = PlainPages.make(blocks, block, kv_heads, head_dim, dtype, device)
    made.scheme = scheme
    return made


def triton(module: str) -> ModuleType:
    """Import a module of Triton's kernels on first use."""
    return importlib.import_module(f"attar.kernels.triton.{module}")


def is_native(op: str, x: Tensor) -> bool:
    return ("native", None) in candidates(op, x.device.type, x.dtype)
