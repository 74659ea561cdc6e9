"""NF4, QLoRA's format (Dettmers et al. 2023, arXiv 2305.14314): 16 numbers where a normal distribution is dense.

A block of 64 consecutive weights of a row is divided by its largest magnitude, and each is stored as the nearest of 16
values between -1 and 1. These are quantiles of N(0, 1): with F its distribution function and o = 1 - (1/32 + 1/30) / 2,

    negative   F^-1 at 8 evenly spaced points from o down to 1/2, the last left out, with a minus     7 values
    zero       itself, so that zeros stay zero
    positive   F^-1 at 9 evenly spaced points from o down to 1/2, the last left out                   8 values

all divided by F^-1(o), so that the ends are -1 and 1. `_TABLE` holds them as bitsandbytes does, rounded to float32; a
test derives them.

The magnitudes cost half a bit a weight (`nf4-single`, 4.5 bits). Double quantization makes them eight bits: less their
mean, they are divided by the largest of 256 and stored as the nearest of 256 values of a "dynamic" type. It spends its
bits on a fraction where numbers are large and on a decimal exponent where they are small. That is 4 + 8/64 + 32/(64
* 256) = 4.127 bits a weight, and 1.3 KB of constants a matrix.

Layout, arithmetic and names of the parts are bitsandbytes' (0.50), so that transformers loads the files: codes follow
one another two a byte, the first in the *high* half; `state` is a line of JSON with the mean in it. Its length would
depend on digits, and sizes are settled before weights are read: it is padded with blanks, which JSON allows.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import ALL, PackedTensor
from attar.formats.packing import row_slices
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Nf4

LARGEST_OFFSET = 1e38
BLOCK, NESTED_BLOCK = Nf4.block, Nf4.nested_block

_TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@cache
def values() -> Tensor:
    """Return the 16 values, float32, in the order of their codes."""
    return torch.tensor(_TABLE)


@cache
def dynamic_values() -> Tensor:
    """Return the 256 values of the second level, float32, in the order of their codes. Seven decades end at 1, the i-th
    from below cut into 2^i equal steps from a tenth of its end; a value is the middle of a step, with either sign. Zero
    and 1 make up the 256."""
    found = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, (1 << i) + 1)
        middles = 10 ** (i - 6) * ((edges[:-1] + edges[1:]) / 2)
        found += middles.tolist() + (-middles).tolist()
    return torch.tensor(sorted(found))


def to_codes(x: Tensor) -> Tensor:
    """Return the codes, uint8, of values between -1 and 1."""
    return _nearest(x, values())


def _nearest(x: Tensor, table: Tensor) -> Tensor:
    """Return the code of the nearest of ascending values, uint8; a tie goes to the lower."""
    table = table.to(x.device)
    return torch.bucketize(x, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def _scaled(x: Tensor, largest: Tensor) -> Tensor:
    return torch.where(largest == 0, 0.0, x / largest)


def quantize(weight: Tensor, scheme: Scheme) -> PackedTensor:
    """Round a weight [O, I] to the nearest values. The scheme's scale dtype becomes other readers' compute dtype.
    Raises ValueError on a NaN or an infinity, and where 64 does not divide I."""
    rows, columns = weight.shape
    scheme.check(columns)
    codes = torch.empty((rows, columns // 2), dtype=torch.uint8, device=weight.device)
    largest = torch.empty((rows, columns // BLOCK), device=weight.device)
    for part in row_slices(rows, columns):
        blocks = weight[part].float().unflatten(1, (-1, BLOCK))
        largest[part] = blocks.abs().amax(-1)
        codes[part] = pairs(_nearest(_scaled(blocks, largest[part][..., None]), values()).flatten(1))
    if not largest.isfinite().all():
        row, block = (~largest.isfinite()).nonzero()[0].tolist()
        raise UserError("not_finite", f"cannot quantize: row {row}, block {block} holds a NaN or an infinity")
    flat, shape = largest.flatten(), (rows, columns)
    parts = {"codes": codes.view(-1, 1), "map": values().to(weight.device).clone()}
    if not _form(scheme).double:
        return PackedTensor(scheme, shape, parts | {"absmax": flat, "state": state(shape, scheme)})
    offset = flat.mean()
    padded = torch.nn.functional.pad(flat - offset, (0, -len(flat) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    nested = padded.abs().amax(1)
    parts |= {
        "absmax": _nearest(_scaled(padded, nested[:, None]), dynamic_values()).flatten()[: len(flat)],
        "nested_absmax": nested,
        "nested_map": dynamic_values().to(weight.device).clone(),
        "state": state(shape, scheme, float(offset)),
    }
    return PackedTensor(scheme, shape, parts)


def pairs(codes: Tensor) -> Tensor:
    """Pack codes [O, I] two a byte, [O, I/2], the first in the high half."""
    return codes[:, ::2] << 4 | codes[:, 1::2]


def state(shape: tuple[int, int], scheme: Scheme, offset: float | None = None) -> Tensor:
    """Return the JSON that bitsandbytes stores with a weight, uint8 [256]; `offset` is the mean of rounded
    magnitudes."""
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": scheme.scale_dtype, "shape": list(shape)}
    assert (offset is not None) == _form(scheme).double
    if offset is not None:
        said |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    line = json.dumps(said).encode().ljust(Nf4.state_bytes)
    assert len(line) == Nf4.state_bytes
    return torch.tensor(list(line), dtype=torch.uint8)


def read_state(state: Tensor, double: bool = True) -> dict[str, Any]:
    """Return the fields of a quantization state. Raises ValueError where it is not the state of an NF4 weight in blocks
    of 64, with magnitudes that are `double` quantized or not."""
    try:
        said = json.loads(bytes(state.tolist()))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UserError("quantization_invalid", f"the quantization state is not JSON: {error}") from None
    if not isinstance(said, dict):
        raise UserError("quantization_invalid", "the quantization state is not a JSON object")
    wanted = {"quant_type": "nf4", "blocksize": BLOCK, "nested_blocksize": NESTED_BLOCK if double else None}
    for key, value in wanted.items():
        if said.get(key) != value:
            raise UserError(
                "quantization_unsupported", f"the quantization state has {key} {said.get(key)!r}: attar reads {value!r}"
            )
    offset = said.get("nested_offset")
    if double and not (isinstance(offset, int | float) and abs(offset) < LARGEST_OFFSET):
        raise UserError("quantization_invalid", "the quantization state has no nested_offset that is a float32")
    return said


def magnitudes(packed: PackedTensor, rows: slice = ALL) -> Tensor:
    """Return the largest magnitude of each block as stored, float32 [O, I/64]."""
    parts, width = packed.parts, packed.shape[1] // BLOCK
    if not _form(packed.scheme).double:
        return parts["absmax"].view(-1, width)[rows]
    first, last, step = rows.indices(packed.shape[0])
    assert step == 1
    blocks = torch.arange(first * width, last * width, device=parts["absmax"].device)
    largest = parts["nested_map"][parts["absmax"][blocks].long()] * parts["nested_absmax"][blocks // NESTED_BLOCK]
    return (largest + float(read_state(parts["state"])["nested_offset"])).view(-1, width)


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows: computed in float32, then rounded."""
    (height, columns), parts = packed.shape, packed.parts
    stored, largest = parts["codes"].view(height, columns // 2)[rows], magnitudes(packed, rows)
    weight = torch.empty((len(stored), columns), dtype=dtype, device=stored.device) if out is None else out
    for part in row_slices(*weight.shape):
        codes = torch.stack((stored[part] >> 4, stored[part] & 15), -1).view(len(stored[part]), -1, BLOCK)
        weight[part] = (parts["map"][codes.long()] * largest[part][..., None]).flatten(1)
    return weight


def _form(scheme: Scheme) -> Nf4:
    assert isinstance(scheme.weight, Nf4)
    return scheme.weight
