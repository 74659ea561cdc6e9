"""The vision tower of a checkpoint folder, read beside its language model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from attar.checkpoints.folder import Folder, read_config
from attar.checkpoints.sources.hf import quantized_reader
from attar.checkpoints.strict_io import naming
from attar.checkpoints.vocabulary import is_gguf
from attar.errors import UserError
from attar.formats.scheme import Scheme
from attar.images.settings import ImageSettings, read_settings
from attar.kernels.dispatch import BackendWeights
from attar.kernels.operands import Linear
from attar.kernels.tiles import faster
from attar.model.families import read_config as read_model
from attar.model.vision import assembly
from attar.model.vision.config import VisionConfig, read_vision
from attar.model.vision.model import VisionModel

PREPROCESSOR = "preprocessor_config.json"
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


def vision_config(folder: Folder) -> VisionConfig | None:
    """Return the tower that a folder's config describes; None for a model without. Raises ValueError as
    `read_vision`."""
    path = folder.path / PREPROCESSOR
    given = read_config(path) if path.exists() else None
    with naming(folder.path):
        return read_vision(folder.config, read_model(folder.config).hidden, given)


def image_settings(path: Path) -> ImageSettings:
    """Return how a model wants images. Raises UserError (`feature_unsupported`) for one that takes none."""
    settings = None if is_gguf(path) else read_settings(path)
    if settings is None:
        message = f"{path} takes no images: it is no folder with a vision tower and a preprocessor_config.json"
        raise UserError("feature_unsupported", message)
    return settings


def vision_of(path: Path, dtype: torch.dtype) -> VisionModel:
    """Load the tower and projector of a model that `image_settings` accepts, to compute in `dtype` by the reference.

    Raises ValueError as `load_vision`.
    """
    found = load_vision(Folder(path), dtype)
    assert found is not None, f"{path} has settings of images and no tower"
    return found


def load_vision(folder: Folder, dtype: torch.dtype, store: BackendWeights | None = None) -> VisionModel | None:
    """Load the tower and projector of an open folder, to compute in `dtype`; None for a model without.

    With a `store` the weights are laid out for its kernels, as they are stored, and quantized linears are multiplied by
    the kernels of decoders. A tower that is stored in bfloat16 is
    computed in bfloat16, as models are run, where the processor's tiles make that several times as fast. Raises
    ValueError where tensors are missing or of another shape than the config says, before any is read.
    """
    assert store is None or dtype == store.dtype, f"these kernels compute in {store.dtype}, not {dtype}"
    config = vision_config(folder)
    if config is None:
        return None
    files = VisionFiles(folder)
    with naming(folder.path):
        if store is not None and faster() and assembly.stored_dtypes(config, files) == {"bfloat16"}:
            return assembly.build(config, files, torch.bfloat16, rows_dtype=dtype)
        return assembly.build(config, files, dtype, store)
