"""Placement of a block while it is compressed: in CPU memory, or on a GPU for that time.

The block pass reads a block, moves it, solves there and moves the result back to be written. Solvers do not know: their
results lie on the device of their arguments. Codes are integers, and scales are rounded to their stored dtype before a
code is chosen, so the transfer changes nothing. Hidden states cross with each batch, a few percent of the work.

Some work is not supported there (`check`): methods that learn or rotate, forms whose tables lie in CPU memory, GGUF
files. Work on the whole model stays on the CPU too: sampling calibration text, and the gradients that weigh tokens. The
final evaluation uses the device's kernels, on both models at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from attar.compression.recipe.methods import Awq, Gptq, Hqq, Rtn, SmoothQuant
from attar.compression.recipe.recipe import Recipe
from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp8Blocks
from attar.kernels.operands import Linear
from attar.model.layers import Block

CPU = torch.device("cpu")


def check(recipe: Recipe, schemes: Iterable[Scheme | None], to_file: bool, device: str) -> None:
    """Raise ValueError, naming what is not supported, where blocks cannot be compressed on `device`."""
    if device == "cpu":
        return
    strange = [each.method for each in recipe.passes if not isinstance(each, Awq | Gptq | Hqq | Rtn | SmoothQuant)]
    forms = (each.weight for each in schemes if each is not None)
    strange += [form.name for form in forms if not isinstance(form, Grid | Fp8Blocks)]
    strange += ["a rotation"] if recipe.rotate is not None else []
    strange += ["tuning"] if recipe.tune is not None else []
    strange += ["a GGUF file"] if to_file else []
    if strange:
        raise UserError(
            "device_unsupported", f"{recipe.name} is compressed on the CPU: {strange[0]} is not for {device} yet"
        )


def move(block: Block, device: torch.device) -> None:
    """Move every tensor of the block to `device`. Tensors already there are left alone, and all of them on CPUs."""
    for linear in block.linears():
        _move_linear(linear, device)
    for norm in block.norms():
        norm.weight = norm.weight.to(device)
        norm.bias = None if norm.bias is None else norm.bias.to(device)


def _move_linear(linear: Linear, device: torch.device) -> None:
    weight = linear.weight
    if isinstance(weight, PackedTensor):
        if any(part.device != device for part in weight.parts.values()):
            linear.weight = replace(weight, parts={name: part.to(device) for name, part in weight.parts.items()})
    elif isinstance(weight, Tensor):
        linear.weight = weight.to(device)
    linear.dense = None if linear.dense is None else linear.dense.to(device)
    for name in ("bias", "permutation", "input_scale", "activation_scale"):
        part = getattr(linear, name)
        if part is not None:
            setattr(linear, name, part.to(device))
