"""Where the receipt of an output lies. Torch-free: a download names the receipt of a file that it wants."""

from __future__ import annotations

from pathlib import Path

NAME = "receipt.json"


def receipt_path(output: Path) -> Path:
    """Return the path of an output's receipt: in a folder, or beside a file (a GGUF, or its first part)."""
    return output / NAME if output.is_dir() else of_file(output)


def of_file(file: Path) -> Path:
    """Return the path of the receipt of a file, whether the file is there or not."""
    return file.with_name(f"{file.name}.{NAME}")
