"""Tokenizer of a model, from its folder or its GGUF file. Torch-free: the server's process needs it, and no weights."""

from __future__ import annotations

from pathlib import Path

from attar.checkpoints.folder import CONFIG, read_config, refuse_vila
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.strict_io import naming
from attar.text.gguf import tokenizer_from_gguf
from attar.text.tokenizer import Tokenizer

NO_TOKENIZER = (None, "no_vocab", "none")  # `tokenizer.ggml.model` of files without one


def is_gguf(path: Path) -> bool:
    """Return whether the model is a GGUF file. A folder of Hugging Face's may have the suffix too."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def tokenizer(path: Path) -> Tokenizer:
    """Return the model's tokenizer. Raises ValueError, naming the file, where it has none or a malformed one."""
    if not is_gguf(path):
        if not has_tokenizer(path) and (path / CONFIG).is_file():
            refuse_vila(path, read_config(path / CONFIG))  # whose tokenizer lies in one of its folders
        return Tokenizer.load(path)
    file = GgufFile(path)
    with naming(path):
        return tokenizer_from_gguf(file.metadata)


def has_tokenizer(path: Path) -> bool:
    """Return whether there is a tokenizer to load, malformed or not."""
    if is_gguf(path):
        return GgufFile(path).metadata.get("tokenizer.ggml.model") not in NO_TOKENIZER
    return any((path / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model"))
