"""How a model wants images, from its folder or the mmproj file of its GGUF file. Torch-free: the server's process needs
it, and no weights."""

from __future__ import annotations

from pathlib import Path

from attar.checkpoints.gguf import mmproj
from attar.checkpoints.vocabulary import is_gguf
from attar.images.settings import ImageSettings, read_settings


def read(path: Path, whole: bool = True) -> ImageSettings | None:
    """Return the settings of a model's images; None for one that takes none. Without `whole`, the headers of GGUF files
    are enough. Raises UserError as `images.settings.read_settings` does of a folder, and `mmproj.read` of a GGUF
    file."""
    if not is_gguf(path):
        return read_settings(path)
    found = mmproj.read(path, whole)
    return None if found is None else found.images
