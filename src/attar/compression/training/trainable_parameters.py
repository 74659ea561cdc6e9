"""Trainable parameters of tuning (`tune`): the continuous numbers that are stored beside frozen codes.

A linear's form alone determines its trained part (`part_of`), so that untrained linears are known before there is a
model:

* a scale, of whatever it covers (groups, rows, blocks), or the magnitudes that stand for one;
* where magnitudes or scales are quantized in their turn, the number above them, as far as that is a float: of NF4 the
  largest of 256 magnitudes, of NVFP4 the one for the tensor, which linears that read one input share. E4M3 scales move
  by 6 to 12 % or not at all, and tuning moves numbers by less than that;
* tables that codes look up; the values of 2:4 sparse weights that are not codes; all weights of a pruned linear that
  stays dense, but for its zeros;
* in GGUF files the float16 numbers that scale a block: codes, and scales of few bits, stay.

MXFP4, whose scales are powers of two, has no trained part, nor have GGML's types in a folder. Zero points are integers
and are not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.layouts.export_layouts import library_of
from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.groups import input_groups
from attar.formats.affine import by_scale
from attar.formats.codecs import ggml_blocks, llm_int8, nf4
from attar.formats.codecs.sparse24 import unpack_24
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import (
    Fp4,
    Fp8Blocks,
    GgmlBlocks,
    Int8Rows,
    Lookup,
    Nf4,
    Progressive,
    Sparse24,
    WeightFormat,
)
from attar.kernels.operands import Linear, Norm
from attar.model.layers import Block

NVFP4 = Fp4("nvfp4")

_PARTS: Mapping[type, str] = {
    Grid: "scale", Progressive: "scale", Fp8Blocks: "scale", Int8Rows: "absmax", Lookup: "table",
}  # fmt: skip

Stored = Checkpoint | GgufCheckpoint


@dataclass(eq=False)
class Knob:
    """A stored tensor, or several that must stay equal: `base` + `size` times the learned numbers, with the function
    that installs its value before the model runs."""

    name: str
    base: Tensor  # the stored value
    size: Tensor  # float32, of the shape of `base`, or a single number
    install: Callable[[Tensor], None]
    others: dict[str, Callable[[Tensor], None]] = field(default_factory=dict)
    """Tensors that are stored equal, by name, with the functions that install their value."""

    def __post_init__(self) -> None:
        self.learned = torch.zeros(self.base.shape, requires_grad=True)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.others)

    def put(self) -> None:
        """Install the value in the model."""
        value = self.value()
        for install in (self.install, *self.others.values()):
            install(value)

    def stored(self) -> Tensor:
        """Return the value in its stored form."""
        return self._exact().detach().to(self.base.dtype)

    def value(self) -> Tensor:
        """Return the stored value, in float32, with the gradient of the learned numbers."""
        exact = self._exact()
        return self.stored().float() + (exact - exact.detach())

    def _exact(self) -> Tensor:
        return self.base.float() + self.size * self.learned


def part_of(form: WeightFormat) -> str | None:
    """Return the part of a weight of this form that is trained, or None where all stored parts are codes."""
    if isinstance(form, Nf4):
        return "nested_absmax" if form.double else "absmax"
    if isinstance(form, Sparse24):
        return "values" if form.values is None else part_of(form.values)
    return "global" if form == NVFP4 else _PARTS.get(type(form))


def untrained(schemes: Iterable[Scheme | None]) -> tuple[str, ...]:
    """Return the names of the schemes without a trained part in a folder."""
    return tuple(sorted({each.name for each in schemes if each is not None and part_of(each.weight) is None}))


def untrained_in_file(schemes: Iterable[Scheme | None]) -> tuple[str, ...]:
    """Return the names of the schemes without a trained part in a GGUF file, where schemes are GGML's; plain numbers
    have no scheme."""
    forms = [each.weight for each in schemes if each is not None]
    kinds = [form.type for form in forms if isinstance(form, GgmlBlocks) and form.type.elements > 1]
    return tuple(sorted({kind.name.lower() for kind in kinds if kind.name not in ggml_blocks.CODED}))


def of_block(checkpoint: Stored, block: Block, dense: Collection[str] = ()) -> Iterator[Knob]:
    """Yield the trainable parameters of a block. `dense` names the linears whose weights, but for zeros, are trained
    themselves."""
    first = {linear.name: members[0].name for members in input_groups(block) for linear in members}
    shared: dict[str, Knob] = {}
    for linear in block.linears():
        if (knob := of_weight(checkpoint, linear, linear.name in dense)) is not None:
            # Engines fuse linears that read one input, with one NVFP4 tensor scale for all: these stay equal.
            fused = isinstance(linear.weight, PackedTensor) and linear.weight.scheme.weight == NVFP4
            one = shared.setdefault(first.get(linear.name, linear.name), knob) if fused else knob
            if one is not knob and torch.equal(one.base, knob.base):
                one.others[knob.name] = knob.install
            else:
                yield knob
        yield from _of_bias(checkpoint, linear)
    for norm in block.norms():
        yield from of_norm(checkpoint, norm)


def of_weight(checkpoint: Stored, linear: Linear, dense: bool = False) -> Knob | None:
    """Return the trainable parameter of a linear's weight, if there is one."""
    if isinstance(checkpoint, GgufCheckpoint):
        return of_blocks(linear) if isinstance(linear.weight, PackedTensor) else None
    module, weight = checkpoint.stored_name(linear.name), linear.weight
    if isinstance(weight, PackedTensor) and (part := part_of(weight.scheme.weight)) is not None:
        base, made = weight.parts[part], _made(weight)
        library = library_of(checkpoint.folder.config.get("quantization_config", {}).get("quant_method"))
        name = f"{module}.{library.stored_part(part, weight.scheme)}"
        return Knob(name, base, _size(part, base), lambda value: setattr(linear, "dense", made(value)))
    if isinstance(weight, Tensor) and dense:
        turned = checkpoint.config.names.is_transposed(linear.name)
        base = weight.T.contiguous() if turned else weight

        def install(value: Tensor) -> None:
            linear.weight = value.T if turned else value

        return Knob(f"{module}.weight", base, _rms(base) * (base != 0), install)
    return None


