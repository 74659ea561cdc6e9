"""Folder formats into which a compressed linear can be re-packed: what each can hold, and its layout.

All three store integers, a scale for each group of a row's columns, and zero points or none. So a weight on one such
grid (`grids.py`: many forms are) is the same numbers in another order of bits. The formats differ in their limits:

* compressed-tensors takes any grid, and scales in the dtype they have, zero and negative ones too; MXFP4 and NVFP4;
* AWQ takes 4 bits, with zero points always, eight outputs a word, and its columns in order;
* GPTQ takes 2, 3, 4 or 8 bits with zero points always. Its first version stores them minus one, which is undone in ways
  that disagree where one is zero. So symmetric weights, whose zero points are in the middle, are written as version 1,
  which every reader supports, and others as version 2.

In the last two, one group size and one number of bits hold for a whole folder. The bits are those that all linears fit,
a grid of fewer being part of it; the groups are the longest that divide all, with scales repeated. Scales are float16,
which their kernels load: a scale of another dtype is converted where it is a number of float16, and refused otherwise.
The config names dense modules, or readers would look for their integers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from attar.checkpoints.convert.grids import as_scheme, grid_of
from attar.checkpoints.convert.source import Stored
from attar.checkpoints.layouts import compressed_tensors, export_layouts
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.formats.packing import pack_awq, pack_words
from attar.formats.scheme import Grid, Part, Scheme
from attar.formats.weight_formats import GgmlBlocks, Sparse24
from attar.kernels.operands import Linear


class Target(Protocol):
    """A format to write. Modules go by their stored names."""

    name: str

    def against(self, each: Stored) -> str | None:
        """Return why the format cannot hold a linear, as the end of a sentence; None where it can."""

    def planned(self, modules: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return all linears of a folder, each accepted by `against`, in the schemes that the format gives them."""

    def declared(self, module: str, each: Stored) -> dict[str, Part]:
        """Return every tensor that stores a linear in its planned scheme."""

    def arrays(self, module: str, linear: Linear) -> dict[str, Tensor]:
        """Return the tensors of `declared` for a linear in its planned scheme (`packed_as`)."""

    def config(self, modules: Mapping[str, Stored], dense: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config of linears in their planned schemes; `dense` are the names of dense
        linears."""


def packed_as(linear: Linear, each: Stored) -> Linear:
    """Return a linear in its planned scheme. Raises ValueError where one of its numbers is not exact there."""
    assert isinstance(linear.weight, PackedTensor)
    return replace(linear, weight=as_scheme(linear.weight, each.scheme))


def bits_per_weight(target: Target, modules: Mapping[str, Stored]) -> float:
    """Return the stored bits per weight of the linears in this format."""
    stored = sum(part.bytes for module, each in modules.items() for part in target.declared(module, each).values())
    return 8 * stored / sum(math.prod(each.shape) for each in modules.values())


def _integers(each: Stored, format_name: str) -> Grid | str:
    """Return the grid of a linear that is integers alone, or the reason why it is none, as the end of a sentence."""
    if each.scheme.activation is not None:
        return f"{format_name} has no field for activations that are rounded, as those of {each.scheme.name} are"
    found = grid_of(each.scheme)
    return (
        f"{format_name} holds integers times scales, which {each.scheme.name} is not" if found is None else found.grid
    )


def _grids(modules: Mapping[str, Stored]) -> dict[str, Grid]:
    found = {name: grid_of(each.scheme) for name, each in modules.items()}
    return {name: each.grid for name, each in found.items() if each is not None}


def _shared_group(modules: Mapping[str, Stored]) -> int | None:
    """Return the longest group size that divides all linears' groups, None where all have one group a row."""
    sizes = {name: grid.group_size for name, grid in _grids(modules).items()}
    if not any(sizes.values()):
        return None
    return math.gcd(*(sizes[name] or each.shape[1] for name, each in modules.items()))


def _half(bits: int, symmetric: bool, size: int | None) -> Scheme:
    grid = Grid("int", bits, symmetric, "channel" if size is None else "group", size)
    return Scheme(grid, scale_dtype="float16")


class ToCompressedTensors:
    name = compressed_tensors.METHOD

    def against(self, each: Stored) -> str | None:
        if isinstance(each.scheme.weight, Sparse24) and each.scheme.weight.values is None:
            return "attar reads 2:4 floats of compressed-tensors, and does not write them"
        return None if grid_of(each.scheme) is not None else compressed_tensors.against([each.scheme])

    def planned(self, modules: Mapping[str, Stored]) -> dict[str, Stored]:
        return {name: replace(each, scheme=self._scheme(each.scheme)) for name, each in modules.items()}

    def _scheme(self, scheme: Scheme) -> Scheme:
        if isinstance(scheme.weight, GgmlBlocks) and (name := scheme.weight.name) in ("mxfp4", "nvfp4"):
            return Scheme.parse(f"{name}-weight")
        found = scheme if compressed_tensors.against([scheme]) is None else grid_of(scheme)
        assert found is not None
        return found

    def declared(self, module: str, each: Stored) -> dict[str, Part]:
        index = {f"{module}.weight_g_idx": Part("int32", (each.shape[1],))} if each.permuted else {}
        return export_layouts.declared(compressed_tensors, module, each.scheme, each.shape) | index

    def arrays(self, module: str, linear: Linear) -> dict[str, Tensor]:
        packed, index = linear.weight, {}
        assert isinstance(packed, PackedTensor)
        if linear.permutation is not None:
            codes, scale, zero = affine.decode(packed)
            codes, groups = _in_order(codes, linear.permutation, scale.shape[1])
            packed = affine.encode(codes, scale, zero, packed.scheme, packed.shape)
            index = {f"{module}.weight_g_idx": groups}
        return export_layouts.parts_of(compressed_tensors, module, packed, linear.activation_scale) | index

    def config(self, modules: Mapping[str, Stored], dense: Sequence[str]) -> dict[str, Any]:
        found = compressed_tensors.quantization_config({name: each.scheme for name, each in modules.items()}, dense)
        if any(each.permuted for each in modules.values()):
            for group in found["config_groups"].values():
                group["weights"]["actorder"] = "group"
        return found


class ToAwq:
    name = "awq"

    def against(self, each: Stored) -> str | None:
        grid = _integers(each, "AWQ")
        if isinstance(grid, str):
            return grid
        if grid.bits > 4:
            return f"AWQ holds integers of 4 bits, not {each.scheme.name}, which takes {grid.bits}"
        if each.permuted:
            return "AWQ has no field for columns that are out of their order (desc_act)"
        if each.shape[0] % 8:
            return f"AWQ holds eight outputs in a word, which do not divide {each.shape[0]}"
        return None

    def planned(self, modules: Mapping[str, Stored]) -> dict[str, Stored]:
        size = _shared_group(modules)
        return {
            name: replace(modules[name], scheme=_half(4, grid.symmetric, size))
            for name, grid in _grids(modules).items()
        }

    def declared(self, module: str, each: Stored) -> dict[str, Part]:
        (rows, columns), groups = each.shape, each.scheme.grid.groups(each.shape[1])
        return {
            f"{module}.qweight": Part("int32", (columns, rows // 8)),
            f"{module}.qzeros": Part("int32", (groups, rows // 8)),
            f"{module}.scales": Part("float16", (groups, rows)),
        }

    def arrays(self, module: str, linear: Linear) -> dict[str, Tensor]:
        codes, scale, zero = _decoded(linear)
        return {
            f"{module}.qweight": pack_awq(codes.t().contiguous()),
            f"{module}.qzeros": pack_awq(zero.t().contiguous()),
            f"{module}.scales": scale.t().contiguous(),
        }

    def config(self, modules: Mapping[str, Stored], dense: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": next(iter(modules.values())).scheme.grid.group_size or -1,
            "zero_point": True,
            "modules_to_not_convert": list(dense) or None,
        }


class ToGptq:
    name = "gptq"

    BITS = (2, 3, 4, 8)

    def against(self, each: Stored) -> str | None:
        grid = _integers(each, "GPTQ")
        if isinstance(grid, str):
            return grid
        for size, what in zip(each.shape, ("outputs", "inputs"), strict=True):
            if size * self.BITS[-1] % 32:
                return f"GPTQ holds whole words of 32 bits, and {size} {what} are none, even of 8 bits"
        return None

    def planned(self, modules: Mapping[str, Stored]) -> dict[str, Stored]:
        grids, size = _grids(modules), _shared_group(modules)
        least = max(grid.bits for grid in grids.values())
        sides = [side for each in modules.values() for side in each.shape]
        bits = next(bits for bits in self.BITS if bits >= least and not any(side * bits % 32 for side in sides))
        scheme = _half(bits, all(grid.symmetric for grid in grids.values()), size)
        return {name: replace(each, scheme=scheme) for name, each in modules.items()}

    def declared(self, module: str, each: Stored) -> dict[str, Part]:
        (rows, columns), grid = each.shape, each.scheme.grid
        groups = grid.groups(columns)
        return {
            f"{module}.qweight": Part("int32", (columns * grid.bits // 32, rows)),
            f"{module}.qzeros": Part("int32", (groups, rows * grid.bits // 32)),
            f"{module}.scales": Part("float16", (groups, rows)),
            f"{module}.g_idx": Part("int32", (columns,)),
        }

    def arrays(self, module: str, linear: Linear) -> dict[str, Tensor]:
        codes, scale, zero = _decoded(linear)
        assert isinstance(linear.weight, PackedTensor)
        grid, order = linear.weight.scheme.grid, linear.permutation
        codes, groups = _in_order(codes, torch.arange(codes.shape[1]) if order is None else order, scale.shape[1])
        return {
            f"{module}.qweight": pack_words(codes, grid.bits).t().contiguous(),
            f"{module}.qzeros": pack_words((zero - int(grid.symmetric)).t().contiguous(), grid.bits),
            f"{module}.scales": scale.t().contiguous(),
            f"{module}.g_idx": groups,
        }

    def config(self, modules: Mapping[str, Stored], dense: Sequence[str]) -> dict[str, Any]:
        grid = next(iter(modules.values())).scheme.grid  # the same for all
        left_out = [name for name in dense if name != "lm_head"]  # it has a setting of its own
        return {
            "quant_method": "gptq",
            "bits": grid.bits,
            "group_size": grid.group_size or -1,
            "desc_act": any(each.permuted for each in modules.values()),
            "sym": grid.symmetric,
            "checkpoint_format": "gptq" if grid.symmetric else "gptq_v2",
            "lm_head": "lm_head" in modules,
            **({"dynamic": {f"-:^{re.escape(name)}$": {} for name in left_out}} if left_out else {}),
        }


TARGETS: Mapping[str, Target] = {each.name: each for each in (ToCompressedTensors(), ToAwq(), ToGptq())}


def _decoded(linear: Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Return signed codes [O, I], scales [O, G] and signed zero points [O, G]: zero, the middle, where there are
    none."""
    assert isinstance(linear.weight, PackedTensor)
    codes, scale, zero = affine.decode(linear.weight)
    return codes, scale, torch.zeros_like(scale, dtype=torch.int8) if zero is None else zero


def _in_order(codes: Tensor, permutation: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return codes [O, I], whose columns were permuted by `permutation`, in their own order, and each column's
    group."""
    found, index = torch.empty_like(codes), torch.empty(codes.shape[1], dtype=torch.int32)
    found[:, permutation] = codes
    index[permutation] = torch.arange(codes.shape[1], dtype=torch.int32) // (codes.shape[1] // groups)
    return found, index
