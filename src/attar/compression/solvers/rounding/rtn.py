"""Round to nearest: no statistic, and a solve that is the codec's own.

Rounding every weight independently is what the other methods are measured against, and at 8 bits often all that is
needed. With min-max scales it is bit for bit compressed-tensors' quantization of the weight. The one choice it has is
the range: `mse` shrinks that of each group where this lowers the group's rounding error.

The step of a float8 grid shrinks with the value, so a narrower range gains nothing but clipping: float8 ranges are
min-max under either search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.compression.recipe.methods import ScaleSearch
from attar.formats import affine, observers
from attar.formats.codecs import fp4, ggml_codec, progressive
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp4, GgmlBlocks, Progressive


def solve(
    weight: Tensor,
    scheme: Scheme,
    *,
    scale_search: ScaleSearch = "minmax",
    importance: Tensor | None = None,
    largest: Tensor | None = None,
) -> PackedTensor:
    """Return the weight [O, I], any float dtype, rounded to nearest. `importance` [I] holds the mean squares of the
    columns' inputs, for the search of GGML blocks. `largest` [1] is the largest magnitude of all weights that share the
    NVFP4 tensor scale with this one. Raises ValueError on a NaN or an infinity, where the group size does not divide I,
    and where a scale overflows."""
    if isinstance(scheme.weight, Fp4):
        return fp4.quantize(weight, scheme, "mse" if scale_search == "mse" else fp4.RULE, largest)
    if isinstance(scheme.weight, GgmlBlocks):
        counts = None if importance is None else ggml_codec.by_column(weight, scheme, importance)
        return ggml_codec.quantize(weight, scheme, counts)
    if isinstance(scheme.weight, Progressive):
        return progressive.quantize(weight, scheme, scale_search)
    if scale_search == "minmax" or scheme.weight.kind != "int":
        return codec(scheme.weight.kind).quantize(weight, scheme)
    grid, scale_dtype = scheme.grid, getattr(torch, scheme.scale_dtype)
    return affine.fitted(weight, scheme, lambda rows: group_scales(rows, grid, scale_dtype, scale_search))


def group_scales(
    weight: Tensor, grid: Grid, scale_dtype: torch.dtype, search: ScaleSearch
) -> tuple[Tensor, Tensor | None]:
    """Return scale, rounded to `scale_dtype`, and zero point of every part of a weight [O, I] that shares one. Shapes
    are those of `affine.qparams`: [O, G], or [1] for the whole tensor."""
    if search == "mse" and grid.kind == "int":
        low, high = observers.mse_range(weight, grid, scale_dtype)
    else:
        low, high = affine.min_max(weight, grid)
    return affine.qparams(low, high, grid, scale_dtype)
