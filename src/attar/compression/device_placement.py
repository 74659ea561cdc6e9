"""Where a block lies while it is worked on: in ordinary memory, or on a GPU for as long as that takes.

The walk reads a block, moves it, solves there and moves what came of it back to be written. Solvers never know: what
they make lies where their arguments do. Codes are integers and scales are rounded to what is stored before a code is
chosen, so nothing changes on the way. Hidden states cross with each batch: they are a few percent of the work.

Not everything goes there (`check`): methods that learn or rotate, forms whose tables lie in ordinary memory, GGUF
files. What is done with the whole model rather than a block stays on the CPU too: sampling calibration text, and the
gradients that weigh tokens. The evaluation at the end is the kernels' there, on both models at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from attar.compression.recipe.methods import Awq, Gptq, Hqq, Rtn, SmoothQuant
from attar.compression.recipe.recipe import Recipe
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp8Blocks
from attar.kernels.operands import Linear
from attar.model.layers import Block

CPU = torch.device("cpu")


def check(recipe: Recipe, schemes: Iterable[Scheme | None], to_file: bool, device: str) -> None:
    """Raise ValueError, saying what does not go there, where blocks cannot be compressed on `device`."""
    if device == "cpu":
        return
    strange = [each.method for each in recipe.passes if not isinstance(each, Awq | Gptq | Hqq | Rtn | SmoothQuant)]
    forms = (each.weight for each in schemes if each is not None)
    strange += [form.name for form in forms if not isinstance(form, Grid | Fp8Blocks)]
    strange += ["a rotation"] if recipe.rotate is not None else []
    strange += ["tuning"] if recipe.tune is not None else []
    strange += ["a GGUF file"] if to_file else []
    if strange:
        raise ValueError(f"{recipe.name} is compressed on the CPU: {strange[0]} is not for {device} yet")


def move(block: Block, device: torch.device) -> None:
    """Every tensor of the block to `device`. What is there already is left alone, and so is all of it on CPUs."""
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
