"""FP8 with a scale for every 128 by 128 block of the weight: DeepSeek's layout, which compressed-tensors calls `block`.

A scale for each block follows outliers as groups do, and costs next to nothing (one number for 16,384 weights), while a
product can still apply it once a tile. Its activations are E4M3 in groups of 128 inputs, scaled from the values of each
token (`floats.fake_quantize` on such a grid), so that both factors of a tile have one scale each.

Blocks at the lower and right ends may be smaller. The arithmetic is that of `floats.py`: scale = max|x| / 448, in the
wider of the weight's and the scale's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.affine import qparams
from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import Grid, Scheme
from attar.formats.weight_formats import Fp8Blocks

SIZE = Fp8Blocks.size
GRID = Grid("e4m3")


def quantize(weight: Tensor, scheme: Scheme) -> PackedTensor:
    """Round a weight [O, I] to the nearest float8 after scaling each block's largest magnitude to 448. Raises
    ValueError on a NaN or an infinity, and on a scale that overflows."""
    rows, columns = weight.shape
    scale_dtype = getattr(torch, scheme.scale_dtype)
    wide = torch.promote_types(weight.dtype, scale_dtype)
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = []
    for start in range(0, rows, SIZE):
        part = slice(start, start + SIZE)
        band = weight[part].to(wide)
        largest = torch.nn.functional.pad(band.abs().amax(0), (0, -columns % SIZE)).view(-1, SIZE).amax(1)
        if not largest.isfinite().all():
            block = int((~largest.isfinite()).nonzero()[0, 0])
            raise UserError("not_finite", f"cannot quantize: block {start // SIZE}, {block} holds a NaN or an infinity")
        scale, _ = qparams(-largest, largest, GRID, scale_dtype)
        scaled = band / _spread(scale, columns) + 0.0  # a zero is stored as code 0, whatever its sign
        codes[part] = scaled.clamp_(GRID.qmin, GRID.qmax).to(codes.dtype)
        scales.append(scale)
    return PackedTensor(scheme, (rows, columns), {"codes": codes, "scale": torch.stack(scales)})


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows: code * scale, computed in the wider of the two
    dtypes."""
    codes, columns = packed.parts["codes"][rows], packed.shape[1]
    scale = packed.parts["scale"].to(torch.promote_types(dtype, packed.parts["scale"].dtype))
    of_row = torch.arange(packed.shape[0], device=codes.device)[rows] // SIZE
    weight = torch.empty(codes.shape, dtype=dtype, device=codes.device) if out is None else out
    for part in row_slices(*weight.shape):
        weight[part] = codes[part].to(scale.dtype) * _spread(scale[of_row[part]], columns)
    return weight


def _spread(scale: Tensor, columns: int) -> Tensor:
    """Repeat scales [..., blocks] for each of their columns, [..., I]."""
    return scale.repeat_interleave(SIZE, -1)[..., :columns]
