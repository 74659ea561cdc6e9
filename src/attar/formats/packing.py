"""Packing codes of 2 to 8 bits into 32-bit words, in the orders that files use, and unpacking them.

Three orders are in use:

* dense (compressed-tensors' pack-quantized): element i of a row fills bits [i*b, (i+1)*b) of the row's bit string,
  which is cut into little-endian words; an element may straddle two words, and no bit is wasted inside a row;
* GPTQ: the same string, but running down the *input* dimension of a transposed weight. Its 3-bit runs of 32 values in
  3 words, often described as a special case, are exactly the dense order;
* AWQ: eight 4-bit outputs a word, nibble i holding output (0, 2, 4, 6, 1, 3, 5, 7)[i].

Files store unsigned values; in memory codes are signed, smaller by 2^(b-1), and zero points are shifted alike, so their
difference, which is all that arithmetic uses, is unchanged.

All work is done on bytes, not words: since words are little-endian, the dense order is also dense over bytes. So b
bytes hold 8 values (fewer where b and 8 share a factor), and each value is an OR of at most two shifted bytes. uint8
arithmetic wraps, as the shifts need. Rows go in slices of half a million elements, so temporaries stay small and in
cache.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from attar.errors import UserError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output column, of eight, that nibble i of an AWQ word holds."""

_SLICE = 1 << 19

assert sys.byteorder == "little", "bit orders here are those of little-endian machines"


def row_slices(rows: int, columns: int, elements: int = _SLICE) -> Iterator[slice]:
    """Return slices that cover `rows` in order, each of about `elements` and at least one row."""
    step = max(1, elements // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes [R, C] (any integer dtype, -2^(bits-1) .. 2^(bits-1)-1) into int32 words [R, ceil(C*bits/32)].
    Bits past a row's last element are zero."""
    rows, columns = codes.shape
    half = 1 << (bits - 1)
    words = torch.zeros((rows, -(-columns * bits // 32)), dtype=torch.int32, device=codes.device)
    period, width = _period(bits)
    runs = -(-columns // period)
    for part in row_slices(rows, columns):
        piece = codes[part]
        if piece.numel():
            low, high = piece.aminmax()
            assert -half <= int(low) <= int(high) < half, f"codes {int(low)} .. {int(high)} do not fit {bits} bits"
        unsigned = (piece + half).to(torch.uint8)
        unsigned = torch.nn.functional.pad(unsigned, (0, runs * period - columns)).view(-1, runs, period)
        packed = torch.zeros((unsigned.shape[0], runs, width), dtype=torch.uint8, device=codes.device)
        for j in range(period):
            byte, shift = divmod(j * bits, 8)
            packed[..., byte] |= unsigned[..., j] << shift
            if shift + bits > 8:
                packed[..., byte + 1] |= unsigned[..., j] >> (8 - shift)
        target = words[part].view(torch.uint8)
        used = min(runs * width, target.shape[1])  # whole runs may reach past the last word, with nothing but zeros
        target[:, :used] = packed.flatten(1)[:, :used]
    return words


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Unpack int32 words [R, W] to signed codes, int8 [R, columns]; undoes `pack_words`. Raises ValueError where
    `columns` elements do not take W words."""
    rows, stored = words.shape
    if stored != -(-columns * bits // 32):
        raise UserError(
            "checkpoint_malformed",
            f"{columns} elements of {bits} bits take {-(-columns * bits // 32)} words a row, not {stored}",
        )
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=words.device)
    period, width = _period(bits)
    runs = -(-columns // period)
    for part in row_slices(rows, columns):
        raw = words[part].contiguous().view(torch.uint8)
        raw = torch.nn.functional.pad(raw, (0, max(0, runs * width - raw.shape[1])))[:, : runs * width]
        raw = raw.reshape(-1, runs, width)
        whole = columns == runs * period
        target = codes[part] if whole else codes.new_empty((raw.shape[0], runs * period))
        values = target.view(-1, runs, period)
        for j in range(period):
            byte, shift = divmod(j * bits, 8)
            value = raw[..., byte] >> shift
            if shift + bits > 8:
                value |= raw[..., byte + 1] << (8 - shift)
            values[..., j] = value
        target &= (1 << bits) - 1
        target -= 1 << (bits - 1)
        if not whole:
            codes[part] = target[:, :columns]
    return codes.view(torch.int8)


def _period(bits: int) -> tuple[int, int]:
    """Return the shortest run of whole bytes that holds whole elements: (elements, bytes)."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def unpack_gptq(qweight: Tensor, bits: int) -> Tensor:
    """Unpack GPTQ's qweight, int32 [I*bits/32, O] packed down the input dimension, to signed codes, int8 [O, I]. A GPTQ
    qzeros, int32 [groups, O*bits/32], is in the dense order along its rows: `unpack_words(qzeros, bits, O)`. Version 1
    of the format stores zero points minus one; the reader adds it."""
    return unpack_words(qweight.t(), bits, qweight.shape[0] * 32 // bits)


def unpack_awq(words: Tensor) -> Tensor:
    """Unpack AWQ's qweight [I, O/8] or qzeros [groups, O/8], int32, to signed 4-bit codes, int8 [I or groups, O]."""
    in_nibble_order = unpack_words(words, 4, words.shape[1] * 8).view(*words.shape, 8)
    return in_nibble_order[..., [AWQ_ORDER.index(column) for column in range(8)]].flatten(1)


def pack_awq(codes: Tensor) -> Tensor:
    """Pack signed 4-bit codes [R, C], C a multiple of 8, into AWQ's int32 words [R, C/8]; undoes `unpack_awq`."""
    return pack_words(codes.reshape(codes.shape[0], -1, 8)[..., list(AWQ_ORDER)].flatten(1), 4)
