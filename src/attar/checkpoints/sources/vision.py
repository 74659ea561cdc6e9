"""The vision tower of a checkpoint, read beside its language model: of a folder, or of a GGUF file's mmproj file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attar.checkpoints import image_settings as settings_of
from attar.checkpoints.folder import Folder, read_config
from attar.checkpoints.gguf import mmproj
from attar.checkpoints.gguf.checkpoint import PLAIN
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.sources.hf import quantized_reader
from attar.checkpoints.strict_io import naming
from attar.checkpoints.vocabulary import is_gguf
from attar.errors import UserError
from attar.formats.codecs import ggml_blocks
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import GgmlBlocks
from attar.images.settings import PREPROCESSOR, ImageSettings
from attar.kernels.dispatch import BackendWeights
from attar.kernels.native.layouts import GGML
from attar.kernels.operands import Linear
from attar.kernels.tiles import faster
from attar.model.families import read_config as read_model
from attar.model.vision import assembly
from attar.model.vision.config import VisionConfig, read_vision
from attar.model.vision.model import VisionModel
from attar.model.vision.tensors import tensors
from attar.plan.vision import TowerWeights

WEIGHT = ".weight"


class VisionFiles:
    """The tensors of an open folder, as `assembly.Source`."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._quantized = quantized_reader(folder)

    def has(self, name: str) -> bool:
        return self.folder.has(name) or (name.endswith(WEIGHT) and self.packed(name.removesuffix(WEIGHT)))

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        module = name.removesuffix(WEIGHT)
        if name.endswith(WEIGHT) and self._quantized is not None and self._quantized.holds(module):
            return assembly.PACKED, self._quantized.shape(module)
        part = self.folder.info(name)
        return part.dtype, tuple(part.shape)

    def read(self, name: str) -> Tensor:
        return self.folder.read(name)

    def packed(self, module: str) -> bool:
        return self._quantized is not None and self._quantized.holds(module)

    def linear(self, module: str) -> Linear:
        assert self._quantized is not None, f"{module} is not quantized"
        return self._quantized.read(module)

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a linear; None where it is dense."""
        quantized = self._quantized
        return quantized.scheme_of(module) if quantized is not None and quantized.holds(module) else None


class MmprojFiles:
    """The tensors of an mmproj file, as `assembly.Source`."""

    def __init__(self, found: mmproj.Mmproj, whole: bool = True) -> None:
        self.config, self.file = found.config, GgufFile(found.path, whole)
        self._swapped = self._legacy()

    def _legacy(self) -> bool:
        """Return whether the two matrices of a feed-forward have each other's names, as in files of before 2025."""
        down = f"{mmproj.NAMES.layer.format(i=0)}.{mmproj.NAMES.down}.weight"
        wide = (self.config.intermediate, self.config.hidden)
        return down in self.file and self.file.info(down).shape == wide != wide[::-1]

    def _stored(self, name: str) -> str:
        found = mmproj.stored_name(self.config, name)
        if self._swapped and ".ffn_up." in found:
            return found.replace(".ffn_up.", ".ffn_down.")
        return found.replace(".ffn_down.", ".ffn_up.") if self._swapped else found

    def has(self, name: str) -> bool:
        return self._stored(name) in self.file and (not self._framed(name) or mmproj.SECOND_FRAME in self.file)

    def _framed(self, name: str) -> bool:
        return name == mmproj.PATCH_WEIGHT and self.config.frames > 1

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        stored = self._stored(name)
        info = self.file.info(stored)
        if info.kind.name in PLAIN:
            shape = info.shape
            if self._framed(name):
                if self.file.info(mmproj.SECOND_FRAME)[:2] != info[:2]:
                    said = f"{mmproj.SECOND_FRAME} is not like {stored}"
                    raise self.file.error("checkpoint_mismatch", said)
                shape = (*shape[:2], self.config.frames, *shape[2:])
            return str(PLAIN[info.kind.name]).removeprefix("torch."), shape
        return assembly.PACKED if self.packed(name.removesuffix(WEIGHT)) else info.kind.name, info.shape

    def read(self, name: str) -> Tensor:
        values = self._decoded(self._stored(name))
        if self._framed(name):
            return torch.stack((values, self._decoded(mmproj.SECOND_FRAME)), 2)
        # A file stores the weight of Gemma's norm with the one that the family adds to it.
        return values - 1 if name == "mm_soft_emb_norm.weight" else values

    def _decoded(self, stored: str) -> Tensor:
        kind = self.file.info(stored).kind
        return ggml_blocks.decode(kind, self.file.read(stored), PLAIN.get(kind.name, torch.float32))

    def packed(self, module: str) -> bool:
        stored = self._stored(module + WEIGHT)
        return stored in self.file and self.file.info(stored).kind.name in GGML

    def linear(self, module: str) -> Linear:
        stored, scheme = self._stored(module + WEIGHT), self.scheme_of(module)
        assert scheme is not None, f"{module} is not quantized"
        shape = self.file.info(stored).shape
        return Linear(module, PackedTensor(scheme, (shape[0], shape[1]), {"blocks": self.file.read(stored)}))

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a linear; None where it is dense."""
        if not self.packed(module):
            return None
        kind = self.file.info(self._stored(module + WEIGHT)).kind
        return Scheme(GgmlBlocks(kind), layout="plain")


class StoredTower(NamedTuple):
    """The vision tower of a model: its configuration and its tensors."""

    config: VisionConfig
    files: VisionFiles | MmprojFiles
    where: Path

    def weights(self, dtype: str) -> TowerWeights:
        """Return what a plan needs of the weights. Tensors that the files lack count as stored in `dtype`. Raises
        CheckpointError as loading does."""
        at, found = assembly.prefixes(self.config, self.files), dict[tuple[str, str], str | Scheme]()
        for part, name, _ in tensors(self.config):
            stored = at[part] + name
            if self.files.has(stored):
                kind, _ = self.files.shape(stored)
                scheme = self.files.scheme_of(stored.removesuffix(WEIGHT)) if kind == assembly.PACKED else None
                found[part, name] = kind if scheme is None else scheme
        return TowerWeights(self.config, dtype, found)


def tower_at(path: Path, whole: bool = True) -> StoredTower | None:
    """Return the tower of a folder or a GGUF file, from headers alone; None for a model without. Without `whole`, GGUF
    files may end behind their headers. Raises ValueError as `vision_config`, and `mmproj.read` for a GGUF file."""
    if is_gguf(path):
        found = mmproj.read(path, whole)
        return None if found is None else StoredTower(found.config, MmprojFiles(found, whole), found.path)
    return tower_of_folder(Folder(path))


def tower_of_folder(folder: Folder) -> StoredTower | None:
    """Return the tower of an open folder; None for a model without. Raises ValueError as `vision_config`."""
    config = vision_config(folder)
    return None if config is None else StoredTower(config, VisionFiles(folder), folder.path)


def vision_config(folder: Folder) -> VisionConfig | None:
    """Return the tower that a folder's config describes; None for a model without. Raises ValueError as
    `read_vision`."""
    path = folder.path / PREPROCESSOR
    given = read_config(path) if path.exists() else None
    with naming(folder.path):
        return read_vision(folder.config, read_model(folder.config).hidden, given)


def image_settings(path: Path) -> ImageSettings:
    """Return how a model wants images. Raises UserError (`feature_unsupported`) for one that takes none."""
    settings = settings_of.read(path)
    if settings is None:
        beside = mmproj.path_of(path).name if is_gguf(path) else "a preprocessor_config.json"
        message = f"{path} takes no images: it has no vision tower with {beside}"
        raise UserError("feature_unsupported", message)
    return settings


def vision_of(path: Path, dtype: torch.dtype) -> VisionModel:
    """Load the tower and projector of a model that `image_settings` accepts, to compute in `dtype` by the reference.

    Raises ValueError as `load_vision`.
    """
    found = load_vision(path, dtype)
    assert found is not None, f"{path} has settings of images and no tower"
    return found


def load_vision(model: Path | Folder, dtype: torch.dtype, store: BackendWeights | None = None) -> VisionModel | None:
    """Load the tower and projector of a model, to compute in `dtype`; None for a model without.

    With a `store` the weights are laid out for its kernels, as they are stored, and quantized linears are multiplied by
    the kernels of decoders. A tower that is stored in bfloat16 is computed in bfloat16, as models are run, where the
    processor's tiles make that several times as fast. Raises ValueError where tensors are missing or of another shape
    than the config says, before any is read.
    """
    assert store is None or dtype == store.dtype, f"these kernels compute in {store.dtype}, not {dtype}"
    stored = tower_at(model) if isinstance(model, Path) else tower_of_folder(model)
    if stored is None:
        return None
    config, files, where = stored
    with naming(where):
        if store is not None and faster() and assembly.stored_dtypes(config, files) == {"bfloat16"}:
            return assembly.build(config, files, torch.bfloat16, rows_dtype=dtype)
        return assembly.build(config, files, dtype, store)