def of_blocks(linear: Linear) -> Knob | None:
    """Return the numbers that scale the blocks of a weight in a GGUF file, [O, blocks of a row, 1 or 2], under its
    name."""
    packed = linear.weight
    assert isinstance(packed, PackedTensor)
    form = packed.scheme.weight
    assert isinstance(form, GgmlBlocks)
    if form.type.name not in ggml_blocks.CODED:
        return None
    blocks = ggml_blocks.unpack(form.type, packed.parts["blocks"].reshape(-1, form.type.block_bytes))
    codes, scales, mins = blocks.codes.to(torch.int8), blocks.scales, blocks.mins
    base = ggml_blocks.numbers(blocks).view(packed.shape[0], -1, 1 if blocks.m is None else 2)

    def install(value: Tensor) -> None:  # as `ggml_blocks.to_values`, with gradients
        d, *m = value.view(len(codes), -1).split(1, 1)
        if scales is None:
            values = codes.float() * d + m[0] if m else codes.float() * d
        else:
            values = codes.view(*scales.shape, -1).float() * (d * scales.float())[..., None]
            if mins is not None:
                values = values - (m[0] * mins.float())[..., None]
        linear.dense = values.view(packed.shape)

    return Knob(f"{linear.name}.weight", base, base.float().abs(), install)


def _of_bias(checkpoint: Stored, owner: Linear | Norm) -> Iterator[Knob]:
    if owner.bias is not None:
        name = f"{_stored_name(checkpoint, owner.name)}.bias"
        yield Knob(name, owner.bias, _rms(owner.bias), lambda value: setattr(owner, "bias", value))


def of_norm(checkpoint: Stored, norm: Norm) -> Iterator[Knob]:
    """Yield the trainable parameters of a norm."""
    size = (norm.weight.float() + norm.offset).abs()
    name = f"{_stored_name(checkpoint, norm.name)}.weight"
    yield Knob(name, norm.weight, size, lambda value: setattr(norm, "weight", value))
    yield from _of_bias(checkpoint, norm)


def _stored_name(checkpoint: Stored, module: str) -> str:
    """Return the stored name of a module; in a GGUF file, attar's own."""
    return module if isinstance(checkpoint, GgufCheckpoint) else checkpoint.stored_name(module)


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean().sqrt()


