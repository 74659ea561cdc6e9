"""A table of numbers for each row, and codes into it: SqueezeLLM (Kim et al. 2023, arXiv 2306.07629), dense and sparse.

With no grid to keep to, the 2^b numbers of a row go where its weights are: they are the centres of a weighted k-means
(`kmeans.py`), which minimises the sum of sensitivity * (weight - value)^2. A sensitivity says how fast the loss rises
with a weight's squared error: the diagonal of the Fisher information. Without sensitivities all weights count the same.
A table costs 16 * 2^b / I bits a weight, 1/16 at 4 bits and 4096 columns, half of what groups of 128 pay.

A few weights far from all others would each take a centre to themselves. The share of `outliers` with the largest
magnitude is left out of the means. With sensitivities, the most sensitive 0.05 % of the matrix come first, as in the
paper. They are stored apart as CSR: `starts` of each row, `places` (columns) and `extras`, which are *added* to the
dense values, so that a product is the sum of a dense and a sparse one. They cost 48 bits each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.codecs import kmeans
from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import pack_words, row_slices, unpack_words
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Lookup

SENSITIVE = 0.0005  # share of a matrix that is stored apart for its sensitivity


def quantize(weight: Tensor, scheme: Scheme, sensitivity: Tensor | None = None) -> PackedTensor:
    """Round the weight [O, I] to a table for each row, found by k-means. `sensitivity` [O, I] is not negative. Raises
    ValueError on a NaN or an infinity, on weights beyond the dtype of the table, and on sensitivities that are negative
    or not finite."""
    form, (rows, columns) = _form(scheme), weight.shape
    numbers: torch.dtype = getattr(torch, form.numbers)
    if weight.abs().max() > torch.finfo(numbers).max or not weight.isfinite().all():
        raise UserError(
            "not_finite", f"cannot quantize: the weight holds a NaN, an infinity, or values beyond {form.numbers}"
        )
    if sensitivity is not None and not (sensitivity.isfinite() & (sensitivity >= 0)).all():
        raise ValueError("sensitivities must be finite and not negative")
    apart = outliers(weight, form.count((rows, columns)), sensitivity) if form.outliers else None
    table = torch.empty((rows, 1 << form.bits), dtype=numbers, device=weight.device)
    codes = torch.empty((rows, columns), dtype=torch.int8, device=weight.device)
    for part in row_slices(rows, columns):
        some = weight[part].double()
        count = torch.ones_like(some) if sensitivity is None else sensitivity[part].double()
        if apart is not None:
            count = count.masked_fill(apart[part], 0)
        table[part] = kmeans.centres(some, count, 1 << form.bits).to(numbers)
        codes[part] = _nearest(some, table[part].double())
    parts = {"codes": words(scheme, codes), "table": table}
    if apart is not None:
        parts["starts"] = torch.nn.functional.pad(apart.sum(1).cumsum(0), (1, 0)).int()
        row, place = apart.nonzero().unbind(1)
        parts["places"] = place.int()
        parts["extras"] = (weight[row, place].float() - table[row, codes[row, place].long()].float()).to(numbers)
    return PackedTensor(scheme, (rows, columns), parts)


def words(scheme: Scheme, codes: Tensor) -> Tensor:
    """Return codes [O, I], counted from zero, as stored words."""
    bits = _form(scheme).bits
    return pack_words(codes.to(torch.int8) - (1 << (bits - 1)), bits)


def outliers(weight: Tensor, count: int, sensitivity: Tensor | None) -> Tensor:
    """Return which `count` weights of a matrix are stored apart: bool [O, I]. Among equals the first are taken."""
    apart = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    if sensitivity is not None:
        apart |= _largest(sensitivity.float().flatten(), min(count, round(SENSITIVE * weight.numel())))
    magnitude = weight.abs().flatten().masked_fill(apart, -1)
    return (apart | _largest(magnitude, count - int(apart.sum()))).view(weight.shape)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return which of the values [n] are the `count` largest, bool [n]; among equals the first are taken."""
    if not count:
        return torch.zeros(len(values), dtype=torch.bool, device=values.device)
    least = values.kthvalue(len(values) - count + 1).values
    found = values > least
    found[(values == least).nonzero()[: count - int(found.sum()), 0]] = True
    return found


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return codes, int8, of x [R, I] in ascending tables [R, 2^b]."""
    return torch.searchsorted((table[:, :-1] + table[:, 1:]) / 2, x).to(torch.int8)


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows: added in float32, then rounded. Raises ValueError where
    outliers of a damaged file lie outside of the matrix."""
    form, columns, parts = _form(packed.scheme), packed.shape[1], packed.parts
    words, table = parts["codes"][rows], parts["table"][rows]
    weight = torch.empty((len(words), columns), dtype=dtype, device=words.device) if out is None else out
    first = rows.indices(packed.shape[0])[0]
    for part in row_slices(*weight.shape):
        codes = unpack_words(words[part], form.bits, columns).long() + (1 << (form.bits - 1))
        values = table[part].float().gather(1, codes)
        if form.outliers:
            _add_outliers(values, packed, first + part.start)
        weight[part] = values
    return weight


def _add_outliers(values: Tensor, packed: PackedTensor, first: int) -> None:
    """Add the stored outliers of rows [R, I], from row `first` on, to their values."""
    starts = packed.parts["starts"][first : first + len(values) + 1].long()
    counts, begin, end = starts.diff(), int(starts[0]), int(starts[-1])
    places = packed.parts["places"][begin:end].long()
    inside = begin >= 0 and len(places) == end - begin and bool((counts >= 0).all())
    if not inside or (len(places) and not 0 <= int(places.min()) <= int(places.max()) < values.shape[1]):
        raise UserError("checkpoint_malformed", "outliers lie outside of the matrix: the file is damaged")
    at = torch.arange(len(values), device=values.device).repeat_interleave(counts)
    values.index_put_((at, places), packed.parts["extras"][begin:end].float(), accumulate=True)


def _form(scheme: Scheme) -> Lookup:
    assert isinstance(scheme.weight, Lookup)
    return scheme.weight
