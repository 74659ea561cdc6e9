"""Hadamard matrices, of entries 1 and -1 with orthogonal rows, and products with them in O(n log n).

A row x [n] times H / sqrt(n) keeps its length, and an outlier in one column is spread over all of them: so activations
are rotated before they are rounded. Orders that are a power of two are Sylvester's, H_2n = [[H, H], [H, -H]], and a
product is log2(n) rounds of sums and differences. Others are a Kronecker product of a Sylvester matrix and the smallest
of Paley's that fits (J. Math. and Phys. 12, 1933):

* q + 1 for a prime q = 3 mod 4: 12, 20, 24, 44, 48, 60, 68, 72, 80, 84 ...;
* 2 (q + 1) for a prime q = 1 mod 4: 12, 28, 36, 60, 76, 84 ...

These include every multiple of four up to 48, and the widths of published models that are not powers of two (768, 896,
1152, 1536, 2304, 2560, 3072, 3584, 4608, 5120, 6656 ...). Not done: Paley's construction over fields of a prime power's
size, and Williamson's, which would add 52, 92, 100 and some more.

The first row of each matrix is all ones. Sylvester's are symmetric, Paley's need not be.

Sums and differences are taken element by element, so that a row times a Sylvester matrix has the same bits whatever
other rows are in the call.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from attar.errors import UserError

LARGEST_BASE = 1024  # a product with a base of b columns costs b operations an element


def block_of(columns: int) -> int:
    """Return the largest power of two that divides `columns`."""
    return columns & -columns


def factors(size: int) -> tuple[int, int]:
    """Return (b, s) with b s = `size`, s a power of two and b 1 or the smallest order of a Paley matrix that fits.
    Raises ValueError, naming the size, where no such matrix is known here."""
    power = block_of(size) if size > 0 else 0
    base = size // power if power else 0
    if base == 1:
        return 1, size
    while power and base <= LARGEST_BASE:
        if _paley_prime(base) is not None:
            return base, power
        base, power = base * 2, power // 2
    raise UserError("architecture_unsupported", f"no Hadamard matrix of order {size} is known here")


def matrix(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the Hadamard matrix [size, size] of ones and minus ones. Raises ValueError like `factors`."""
    found: Tensor = torch.eye(size, dtype=dtype)
    return (rotate(found, size) * math.sqrt(size)).round()


def rotate(x: Tensor, size: int, transposed: bool = False) -> Tensor:
    """Multiply x [..., m size] by H / sqrt(size), or its transpose, in each of its m blocks of columns. The arithmetic
    is float32 where x has fewer bits. Raises ValueError like `factors`."""
    base, power = factors(size)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    y = _sylvester(wide.reshape(-1, power))
    if base > 1:
        mixing = _paley(base).to(y.dtype)
        mixing = mixing if transposed else mixing.T
        y = mixing @ y.view(-1, base, power)
    return (y.reshape(x.shape) / math.sqrt(size)).to(x.dtype)


def _sylvester(x: Tensor) -> Tensor:
    """Multiply rows [N, n], n a power of two, by Sylvester's matrix."""
    rows, size = x.shape
    half = 1
    while half < size:
        a, b = x.view(rows, size // (2 * half), 2, half).unbind(2)
        x = torch.stack((a + b, a - b), 2).view(rows, size)
        half *= 2
    return x


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def _paley_prime(order: int) -> int | None:
    """Return the prime of Paley's construction for this order, or None where there is none."""
    if order % 4:
        return None
    if _is_prime(order - 1):  # which is 3 mod 4
        return order - 1
    half = order // 2 - 1
    return half if half % 4 == 1 and _is_prime(half) else None


@functools.lru_cache(maxsize=8)
def _paley(order: int) -> Tensor:
    """Return Paley's matrix [order, order], int8, its first row all ones."""
    prime = _paley_prime(order)
    assert prime is not None, order
    residues = {i * i % prime for i in range(1, prime)}
    character = torch.tensor([0] + [1 if i in residues else -1 for i in range(1, prime)], dtype=torch.int8)
    numbers = torch.arange(prime)
    jacobsthal = character[(numbers[:, None] - numbers) % prime]
    ones = torch.ones(prime, dtype=torch.int8)
    core = torch.zeros(prime + 1, prime + 1, dtype=torch.int8)  # a conference matrix: C C^T = prime I
    core[0, 1:], core[1:, 1:] = ones, jacobsthal
    core[1:, 0] = ones if prime % 4 == 1 else -ones
    identity = torch.eye(prime + 1, dtype=torch.int8)
    if prime % 4 == 3:  # C is skew
        found = core + identity
    else:  # C is symmetric: I becomes [[1, -1], [-1, -1]], each entry of C itself times [[1, 1], [1, -1]]
        sums = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
        found = torch.kron(core, sums) + torch.kron(identity, torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8))
    return found * found[0]
