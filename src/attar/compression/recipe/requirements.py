"""Requirements of a recipe on a model and on calibration text, checked before anything is computed.

The layout of the output checks earlier which schemes a model's shapes can take (`Recipe.schemes`). Problems in the
numbers of the weights, such as a NaN or a solver that gives up, are found only in the block pass. One such property is
checked here: where a recipe assumes 2:4 sparse weights, two linears are tested for all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.recipe.methods import (
    Awq,
    Clip,
    Gptq,
    Hqq,
    Magnitude,
    Prune,
    Rtn,
    SmoothAttention,
    SmoothQuant,
    SpinQuant,
    SqueezeLlm,
)
from attar.compression.recipe.recipe import HEAD, Recipe
from attar.errors import UserError, code_of
from attar.formats.codecs import sparse24
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Progressive, Sparse24
from attar.kv.schemes import BUCKET
from attar.model.assembly import compressible
from attar.model.config import ModelConfig

HEAD_ROWS = 1024  # of the LM head that are tested


def check(plan: Recipe, config: ModelConfig, schemes: Mapping[str, Scheme | None], sequences: int | None) -> bool:
    """Return whether the recipe reads the inputs of linears. `schemes` are those that it gives the model's linears.
    `sequences` is the maximal number of calibration sequences, None without any. Raises ValueError where the recipe
    lacks something it needs, or is given something it cannot use."""
    static = any(scheme.static for scheme in schemes.values() if scheme is not None)
    learned = plan.tune is not None or isinstance(plan.rotate, SpinQuant)
    needs_inputs = static or learned or not isinstance(plan.passes[0], Rtn | Hqq | Magnitude)
    if needs_inputs and sequences is None:
        raise UserError(
            "calibration_missing",
            f"{plan.name} needs calibration: give --calib a text file, or `self` to sample it from the model",
        )
    corrects = isinstance(plan.rounding, Gptq | Prune) and plan.corrects  # autoround compares outputs of whole blocks
    if (plan.guide or plan.couples or corrects) and config.experts is not None:
        raise UserError(
            "architecture_unsupported",
            f"{plan.name} compares tokens across models, and routers of a mixture of experts send the same token to "
            "different experts: use gptq, or sparsegpt to prune",
        )
    scaling = [p.method for p in plan.passes if isinstance(p, Awq | SmoothAttention)]
    scaling += [p.method for p in plan.passes if isinstance(p, SmoothQuant) and p.through]
    if plan.guide and scaling:
        raise UserError(
            "recipe_conflict",
            f"{plan.name}: {scaling[0]} scales rows that guide has weighed before: leave one of them out",
        )
    if isinstance(plan.rounding, SqueezeLlm) and len(plan.passes) > 1:
        raise UserError(
            "recipe_conflict", f"{plan.name}: {plan.passes[0].method} changes weights after squeezellm has weighed them"
        )
    grids = [s for s in schemes.values() if s is not None and isinstance(s.weight, Grid | Progressive)]
    if any(isinstance(p, Clip) for p in plan.passes) and not grids:
        raise UserError(
            "recipe_without_effect", f"{plan.name}: clip narrows the range of a grid, which none of its schemes has"
        )
    if plan.activation_range != "minmax":
        fixed = {name: s.activation for name, s in schemes.items() if s is not None and s.static}
        if not fixed:
            raise UserError(
                "recipe_without_effect",
                f"{plan.name} fixes no activation scales: activation_range is for schemes as w8a8-static",
            )
        integers = all(isinstance(form, Grid) and form.kind == "int" for form in fixed.values())
        if plan.activation_range in ("mse", "kl") and not integers:
            raise UserError(
                "scheme_unsupported",
                f"{next(iter(fixed))}: activation_range {plan.activation_range} is for integers alone",
            )
    turning = any(isinstance(p, SmoothAttention) and p.values for p in plan.passes)
    if turning and plan.rotate is not None and plan.rotate.across:
        raise UserError(
            "recipe_conflict",
            f"{plan.name}: across turns what smoothattention would, behind attention: set values: false, or no across",
        )
    if any(isinstance(p, SmoothAttention) and p.key_alpha is None for p in plan.passes) and config.head_dim % BUCKET:
        raise UserError(
            "group_size_indivisible",
            f"{compressible(config, 0)[0]}: its heads have {config.head_dim} columns, and smoothattention searches for "
            f"a cache whose bits go to {BUCKET} columns at a time: set key_alpha, 0.5 as published, or leave it out",
        )
    if sequences is not None:
        enough(plan, sequences)
    return needs_inputs


def check_sparse(plan: Recipe, checkpoint: Checkpoint, schemes: Mapping[str, Scheme | None]) -> None:
    """Raise ValueError where a linear is to be stored 2:4 sparse, but is not so already nor pruned so by the recipe.
    Only the weights of the first and the last such linear are read: all of them would be the whole model."""
    sparse = [name for name, scheme in schemes.items() if scheme is not None and isinstance(scheme.weight, Sparse24)]
    taken = [name for name in sparse if plan.pattern_for(name) is None]
    weights = checkpoint.rows(torch.arange(min(HEAD_ROWS, checkpoint.config.vocab_size)))
    for name in dict.fromkeys((*taken[:1], *taken[-1:])):
        weight, scheme = weights.linear(name).weight, schemes[name]
        assert isinstance(weight, Tensor)
        assert scheme is not None
        try:
            sparse24.pack_24(weight)
        except ValueError as error:
            other = "give it another scheme" if name == HEAD else f"prune it, as by prune-2:4-{scheme.name}"
            raise UserError(
                code_of(error), f"{name}: {scheme.name} stores 2:4 sparse weights, and {error}: {other}"
            ) from None


def enough(plan: Recipe, sequences: int) -> None:
    """Raise ValueError where there are too few calibration sequences for the recipe."""
    if plan.tune is not None and sequences < 2:
        raise UserError(
            "calibration_too_short",
            f"{plan.name} needs at least 2 calibration sequences, of which tuning trains on some and judges by others: "
            "give more text, more samples, or a shorter length",
        )
