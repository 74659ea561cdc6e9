"""Images in calibration: sequences of an image, its text and calibration text, whose image rows the tower makes.

A block sees rows of an image as it sees those of tokens. So an id from the vocabulary's size on stands for a row of
`ImageRows.features`, and everything that reads sequences of ids takes such sequences as well: `hidden_states.embed`
writes these rows in place of those of the token table. In models with positions by time, height and width each
sequence has its own angles.

A sequence has the length of those of the calibration text, because blocks run on sequences of one length. What an
image and its text leave of it is filled with calibration text, which then stands behind an image, too.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.folder import Folder
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.sources.vision import image_settings, vision_config, vision_of
from attar.compression.resume import Damaged, restore, save
from attar.errors import UserError
from attar.images.pairs import PairPrompts, read_pairs
from attar.progress import StageProgress


@dataclass(frozen=True, eq=False)
class ImageRows:
    """Calibration sequences with images. An id of `first` or more is a row of `features`."""

    ids: Tensor  # int64 [P, L]
    features: Tensor  # float32 [M, I]
    angles: Tensor | None  # int64 [3, P, L]: time, height and width of each token, where the model has such positions
    first: int  # size of the vocabulary
    digest: str  # of the images
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what identifies the images, JSON-compatible."""
        return {"count": len(self.ids), "sha256": self.digest}

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [N, I] of ids [N]."""
        return self.features[ids - self.first]

    def positions(self, sequences: int) -> Tensor | None:
        """Return the positions [3, S, L] of so many sequences, of which these are the last; None where each token has
        one position."""
        if self.angles is None:
            return None
        text = torch.arange(self.ids.shape[1]).expand(3, sequences - len(self.ids), -1)
        return torch.cat((text, self.angles), 1)


def check(images: Path, source: Checkpoint) -> None:
    """Raise UserError where a model takes no images in calibration, or the folder has no pairs."""
    image_settings(source.folder.path)
    config = vision_config(Folder(source.folder.path))
    if config is not None and config.bidirectional:
        message = "--calib-images: rows of an image that see each other, as Gemma 3's do, are not supported"
        raise UserError("feature_unsupported", message)
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
                tuple(figures["warnings"]),
            )  # fmt: skip
    except Damaged:
        shutil.rmtree(kept)
    found = make(images, source, text, most, memory, progress)
    tensors = {"ids": found.ids, "features": found.features}
    tensors |= {} if found.angles is None else {"angles": found.angles}
    save(kept, {"digest": found.digest, "warnings": list(found.warnings)}, tensors)
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
        digest.hexdigest(), pairs.warnings,
    )  # fmt: skip
