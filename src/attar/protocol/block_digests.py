"""Digests of cached blocks: one number for the tokens of a block and all tokens before it.

A server with several engines sends a request where its prompt is cached. It learns from each engine which blocks the
prefix cache has (`messages.CachedBlocks`), and computes the same digests of a prompt. A digest is 8 bytes of BLAKE2b
over the digest before it and the block's tokens as int32. The hash's key is made from the salt, which holds the API
key's own salt. So digests of different keys and adapters have nothing in common. A collision costs a detour, never a
wrong token: engines compare token ids.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence

BYTES = 8  # of a digest
_ITEM = array("i").itemsize


def salt_of(adapter: int, cache_salt: bytes, horizon: int = 0) -> bytes:
    """Return the salt of a request's blocks: the number of its adapter, of fixed length, the API key's salt, and the
    horizon of its rotary angles, where there is one."""
    salt = adapter.to_bytes(4, "little") + cache_salt
    return salt + horizon.to_bytes(8, "little") if horizon else salt


def horizon_of(horizons: Sequence[int], length: int) -> int:
    """Return the horizon of a sequence of this length: the first of the ascending `horizons` that it does not exceed;
    0 where its keys never change."""
    return horizons[bisect_left(horizons, length)] if horizons else 0


def key_of(salt: bytes) -> bytes:
    """Return the hash's key for all digests of a salt."""
    return hashlib.blake2b(salt, digest_size=32, person=b"attar blocks").digest()


def chain(key: bytes, tokens: array[int], size: int, before: int = 0) -> array[int]:
    """Return the digests of the whole blocks of `size` tokens that `tokens` begin with, behind the digest `before`; a
    rest of less than a block has none."""
    found = array("Q")
    data, step, last = memoryview(tokens).cast("B"), size * _ITEM, before.to_bytes(BYTES, sys.byteorder)
    for at in range(0, len(data) - step + 1, step):
        last = hashlib.blake2b(last + data[at : at + step], digest_size=BYTES, key=key).digest()
        found.append(int.from_bytes(last, sys.byteorder))
    return found


def packed(digests: Iterable[int]) -> bytes:
    """Return digests as bytes, `BYTES` each."""
    return array("Q", digests).tobytes()


def unpacked(data: bytes) -> array[int]:
    """Return the digests of bytes that `packed` made. Raises ValueError for a length that is no multiple of one."""
    found = array("Q")
    found.frombytes(data)
    return found
