"""The angles of rotary embeddings, and their stretching past the trained context.

Two kinds choose their frequencies by the sequence's length: `dynamic` (NTK-aware, grows with length) and `longrope`
(one set of factors up to the trained context, another beyond). Keys are rotated when they are written, so a choice that
changed in mid-sequence would leave old keys turned by other angles. The choice is therefore made by the *horizon*: a
length that the sequence does not exceed. One piece, chunks and a cache then give the same numbers. A sequence that
outgrows its horizon (`Rope.horizons`) is computed anew, with the next one.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

import attar.vml  # noqa: F401 - before the first table of angles
from attar.model.config import Rope

TABLE_ROWS = 256  # positions whose angles are computed at once


def frequencies(rope: Rope, horizon: int) -> Tensor:
    """Return the radians per position of each rotated pair: float32 [dims / 2]."""
    half = torch.arange(0, rope.dims, 2, dtype=torch.int64).float() / rope.dims
    theta = rope.theta
    if rope.kind == "dynamic" and horizon > rope.original_context:
        stretch = rope.factor * horizon / rope.original_context - (rope.factor - 1)
        theta *= stretch ** (rope.dims / (rope.dims - 2))
    base = 1.0 / theta**half
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope)
    if rope.kind == "longrope":
        factors = rope.long_factor if horizon > rope.original_context else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**half)
    return base


def _llama3(base: Tensor, rope: Rope) -> Tensor:
    """Apply Llama 3.1's rule: slow frequencies are divided by the factor, fast ones kept, others interpolated."""
    turns = rope.original_context * base / (2 * math.pi)  # whole turns within the trained context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return base * smooth + base / rope.factor * (1 - smooth)


def _yarn(base: Tensor, rope: Rope) -> Tensor:
    """Apply YaRN (Peng et al. 2023), NTK-by-parts: a ramp over the pairs between `beta_fast` and `beta_slow` turns."""

    def pair_with(turns: float) -> float:
        """Return the (fractional) pair index that makes `turns` whole turns within the trained context."""
        return rope.dims * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    ramp = (torch.arange(rope.dims // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return base * keep + base / rope.factor * (1 - keep)


def rotation(rope: Rope, positions: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [N, dims / 2], of positions [N] in sequences of at most `horizon` positions."""
    angle = positions[:, None].float() * frequencies(rope, horizon).to(positions.device)[None, :]
    return angle.cos() * rope.attention_factor, angle.sin() * rope.attention_factor


def far_rotation(rope: Rope, positions: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [N, dims / 2], of positions [N], which may lie past `horizon`.

    Before it they are those of `table`, to the bit. Past it they are computed in float64: a product in float32 would be
    off by more, the larger a position is.
    """
    cos, sin = (each[positions.clamp(max=horizon - 1)] for each in table(rope, horizon, positions.device))
    far = positions >= horizon
    if far.any():
        angle = positions[far, None].double() * frequencies(rope, horizon).to(positions.device).double()
        cos[far] = (angle.cos() * rope.attention_factor).float()
        sin[far] = (angle.sin() * rope.attention_factor).float()
    return cos, sin


def sectioned(rope: Rope, angles: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [N, dims / 2], of rows with positions by time, height and width, `angles` [3, N].

    Pairs turn by the position of their section (M-RoPE; Wang et al. 2024, section 2.1). Rows with three equal positions
    have the numbers of `table`, to the bit. Raises ValueError where positions lie past the horizon.
    """
    if angles.numel() and (int(angles.min()) < 0 or int(angles.max()) >= horizon):
        raise ValueError(f"positions {int(angles.min())} to {int(angles.max())} do not lie below {horizon}")
    own = zip(rope.sections, angles, torch.tensor(rope.sections).cumsum(0).tolist(), strict=True)
    parts = [(at, slice(end - count, end)) for count, at, end in own]
    cos, sin = (
        torch.cat([each[at][:, pairs] for at, pairs in parts], 1) for each in table(rope, horizon, angles.device)
    )
    return cos, sin


def turned_by(rope: Rope, positions: int, horizon: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [dims / 2], that turn a key `positions` further; its length stays."""
    angle = positions * frequencies(rope, horizon).double()
    return angle.cos().float(), angle.sin().float()


def table(rope: Rope, horizon: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return cos and sin, float32 [positions, dims / 2], of every position below `horizon`, and of some beyond.

    Callers share the tensors: they are read only.
    """
    rows = -(-horizon // TABLE_ROWS)
    return _table(rope, (1 << (rows - 1).bit_length()) * TABLE_ROWS, horizon if rope.grows else 0, str(device))


@functools.lru_cache(maxsize=8)
def _table(rope: Rope, rows: int, horizon: int, device: str) -> tuple[Tensor, Tensor]:
    """Return `table`, cached. Every piece has the same shape, so a number does not depend on torch's division of the
    work."""
    with torch.inference_mode(False):
        pieces = [rotation(rope, torch.arange(at, at + TABLE_ROWS), horizon) for at in range(0, rows, TABLE_ROWS)]
        cos, sin = zip(*pieces, strict=True)
        return torch.cat(cos).to(device), torch.cat(sin).to(device)
