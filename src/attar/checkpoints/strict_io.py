"""Shared parts of the readers of untrusted files: their error, strict JSON, and names that are safe to show and write.

Everything in a checkpoint's file is checked before use, and an error names the file. This module holds what does not
depend on the file's format.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import reprlib
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

from attar import strict_json
from attar.errors import Code, UserError, code_of

logger = logging.getLogger(__name__)

MAX_WIDE = 8_000_000  # bytes of JSON that is not plain ASCII: each may take eight in memory
MAX_NAME = 1024  # bytes of a tensor's name
NEAR = 300  # names searched for near misses: difflib takes up to a millisecond for each
WORD = 96  # characters of such a name, more than models use: the time grows at least with their square
_CHUNK = 1 << 22
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

CONVERT = (
    "attar never opens pickles, because opening one can run code that it carries. If you trust the source, convert it: "
    "python -c \"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; s, d = 'SOURCE', 'CONVERTED'; "
    'M.from_pretrained(s).save_pretrained(d); T.from_pretrained(s).save_pretrained(d)"'
)

_KINDS: tuple[tuple[bytes, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; fetch it with: git lfs pull"),
    (b"PK\x03\x04", f"a zip archive, as torch.save writes. {CONVERT}"),
    *((bytes((0x80, protocol)), f"a Python pickle. {CONVERT}") for protocol in (2, 3, 4, 5)),
    (b"\x7fELF", "an ELF program; get the file from its source again"),
    (b"GGUF", "a GGUF file; give the folder with the safetensors files of the model"),
    (b"GGML", "in a format of 2023 that GGUF has replaced; convert the model again"),
    (b"ggjt", "in a format of 2023 that GGUF has replaced; convert the model again"),
    (b"FUGG", "a GGUF file with its bytes in reverse order; convert it with gguf-convert-endian, of the gguf package"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"{", "JSON text (an index, or a server's error message saved as a file?)"),
)


class CheckpointError(UserError):
    """An error for a checkpoint that cannot be used as it is; the message names the file and the remedy."""


def invalid(message: str) -> CheckpointError:
    """Return an error for compressed weights, or a config of them, that contradict themselves."""
    return CheckpointError("quantization_invalid", message)


def unsupported(message: str) -> CheckpointError:
    """Return an error for compressed weights of a kind that attar does not read."""
    return CheckpointError("quantization_unsupported", message)


class VerificationError(CheckpointError):
    """An error for a readable checkpoint that does not compute what its receipt says."""


class OnDisk:
    """A file or folder at `path`, which its errors name."""

    path: Path

    def error(self, code: Code, text: str) -> CheckpointError:
        return CheckpointError(code, f"{self.path}: {text}")


class OpenFile(OnDisk):
    """A file of `size` bytes, open for reading at any place, by several threads at a time. `close` may be called early.

    Raises CheckpointError where it is missing, or no regular file (links are followed: the Hub's cache is made of
    them).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            # O_NONBLOCK: opening a pipe must not wait for its writer.
            self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise self.error(code_of(error), f"cannot be opened: {getattr(error, 'strerror', error)}") from error
        self.close = weakref.finalize(self, os.close, self.fd)
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise self.error("file_wrong_kind", "not a regular file")
        self.size = status.st_size
        self._sha256: str | None = None

    def fill(self, view: memoryview, offset: int) -> None:
        """Read exactly len(view) bytes from `offset`. One call moves 2 GiB at most, hence the loop."""
        while len(view):
            try:
                count = os.preadv(self.fd, [view], offset)
            except OSError as error:
                raise self.error(code_of(error), f"reading failed at byte {offset}: {error.strerror}") from error
            if count == 0:
                raise self.error("checkpoint_changed", "the file shrank while it was read; copy it again")
            view, offset = view[count:], offset + count

    def sha256(self, progress: Callable[[int], None] | None = None) -> str:
        """Return the whole file's SHA-256 in hex, computed once. `progress` is called with the size of each hashed
        chunk, or at once with the file's size."""
        if self._sha256 is not None:
            if progress is not None:
                progress(self.size)
            return self._sha256
        digest, at = hashlib.sha256(), 0
        buffer = memoryview(bytearray(min(_CHUNK, self.size)))
        while at < self.size:
            chunk = buffer[: self.size - at]
            self.fill(chunk, at)
            digest.update(chunk)
            at += len(chunk)
            if progress is not None:
                progress(len(chunk))
        self._sha256 = digest.hexdigest()
        return self._sha256


@contextmanager
def naming(where: object, code: Code | None = None) -> Iterator[None]:
    """Raise a ValueError of the body as a CheckpointError that begins with `where`, of its own code unless one is
    given. A CheckpointError passes: it names its file."""
    try:
        yield
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(code or code_of(error), f"{where}: {error}") from None


def parse_json(text: bytes | bytearray, where: str | Path, lenient: bool = False) -> Any:
    """Decode JSON strictly (`strict_json.parse`), and of more than `MAX_WIDE` bytes plain ASCII alone. `lenient` reads
    what only Python takes for JSON as Python does, with a warning.

    Raises CheckpointError beginning with `where`.
    """
    if len(text) > MAX_WIDE and not (text.isascii() and b"\\u" not in text):
        raise CheckpointError(
            "file_malformed", f"{where}: of more than {MAX_WIDE} bytes attar reads plain ASCII alone, without \\u"
        )
    try:
        return strict_json.parse(text)
    except strict_json.JSONError as error:
        if lenient:
            with suppress(strict_json.JSONError):
                value = strict_json.parse_as_python(text)
                logger.warning("%s: not strict JSON, read as Python reads it: %s", where, error)
                return value
        raise CheckpointError("file_malformed", f"{where}: not valid JSON: {error}") from None


def check_name(name: str) -> str | None:
    """Return the fault of a tensor's name, or None. Names end up in messages, receipts and file names of other
    tools."""
    if not name:
        return "an empty name"
    if not name.isprintable():  # controls, bidirectional marks, lone surrogates
        return f"a name with characters that do not print: {reprlib.repr(name)}"
    if len(name) > MAX_NAME // 4 and len(name.encode()) > MAX_NAME:
        return f"a name longer than {MAX_NAME} bytes: {reprlib.repr(name)}"
    if name[0] == "/" or (".." in name and ".." in name.split("/")):
        return f"a name that looks like a path out of the folder: {reprlib.repr(name)}"
    return None


def kind_of(start: bytes) -> str | None:
    """Say what a file is that begins so, where that is known, and what to do instead."""
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html", b"<?xml"):
        return "a web page (a login or error page saved as a file?); download it again"
    if start[8:9] == b"{":
        return "a safetensors file; give the folder that holds it"
    return next((what for begin, what in _KINDS if start.startswith(begin)), None)


def near(name: str, known: Iterable[str]) -> str:
    """Return '; did you mean ...?' with the known names most like `name`, or the empty string.

    Names may be untrusted: only the first `NEAR` are compared, and none that is longer than `WORD`.
    """
    if len(name) > WORD:
        return ""
    short = [each for each in islice(known, NEAR) if len(each) <= WORD]
    close = difflib.get_close_matches(name, short, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
