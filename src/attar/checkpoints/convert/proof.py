"""Proof that a converted model is unchanged: digests of the tensors' values, and the report of a conversion.

A tensor's digest is that of its values as float32, columns in their order. Every format decodes to these values. So two
models with the same digests compute the same, bit for bit, where one program computes both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from attar.checkpoints.safetensors import byte_view
from attar.errors import UserError

PIECE = 1 << 20  # numbers worked on at a time


@dataclass(frozen=True)
class Converted:
    """Result of `convert`. `sha256` covers every tensor as float32, the same for source and output. Bits per weight
    cover all that is stored of the packed linears, in the output and in the source; None where there are none. A dense
    output may be rounded: `sha256` is of its values then."""

    path: Path
    format: str
    tensors: int
    packed: int  # linears among them
    bytes: int
    bits_per_weight: float | None
    source_bits: float | None
    sha256: str
    notes: tuple[str, ...]
    dtype: str | None = None  # of a dense output
    rounded: int = 0  # tensors of a dense output that hold other numbers than the source's, in its dtype

    def to_dict(self) -> dict[str, Any]:
        dense = {} if self.dtype is None else {"dtype": self.dtype, "rounded": self.rounded}
        return {
            "path": str(self.path),
            "format": self.format,
            "tensors": self.tensors,
            "packed": self.packed,
            "bytes": self.bytes,
            "bits_per_weight": self.bits_per_weight,
            "source_bits_per_weight": self.source_bits,
            "sha256": self.sha256,
            "notes": list(self.notes),
            **dense,
        }


def proof(done: Converted) -> Iterator[str]:
    """Yield the proof in sentences."""
    if done.dtype is not None:
        exact = done.tensors - done.rounded
        yield (
            f"{done.tensors} tensors, {done.packed} of them decoded: {exact} are exact, {done.rounded} were rounded to "
            f"{done.dtype}; sha256 {done.sha256} of what was written and of what was read back"
        )
        return
    yield (
        f"every one of {done.tensors} tensors, {done.packed} of them re-packed, decodes to the same bits: "
        f"sha256 {done.sha256} of the source and of what was read back"
    )
    if done.bits_per_weight is not None and done.source_bits is not None:
        yield f"stored bits of a re-packed weight: {done.source_bits:.3f} before, {done.bits_per_weight:.3f} now"


def pieces(values: Tensor) -> list[Tensor]:
    """Return the values of a tensor in order, as vectors of at most `PIECE`: tables are large."""
    flat = values.reshape(-1)
    return [flat[start : start + PIECE] for start in range(0, len(flat), PIECE)]


class Digest:
    """SHA-256 over tensors as float32, each with its name, in any order."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}  # of each tensor

    def add(self, name: str, values: Tensor) -> None:
        digest = hashlib.sha256()
        for piece in pieces(values):
            numbers = piece.float()  # outlives its view
            digest.update(byte_view(numbers))
        self.of[name] = digest.hexdigest()

    @property
    def whole(self) -> str:
        return hashlib.sha256("".join(f"{self.of[name]}  {name}\n" for name in sorted(self.of)).encode()).hexdigest()


def compare(ours: Digest, theirs: Digest) -> None:
    """Raise ValueError naming the first tensor that differs, before the output is put in place."""
    if different := [name for name in ours.of if ours.of[name] != theirs.of.get(name)]:
        raise UserError(
            "conversion_inexact", f"{different[0]} was read back otherwise than it was written: nothing is put in place"
        )
    assert ours.whole == theirs.whole
