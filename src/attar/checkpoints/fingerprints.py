"""Fingerprints of a model's files, by which a process that is started again sees that they are others by now."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from attar.checkpoints.gguf import mmproj
from attar.checkpoints.gguf.parts import part_paths
from attar.errors import UserError

READ = (
    "*.safetensors", "*.safetensors.index.json", "*config.json", "tokenizer.*", "special_tokens_map.json", "vocab.json",
    "merges.txt",
)  # fmt: skip
"""Files of a model's or an adapter's folder that an engine reads. Chat templates, which only the server reads, and
reports or other files beside a model are not among them."""
PIECES, PIECE = 4, 64 << 10  # of a file, and bytes of each, that tell files of equal size and date apart


class ChangedError(UserError):
    """An error for a model's files that differ from those a server was started with."""

    def __init__(self, message: str) -> None:
        super().__init__("checkpoint_changed", message)


def fingerprints(folders: Iterable[str]) -> dict[str, str]:
    """Return a fingerprint (size, date, hash of samples) of each file of models and adapters that an engine reads, by
    path.

    Inode numbers are left out: on some file systems they change by themselves. Raises OSError for a file that cannot be
    read.
    """
    paths = (path for each in folders for path in _read_from(Path(each)))
    return {str(path): _fingerprint(path) for path in paths}


def content_hashes(folders: Iterable[str]) -> tuple[str, ...]:
    """Return the SHA-256 of each model and adapter, over names and contents of the files that an engine reads.

    Paths, dates and the name of a GGUF file do not count, so a copy in another folder has the same hash. Each file is
    read whole. Raises OSError for a file that cannot be read.
    """
    return tuple(_content(Path(each)) for each in folders)


def _content(path: Path) -> str:
    digest = hashlib.sha256()
    for each in _read_from(path):
        with each.open("rb") as file:
            own = hashlib.file_digest(file, "sha256").hexdigest()
        name = each.name if path.is_dir() else ""
        digest.update(f"{own}  {name}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _read_from(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield from part_paths(path)
        if (tower := mmproj.path_of(path)).is_file():
            yield tower
        return
    yield from sorted({found for pattern in READ for found in path.glob(pattern) if found.is_file()})


def _fingerprint(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        for start in range(0, status.st_size, max(PIECE, -(-status.st_size // PIECES))):
            file.seek(start)
            digest.update(file.read(PIECE))
    return f"{status.st_size} {status.st_mtime_ns} {digest.hexdigest()}"


def require_unchanged(before: Mapping[str, str], folders: Iterable[str]) -> None:
    """Raise ChangedError, naming files, where the fingerprints of `folders` are not those of `before`. An empty
    `before` asks for nothing."""
    if not before or (now := fingerprints(folders)) == before:
        return
    changed = sorted(path for path in {*now, *before} if now.get(path) != before.get(path))
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    raise ChangedError(
        f"{changed[0]}{more} changed on disk since the server was started, which still has the tokenizer of then: "
        "start the server again to serve what is there now"
    )
