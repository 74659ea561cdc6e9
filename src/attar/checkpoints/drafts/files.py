"""Folders of draft heads: which kind one is, and its tensors, each checked and none left over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attar.checkpoints.folder import CONFIG, DENSE, Folder, read_config, write_json
from attar.checkpoints.strict_io import CheckpointError, near
from attar.checkpoints.writer import ShardWriter, plan_files
from attar.formats import affine
from attar.formats.scheme import Part, Scheme
from attar.kernels.dispatch import BackendWeights
from attar.kernels.native.store import CpuWeights
from attar.kernels.operands import Linear, Norm
from attar.model.decoder import Decoder

Kind = Literal["medusa", "eagle", "eagle3", "exit"]

EAGLE3 = frozenset(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"))
"""Architectures of the configs of SafeAILab and SpecForge, and of vLLM."""

EXIT = "AttarEarlyExit"
"""The architecture of the configs of early exits."""


ROUNDED = Scheme.parse("w8")
"""What a head's matrices are rounded to."""

READ = "Medusa, EAGLE and EAGLE-3 heads, early exits and draft models"


def kind_of(path: Path) -> Kind | None:
    """Return the kind of head in a folder by its config; None for a model, or what is no folder. Raises
    CheckpointError where the config cannot be read, or is of a kind that is not."""
    if not (path / CONFIG).is_file():
        return None
    config = read_config(path / CONFIG)
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    names = config.get("architectures")
    if names == [EXIT]:
        return "exit"
    other = config.get("speculators_model_type")
    if other is not None and other != "eagle3":
        raise CheckpointError("feature_unsupported", f"{path}: {other!r} drafts are not read: {READ} are")
    if names == ["LlamaForCausalLM"] and config.get("num_hidden_layers") == 1 and _has_fc(path):
        return "eagle"
    if config.get("speculators_model_type") == "eagle3" or (isinstance(names, list) and EAGLE3.intersection(names)):
        return "eagle3"
    return None


def _has_fc(path: Path) -> bool:
    """Return whether a folder of one Llama block joins two inputs in front of it: it is a head then, and no model."""
    folder = Folder(path)
    folder.close()
    return folder.has("fc.weight")


class HeadFolder:
    """An open folder of a head. Its tensors are read as `dtype`, None for the stored one, and only in the shape that is
    expected."""

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        self.folder, self.dtype = Folder(path), dtype
        self.config: Mapping[str, Any] = self.folder.config
        self._unread = dict.fromkeys(self.folder.names())

    def error(self, message: str) -> CheckpointError:
        return CheckpointError("checkpoint_mismatch", f"{self.folder.path}: {message}")

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of these settings that the config has. Raises CheckpointError where it has none, or one that
        is no positive integer."""
        found = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise CheckpointError(
                "config_invalid", f"{self.folder.path}: {' or '.join(names)} is a positive integer, not {found!r}"
            )
        return found

    def match(self, hidden: int, vocab_size: int) -> None:
        """Raise CheckpointError where the config names another hidden size or vocabulary."""
        for name, mine, what in (
            ("hidden_size", hidden, "hidden size"), ("vocab_size", vocab_size, "vocabulary"),
        ):  # fmt: skip
            if (theirs := self.integer(name, default=mine)) != mine:
                raise self.error(f"made for a model with a {what} of {theirs}, and this one's is {mine}")

    def has(self, name: str) -> bool:
        return self.folder.has(name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of numbers. Raises CheckpointError where it is missing, or of another shape or kind."""
        info = self._expect(name, shape)
        if info not in DENSE:
            raise self.error(f"{name} is {info}: a draft head's numbers are floating")
        found = self.folder.read(name)
        return found if self.dtype is None else found.to(self.dtype)

    def indices(self, name: str, count: int, size: int, offset: bool = False) -> Tensor:
        """Return token ids, int64 [count], all in 0..size-1; with `offset` they are stored less their place. Raises
        CheckpointError for others."""
        self._expect(name, (count,))
        found = self.folder.read(name).long()
        if offset:
            found = found + torch.arange(count)
        if int(found.min()) < 0 or int(found.max()) >= size:
            raise self.error(f"{name} names token {int(found.max())} or {int(found.min())}: there are 0 to {size - 1}")
        if len(found.unique()) < count:
            raise self.error(f"{name} names a token twice")
        return found

    def skip(self, name: str) -> None:
        """Leave out a tensor that another one implies."""
        self._unread.pop(name, None)

    def finish(self) -> None:
        """Raise CheckpointError where a tensor was not read: it would change what the head computes."""
        if self._unread:
            names = list(self._unread)
            raise self.error(f"{len(names)} tensors have no place in this head: {', '.join(names[:3])}")
        self.folder.close()

    def _expect(self, name: str, shape: tuple[int, ...]) -> str:
        if not self.folder.has(name):
            raise CheckpointError(
                "checkpoint_incomplete",
                f"{self.folder.path}: has no tensor {name!r}{near(name, list(self.folder.names()))}",
            )
        info = self.folder.info(name)
        if tuple(info.shape) != shape:
            raise self.error(f"{name} is {list(info.shape)}, and {list(shape)} by the config and the model")
        self._unread.pop(name, None)
        return info.dtype


def lay_out(
    store: BackendWeights | None, target: Decoder, linears: Iterable[Linear], norms: Iterable[Norm] = ()
) -> None:
    """Pack a head's linears and norms in `store`, where there is one. The target's LM head is packed already.

    Matrices get 8 bits where the kernels of `store` round activations as well: the bytes that a draft reads are its
    cost, and its errors change no text.
    """
    if store is None:
        return
    rounds = isinstance(store, CpuWeights) and store.activations != "exact"
    for linear in linears:
        if linear is target.head:
            continue
        if rounds and isinstance(linear.weight, Tensor) and bool(linear.weight.isfinite().all()):
            linear.weight = affine.quantize(linear.weight.float(), ROUNDED)
        store.take(linear)
    for norm in norms:
        store.take_norm(norm)


def size(path: Path) -> tuple[int, int]:
    """Return the numbers that a head's folder stores, and its bytes. Raises CheckpointError as `Folder` does."""
    folder = Folder(path)
    parts = [folder.info(name) for name in folder.names()]
    folder.close()
    return sum(math.prod(part.shape) for part in parts), sum(part.bytes for part in parts)


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a head's config and tensors, in one file, to a folder that exists."""
    parts = {name: Part(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    with ShardWriter(folder, plan_files(parts, sum(part.bytes for part in parts.values()) + 1)) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish()
    write_json(folder / CONFIG, config)
