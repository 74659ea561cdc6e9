"""Attention of rows that see later rows too: those of one image, in models that read an image in both directions.

Such rows are few and come in one call, so they are computed by the reference on every CPU; the rows beside them stay
with the kernels of their cache. Each image is computed alone, so its bits do not depend on the call's other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attar.kernels import ref_attention
from attar.kernels.operands import AttentionForm
from attar.kv.pages import AttentionMetadata, PagedKV


def replace_rows(mixed: Tensor, q: Tensor, pages: PagedKV, place: AttentionMetadata, form: AttentionForm) -> Tensor:
    """Return causal outputs [N, H * D] with each row replaced that sees the positions of `place.spans` as well."""
    assert place.spans is not None
    mixed, starts = mixed.clone(), place.row_starts.tolist()
    for b, end in enumerate(starts[1:]):
        own = place.spans[starts[b] : end]
        for first, last in sorted({(first, last) for first, last in own.tolist() if last > first}):
            rows = starts[b] + (own[:, 1] == last).nonzero()[:, 0]  # the first may be 0, as of rows of text
            tail = None if place.tails is None else int(place.tails[b])
            whole = ref_attention.read_sequence(pages, place.block_tables[b], int(place.lengths[b]), tail, q.dtype)
            at, key_at = place.positions[rows], torch.arange(last, dtype=place.positions.dtype)
            keys, values = (each[:last].clone() for each in whole)
            mask = ref_attention.visible(at, key_at, form.window) | (key_at >= first)
            for each in (keys, values):
                each[~mask.any(0)] = 0  # blocks behind a window may be another's
            found = ref_attention.attend(q[rows][None], keys[None], values[None], mask, form)[0]
            if pages.bases is not None:
                found = pages.bases.values.turn_back(found)
            mixed[rows] = found.flatten(1).to(mixed.dtype)
    return mixed


def replace_rows_without_cache(
    mixed: Tensor, q: Tensor, keys: Sequence[Tensor] | Tensor, values: Sequence[Tensor] | Tensor, spans: Tensor,
    form: AttentionForm,
) -> Tensor:  # fmt: skip
    """Return causal outputs [N, H * D] of whole sequences with each row replaced that sees the positions of `spans`
    [N, 2] as well. Rows are at positions 0, 1, ... of their sequence. Gradients pass."""
    mixed, start = mixed.clone(), 0
    for k, v in zip(keys, values, strict=True):
        own = spans[start : start + len(k)]
        key_at = torch.arange(len(k), device=q.device)
        for first, last in sorted({(first, last) for first, last in own.tolist() if last > first}):
            at = (own[:, 1] == last).nonzero()[:, 0].to(q.device)
            mask = ref_attention.visible(at, key_at[:last], form.window) | (key_at[:last] >= first)
            rows = start + at
            mixed[rows] = ref_attention.attend(q[rows][None], k[None, :last], v[None, :last], mask, form)[0].flatten(1)
        start += len(k)
    return mixed


def spans_of(image_rows: list[tuple[int, int]], start: int, length: int) -> Tensor:
    """Return which positions each of `length` rows from position `start` sees besides those before it: int32
    [length, 2], first and end, both 0 for none.

    `image_rows` are the first position and the end of each image; one that lies partly in these rows is an error of the
    caller, because its later rows have no keys yet.
    """
    found = torch.zeros((length, 2), dtype=torch.int32)
    for first, end in image_rows:
        if first < start + length and end > start:
            assert start <= first
            assert end <= start + length, "the rows of an image that see each other come in one call"
            found[first - start : end - start] = torch.tensor([first, end], dtype=torch.int32)
    return found
