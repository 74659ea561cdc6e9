"""Images in calibration: sequences of an image, its text and calibration text, whose image rows the tower makes.

A block sees rows of an image as it sees those of tokens. So an id from the vocabulary's size on stands for a row of
`ImageRows.features`, and everything that reads sequences of ids takes such sequences as well: `hidden_states.embed`
writes these rows in place of those of the token table. In models with positions by time, height and width each
sequence has its own angles. In models whose image rows see each other (Gemma 3) it has its own spans.

A sequence has the length of those of the calibration text, because blocks run on sequences of one length. What an
image and its text leave of it is filled with calibration text, which then stands behind an image, too.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.sources.vision import image_settings, vision_of
from attar.compression.resume import Damaged, restore, save
from attar.errors import UserError
from attar.images.pairs import PairPrompts, read_pairs
from attar.kernels.ref_spans import spans_of
from attar.progress import StageProgress


class ImagePlaces(NamedTuple):
    """What rows of sequences with images have beside their positions, where the model asks for it."""

    angles: Tensor | None = None  # int64 [3, S, L]: time, height and width of each token
    spans: Tensor | None = None  # int32 [S, L, 2]: positions that a row of an image sees besides those before it


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Calibration sequences with images. An id of `first` or more is a row of `features`."""

    ids: Tensor  # int64 [P, L]
    features: Tensor  # float32 [M, I]
    angles: Tensor | None  # int64 [3, P, L]: time, height and width of each token, where the model has such positions
    first: int  # size of the vocabulary
    digest: str  # of the images
    bidirectional: bool = False  # rows of an image see each other
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what identifies the images, JSON-compatible."""
        return {"count": len(self.ids), "sha256": self.digest}

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [N, I] of ids [N]."""
        return self.features[ids - self.first]

    def places(self, sequences: int) -> ImagePlaces:
        """Return the places of the rows of so many sequences, of which these are the last."""
        texts, length, angles, spans = sequences - len(self.ids), self.ids.shape[1], None, None
        if self.angles is not None:
            angles = torch.cat((torch.arange(length).expand(3, texts, -1), self.angles), 1)
        if self.bidirectional:
            found = [spans_of(_image_rows(line, self.first), 0, length) for line in self.ids]
            spans = torch.cat((torch.zeros((texts, length, 2), dtype=torch.int32), torch.stack(found)))
        return ImagePlaces(angles, spans)


def check(images: Path, source: Checkpoint) -> None:
    """Raise UserError where a model takes no images, or the folder has no pairs."""
    image_settings(source.folder.path)
    read_pairs(images)


def kept_or_made(
    images: Path, source: Checkpoint, text: Tensor, most: int, kept: Path, memory: int,
    progress: StageProgress | None = None,
) -> ImageRows:  # fmt: skip
    """Return sequences with at most `most` images, filled from calibration `text` [S, L].

    They are kept in the new folder `kept`, where a resumed run finds them. Raises ValueError where no pair fits, and
    for more than `memory` bytes of rows.
    """
    try:
        if kept.is_dir():
            figures, tensors = restore(kept)
            return ImageRows(
                tensors["ids"], tensors["features"], tensors.get("angles"), source.config.vocab_size, figures["digest"],
                figures["bidirectional"], tuple(figures["warnings"]),
            )  # fmt: skip
    except Damaged:
        shutil.rmtree(kept)
    found = make(images, source, text, most, memory, progress)
    tensors = {"ids": found.ids, "features": found.features}
    tensors |= {} if found.angles is None else {"angles": found.angles}
    figures = {"digest": found.digest, "bidirectional": found.bidirectional, "warnings": list(found.warnings)}
    save(kept, figures, tensors)
    return found


@torch.inference_mode()
def make(
    images: Path, source: Checkpoint, text: Tensor, most: int, memory: int, progress: StageProgress | None = None
) -> ImageRows:
    """Return sequences as `kept_or_made`."""
    path, first = source.folder.path, source.config.vocab_size
    vision = vision_of(path, torch.float32)
    length, told = text.shape[1], progress or (lambda done, total: None)
    pairs = PairPrompts(images, image_settings(path), vocabulary.tokenizer(path), length, most)
    lines: list[list[int]] = []
    features: list[Tensor] = []
    angles: list[Tensor] = []
    made, digest = 0, hashlib.sha256()
    for prompt in pairs:
        filler = text[len(lines) * len(text) // len(pairs)].tolist()
        filler = filler[1:] if filler[:1] == [pairs.bos] else filler
        line = [*prompt.ids, *filler][:length]
        if len(line) < length:
            raise UserError("calibration_too_short", "the calibration text is too short to stand behind an image")
        if (made + prompt.image.rows) * 4 * vision.hidden > memory:
            said = f"rows of {len(lines) + 1} images take more than {memory:,} bytes"
            raise UserError("memory_insufficient", f"{said}: lower --samples, or raise --calib-memory")
        if vision.rotary:
            angles.append(vision.positions(line, [prompt.image]))
        numbers = iter(range(first + made, first + made + prompt.image.rows))
        lines.append([next(numbers) if token == vision.image_token else token for token in line])
        features.append(vision.encode(prompt.image))
        made += prompt.image.rows
        digest.update(prompt.image.digest)
        told(len(lines), len(pairs))
    return ImageRows(
        torch.tensor(lines), torch.cat(features), torch.stack(angles, 1) if angles else None, first,
        digest.hexdigest(), vision.bidirectional, pairs.warnings,
    )  # fmt: skip


def _image_rows(line: Tensor, first: int) -> list[tuple[int, int]]:
    """Return first position and end of the image of a sequence: it has one, whose rows lie together."""
    at = (line >= first).nonzero()[:, 0]
    return [(int(at[0]), int(at[-1]) + 1)]
