"""LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339): int8 rows of weights, and activations whose outliers stay.

A few input features of large models are a hundred times larger than the rest. One int8 scale a token would be spent on
them; so their values are multiplied as they are, and only what remains is rounded:

    y = x_out W^T + (row scale) round(x_in / row scale) W^T        x_out: where |x| >= 6; x_in: the rest

The sum of both is one product of `fake_quantize`d rows with the dequantized weight, which is what the reference makes
of it. Outliers are found in the rows at hand, not at calibration: a fixed threshold needs no data and follows inputs
that calibration did not see, and sizes stay known. And they are found row by row, where the paper takes a column for
all rows of a call once one of them is large: else a request's result would depend on those beside it. What this gives
up, the small values of outlier columns in other rows, is rounded as everything small is.

Weights are int8 everywhere, scale = max|row| / 127, as bitsandbytes stores them, outlier columns too: the paper keeps
those in 16 bits, which a file can not, when columns are found as they come.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Form, Outliers

LARGEST = 127
ROW_FORMAT = 0
"""bitsandbytes' number for codes in the order of the weight; others belong to kernels of the past."""


def quantize(weight: Tensor, scheme: Scheme) -> PackedTensor:
    """Round a weight [O, I] to the nearest int8 of each row. Raises ValueError on a NaN or an infinity."""
    rows, columns = weight.shape
    codes = torch.empty((rows, columns), dtype=torch.int8, device=weight.device)
    largest = torch.empty(rows, device=weight.device)
    for part in row_slices(rows, columns):
        some = weight[part].float()
        largest[part] = some.abs().amax(1)
        if not largest[part].isfinite().all():
            at = part.start + int((~largest[part].isfinite()).nonzero()[0])
            raise ValueError(f"cannot quantize: row {at} holds a NaN or an infinity")
        codes[part] = _round(some, largest[part][:, None])
    kept = torch.tensor(ROW_FORMAT, dtype=torch.uint8)
    return PackedTensor(scheme, (rows, columns), {"codes": codes, "absmax": largest, "format": kept})


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """The weight [O, I] in `dtype`, or some of its rows: computed in float32, then rounded."""
    codes, scale = packed.parts["codes"][rows], packed.parts["absmax"][rows, None] / LARGEST
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device) if out is None else out
    for part in row_slices(*weight.shape):
        weight[part] = codes[part].float() * scale[part]
    return weight


def fake_quantize(x: Tensor, form: Form, scale: Tensor | None = None) -> Tensor:
    """x [..., I] with all but its outliers rounded to int8, in x's dtype. Raises ValueError on a NaN or an infinity."""
    assert isinstance(form, Outliers)
    assert scale is None, "the scale is that of the values at hand"
    if not x.isfinite().all():
        raise ValueError("cannot quantize: the activations hold a NaN or an infinity")
    outlier = x.abs() >= form.threshold
    rest = x.float().masked_fill(outlier, 0)
    largest = rest.abs().amax(-1, keepdim=True)
    return torch.where(outlier, x, (_round(rest, largest) * (largest / LARGEST)).to(x.dtype))


def _round(x: Tensor, largest: Tensor) -> Tensor:
    return torch.where(largest == 0, 0.0, x * (LARGEST / largest)).round()