def _size(part: str, base: Tensor) -> Tensor:
    """Return the unit in which a part's numbers are trained: their own size, or for numbers that may be near zero the
    size of all."""
    if part == "table":
        return base.float().square().mean(1, keepdim=True).sqrt()
    if part == "values":
        return _rms(base) * (base != 0)
    return base.float().abs()


# Weights from frozen codes and another value of the trained part

Made = Callable[[Tensor], Tensor]
"""Function from a value of the part to the weight [O, I], float32, equal to `PackedTensor.dequantize` to the bit."""


def _made(packed: PackedTensor) -> Made:
    form = packed.scheme.weight
    if isinstance(form, Sparse24):
        return _of_sparse(packed, form.values)
    if isinstance(form, Lookup):
        return _of_lookup(packed)
    if isinstance(form, Nf4):
        return _of_nf4(packed, form.double)
    if isinstance(form, Fp4):
        unit, stored = _unit(packed, "scale", "global"), packed.parts["scale"].float()
        return lambda value: (by_scale(unit.float(), stored.shape[1]) * (stored / value).unsqueeze(-1)).flatten(-2)
    if isinstance(form, Int8Rows):
        codes = packed.parts["codes"]
        return lambda value: codes.float() * (value / llm_int8.LARGEST).unsqueeze(-1)
    if isinstance(form, Fp8Blocks):
        unit, size, (rows, columns) = _unit(packed, "scale"), form.size, packed.shape
        return lambda value: (
            unit.float() * value.repeat_interleave(size, 1)[:, :columns].repeat_interleave(size, 0)[:rows]
        )
    unit = _unit(packed, "scale")
    return lambda value: (by_scale(unit.float(), value.shape[-1]) * value.unsqueeze(-1)).flatten(-2)


def _unit(packed: PackedTensor, *parts: str) -> Tensor:
    """Return the weight as if these parts were 1: differences of codes, and floats of 4 or 8 bits, which bfloat16 holds
    exactly."""
    ones = {part: torch.ones(packed.parts[part].shape).to(packed.parts[part].dtype) for part in parts}
    return PackedTensor(packed.scheme, packed.shape, {**packed.parts, **ones}).dequantize(torch.bfloat16)


def _of_nf4(packed: PackedTensor, double: bool) -> Made:
    parts, (rows, columns) = packed.parts, packed.shape
    pairs = parts["codes"].view(rows, columns // 2)
    codes = torch.stack((pairs >> 4, pairs & 15), -1).view(rows, -1, nf4.BLOCK)

    def by_magnitude(value: Tensor) -> Tensor:
        return (parts["map"][codes.long()] * value.view(rows, -1, 1)).flatten(1)

    if not double:
        return by_magnitude
    offset = float(nf4.read_state(parts["state"])["nested_offset"])
    shares = parts["nested_map"][parts["absmax"].long()]
    return lambda value: by_magnitude(shares * value.repeat_interleave(nf4.NESTED_BLOCK)[: len(shares)] + offset)


def _of_lookup(packed: PackedTensor) -> Made:
    parts = dict(packed.parts)
    parts["table"] = torch.arange(parts["table"].shape[1], dtype=parts["table"].dtype).repeat(packed.shape[0], 1)
    if "extras" in parts:
        parts["extras"] = torch.zeros_like(parts["extras"])
    codes = PackedTensor(packed.scheme, packed.shape, parts).dequantize().to(torch.uint8)

    def made(table: Tensor) -> Tensor:
        dense = table.gather(1, codes.long())
        if "extras" in packed.parts:
            rows = torch.arange(len(codes)).repeat_interleave(packed.parts["starts"].diff())
            where = (rows, packed.parts["places"].long())
            dense = dense.index_put(where, packed.parts["extras"].float(), accumulate=True)
        return dense

    return made


def _of_sparse(packed: PackedTensor, form: WeightFormat | None) -> Made:
    places, half = packed.parts["places"], (packed.shape[0], packed.shape[1] // 2)
    kept = unpack_24(torch.ones(half, dtype=torch.bool), places)  # two of every four, in order: so are the values
    values: Made | None = None
    if form is not None:
        parts = {name: each for name, each in packed.parts.items() if name != "places"}
        values = _made(PackedTensor(Scheme(form, scale_dtype=packed.scheme.scale_dtype), half, parts))
    return lambda value: torch.zeros(packed.shape).masked_scatter(kept, value if values is None else values(value))
