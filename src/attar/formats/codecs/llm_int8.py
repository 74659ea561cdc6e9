"""LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339): int8 rows of weights, and activations that keep their outliers.

A few input features of large models are a hundred times larger than the rest. They would use up one int8 scale a token,
so their values are multiplied unrounded, and only the rest is rounded:

    y = x_out W^T + (row scale) round(x_in / row scale) W^T        x_out: where |x| >= 6; x_in: the rest

The sum of both is one product of `fake_quantize`d rows with the dequantized weight, and the reference computes it that
way. Outliers are found in the current rows, not at calibration: a fixed threshold needs no data, follows inputs that
calibration did not see, and keeps sizes known. They are found row by row. The paper takes a column for all rows of a
call once one of them is large, which would make a request's result depend on its batch. The small values of outlier
columns in other rows are rounded here like all small values.

Weights are int8 everywhere, scale = max|row| / 127, as bitsandbytes stores them, outlier columns too. The paper keeps
those in 16 bits; a file cannot, as columns are found at run time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Outliers, WeightFormat

LARGEST = 127
ROW_FORMAT = 0
"""Number that bitsandbytes gives codes in the order of the weight; others belong to retired kernels."""


def quantize(weight: Tensor, scheme: Scheme) -> PackedTensor:
    """Round a weight [O, I] to int8, row by row. Raises ValueError on a NaN or an infinity."""
    rows, columns = weight.shape
    codes = torch.empty((rows, columns), dtype=torch.int8, device=weight.device)
    largest = torch.empty(rows, device=weight.device)
    for part in row_slices(rows, columns):
        some = weight[part].float()
        largest[part] = some.abs().amax(1)
        if not largest[part].isfinite().all():
            at = part.start + int((~largest[part].isfinite()).nonzero()[0])
            raise UserError("not_finite", f"cannot quantize: row {at} holds a NaN or an infinity")
        codes[part] = _round(some, largest[part][:, None])
    kept = torch.tensor(ROW_FORMAT, dtype=torch.uint8)
    return PackedTensor(scheme, (rows, columns), {"codes": codes, "absmax": largest, "format": kept})


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows: computed in float32, then rounded."""
    codes, scale = packed.parts["codes"][rows], packed.parts["absmax"][rows, None] / LARGEST
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device) if out is None else out
    for part in row_slices(*weight.shape):
        weight[part] = codes[part].float() * scale[part]
    return weight


def fake_quantize(x: Tensor, form: WeightFormat, scale: Tensor | None = None) -> Tensor:
    """Round all but the outliers of x [..., I] to int8, in x's dtype. Raises ValueError on a NaN or an infinity."""
    assert isinstance(form, Outliers)
    assert scale is None, "the scale is that of the values at hand"
    if not x.isfinite().all():
        raise UserError("not_finite", "cannot quantize: the activations hold a NaN or an infinity")
    outlier = x.abs() >= form.threshold
    rest = x.float().masked_fill(outlier, 0)
    largest = rest.abs().amax(-1, keepdim=True)
    return torch.where(outlier, x, (_round(rest, largest) * (largest / LARGEST)).to(x.dtype))


def _round(x: Tensor, largest: Tensor) -> Tensor:
    return torch.where(largest == 0, 0.0, x * (LARGEST / largest)).round()
