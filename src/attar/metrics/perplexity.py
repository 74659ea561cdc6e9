"""Perplexity, and the protocol that makes its values comparable.

Two perplexities compare only where the same tokens were predicted from the same pasts. So the protocol is data: the
length of a window, the distance to the next one, the token put in front, and which positions count. By default windows
do not overlap, each begins with BOS where the tokenizer adds one, and every token is predicted exactly once. With a
stride below the context, windows overlap, and each counts only tokens that no earlier window holds: more past, more
work.

Legend: T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.errors import UserError

DOUBLES_AT_ONCE = 1 << 21
"""Elements in float64 at a time: few enough to stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Window:
    """Inputs of one forward call and the token that follows each, both of length T. Positions before `first` are only
    context; the rest count."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    first: int = 0

    @property
    def counted(self) -> tuple[int, ...]:
        return self.targets[self.first :]


def plan_windows(ids: Sequence[int], context: int, stride: int | None = None, bos: int | None = None) -> list[Window]:
    """Cut token ids into windows of at most `context` inputs, the next one `stride` further (None: `context`). With
    `bos`, each window's first input is that token and every id is predicted once; without it, every id but the first.
    Raises ValueError for fewer than two tokens, and for a stride that would skip some."""
    if len(ids) < 2:
        raise UserError(
            "text_too_short", f"the text has {len(ids)} token{'' if len(ids) == 1 else 's'}: at least 2 are needed"
        )
    stride = context if stride is None else stride
    if context < 1 or not 1 <= stride <= context:
        raise UserError(
            "window_invalid", f"a stride of {stride} does not fit a context of {context}: it must lie in 1..{context}"
        )
    windows, counted = [], 0 if bos is not None else 1  # `counted`: ids before it are done
    begin = counted
    while counted < len(ids):
        end = min(begin + context, len(ids))
        past = [bos, *ids[begin : end - 1]] if bos is not None else ids[begin - 1 : end - 1]
        windows.append(Window(tuple(past), tuple(ids[begin:end]), counted - begin))
        counted, begin = end, begin + stride
    return windows


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood in nats of targets [T] under logits [T, V], in float64: [T]."""
    parts = zip(in_rows(logits), in_rows(targets, logits.shape[1]), strict=True)
    return torch.cat([-part.double().log_softmax(-1).gather(1, wanted[:, None])[:, 0] for part, wanted in parts])


def in_rows(rows: Tensor, vocabulary: int | None = None) -> list[Tensor]:
    """Split rows [T, ...] into runs of `DOUBLES_AT_ONCE` elements of `vocabulary` columns (default: their own
    width)."""
    return list(rows.split(max(1, DOUBLES_AT_ONCE // (vocabulary or rows.shape[1]))))
