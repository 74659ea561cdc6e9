"""Random numbers as functions of counters: nothing has a state that other work could advance.

The generator is Philox4x64-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The first word of
the key is a request's seed, the second tells uses apart: 1 for seeds of choices, 2 for `gumbel`.

`gumbel` is the noise of the Gumbel-max draw: the largest x_i + noise_i is token i with probability softmax(x)_i
(Gumbel 1954; Maddison et al., arXiv 1411.0030). Its numbers are the same bits on all machines. So the logarithm is
written out in additions, products and quotients, which IEEE 754 rounds alike everywhere: logarithms of libraries differ
in the last bit. The same order of operations is in csrc/sample.cpp and triton/noise.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_WORD = 2**64 - 1
_KEYS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_FACTORS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
NOISE_KEY = 2
WORDS = 4
LN2 = float.fromhex("0x1.62e42fefa39efp-1")
_ROOT_HALF = 0x3FE6A09E667F3BCD  # bits of sqrt(1/2)
_HALF = 2**32 - 1


def philox4x64(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Return four 64-bit words of Philox4x64-10 for a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = _FACTORS[0] * c0, _FACTORS[1] * c2
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & _WORD, (low >> 64) ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + _KEYS[0]) & _WORD, (k1 + _KEYS[1]) & _WORD
    return c0, c1, c2, c3


def seed_of_choice(seed: int, number: int) -> int:
    """Return the seed of a request's choice: the request's own for the first, an unrelated one for others. So requests
    of neighbouring seeds share no texts."""
    return philox4x64((number, 0, 0, 0), (seed, 1))[0] if number else seed


def draws(seeds: Sequence[int], indices: Sequence[int]) -> Tensor:
    """Return the bits of seeds and indices, each 0 to 2^64 - 1, as int64 [2, B]: torch computes little in uint64."""
    return torch.from_numpy(np.array([seeds, indices], np.uint64).view(np.int64))


def gumbel(draws: Tensor, count: int) -> Tensor:
    """Return the noise of tokens 0 to count - 1 for each draw: float64 [B, count], from -3.61 to 36.74.

    draws: int64 [2, B], as `draws` makes them, on any device. Noise i is -log(-log(u)), where u is the middle of one of
    2^52 equal parts of (0, 1), chosen by the first 52 bits of word i % 4 of the Philox block (index, 0, i // 4, 0)
    under the key (seed, 2).
    """
    seeds, indices = draws[:, :, None]
    blocks = torch.arange(-(-count // WORDS), device=draws.device)
    words = torch.stack(_words(indices, blocks, seeds), -1).flatten(1)[:, :count]
    u = (_shifted(words, 12).double() + 0.5) * 2.0**-52
    return -logarithm(-logarithm(u))


def logarithm(x: Tensor) -> Tensor:
    """Return the natural logarithms of positive normal float64 numbers, within 2 units in the last place.

    x = m 2^e with m in [sqrt(1/2), sqrt(2)), and log m = 2 artanh((m - 1) / (m + 1)) by its series.
    """
    bits = x.view(torch.int64)
    exponent = (bits - _ROOT_HALF) >> 52
    m = (bits - (exponent << 52)).view(torch.float64)
    s = (m - 1) / (m + 1)
    z = s * s
    total = torch.full_like(z, 1.0 / 23)
    for odd in range(21, 0, -2):
        total = total * z + 1.0 / odd
    return exponent.double() * LN2 + 2 * s * total


def _words(index: Tensor, blocks: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the Philox words of some blocks, as int64: unsigned words have the same bits."""
    zero = torch.zeros_like(index + blocks)
    c0, c1, c2, c3 = index + zero, zero, blocks + zero, zero
    for step in range(10):
        (low, carry_low), (high, carry_high) = _product(c0, _FACTORS[0]), _product(c2, _FACTORS[1])
        k0, k1 = seed + _signed(step * _KEYS[0]), _signed(NOISE_KEY + step * _KEYS[1])
        c0, c1, c2, c3 = carry_high ^ c1 ^ k0, high, carry_low ^ c3 ^ k1, low
    return c0, c1, c2, c3


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the low and the high words of x * factor, both unsigned."""
    a, b, c, d = _shifted(x, 32), x & _HALF, factor >> 32, factor & _HALF
    middle = a * d + _shifted(b * d, 32)
    other = b * c + (middle & _HALF)
    return x * _signed(factor), a * c + _shifted(middle, 32) + _shifted(other, 32)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift unsigned words to the right."""
    return (x >> by) & (_WORD >> by)


def _signed(word: int) -> int:
    word &= _WORD
    return word - 2**64 if word >> 63 else word
