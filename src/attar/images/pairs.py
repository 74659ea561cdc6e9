"""Folders of images with texts, laid out as imagefolder of Hugging Face's `datasets`, and the prompts that they make.

`metadata.jsonl` has a JSON object a line, with `file_name`, relative to the folder, and `text`; other keys are ignored.
Only files that it names are opened, so a folder may have any number of others. The folder is untrusted. A name that
leads out of it, a symbolic link, and what is no regular file are never read. Images are decoded by the limited process
of `decoding.py`. A pair that cannot be used is left out, and `PairPrompts.warnings` names it with the reason.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attar import strict_json
from attar.errors import Code, UserError
from attar.images.decoding import MAX_FILE, ImageSource, decode
from attar.images.placeholders import Placeholders
from attar.images.settings import ImageSettings
from attar.protocol.images import ImageInput
from attar.text.tokenizer import Tokenizer

METADATA = "metadata.jsonl"
MAX_METADATA = 256 << 20  # bytes
MAX_NAME = 4096  # bytes
LISTED = 5  # pairs left out that a warning names

_UNUSABLE: frozenset[Code] = frozenset({
    "image_invalid", "image_too_large", "file_not_found", "file_not_permitted", "file_unsafe", "file_wrong_kind",
    "context_exceeded", "text_empty", "template_failed",
})  # fmt: skip
"""Codes of errors that are of one pair."""


class Pair(NamedTuple):
    """An image's file, relative to the folder, and its text."""

    file_name: str
    text: str


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Token ids of an image and the text behind it. The token at `behind` is the first of the text."""

    name: str
    ids: tuple[int, ...]
    image: ImageInput
    behind: int


class PairPrompts:
    """Prompts of the pairs of `folder` for one model: BOS where the tokenizer adds one, the image's tokens, the text.

    Of more than `most` pairs, so many are taken, evenly spread. Prompts have at most `longest` tokens. Each iteration
    reads the files anew. Raises UserError for a folder without pairs.
    """

    def __init__(
        self, folder: Path, settings: ImageSettings, tokenizer: Tokenizer, longest: int, most: int | None = None
    ) -> None:
        self.folder, self._settings, self._tokenizer, self._longest = folder, settings, tokenizer, longest
        self._places = Placeholders(settings, tokenizer)
        self.pairs = spread(read_pairs(folder), most)
        self._skipped: list[str] = []

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def bos(self) -> int | None:
        """Return the token in front of every prompt."""
        return self._tokenizer.added_bos

    def __iter__(self) -> Iterator[ImagePrompt]:
        """Yield the prompts. Raises UserError where no pair can be used, and without Pillow."""
        self._skipped, made = [], 0
        with _opened(self.folder) as root:
            for pair in self.pairs:
                try:
                    prompt = self._prompt(root, pair)
                except UserError as error:
                    if error.code not in _UNUSABLE:
                        raise
                    self._skipped.append(f"{pair.file_name!r} ({error})")
                    continue
                made += 1
                yield prompt
        if not made:
            raise UserError("image_invalid", f"{self.folder}: no pair can be used: {self._named()}")

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about the pairs that the last iteration left out."""
        if not self._skipped:
            return ()
        count = len(self._skipped)
        return (f"images: {count} pair{'s' * (count > 1)} of {len(self)} left out: {self._named()}",)

    def _named(self) -> str:
        more = len(self._skipped) - LISTED
        return "; ".join(self._skipped[:LISTED]) + (f"; and {more} more" if more > 0 else "")

    def _prompt(self, root: int, pair: Pair) -> ImagePrompt:
        if not pair.text.strip():
            raise UserError("text_empty", "its text is empty")
        (image,) = decode(self._settings, [ImageSource.of_bytes(read_inside(root, pair.file_name, MAX_FILE))])
        ids = self._tokenizer.encode(self._places.of(image) + pair.text, add_special_tokens=False)
        ids = ids if self.bos is None else [self.bos, *ids]
        token = self._settings.image_token
        if ids.count(token) != image.rows:
            raise UserError("template_failed", f"its text spells the image token {self._places.image}")
        if len(ids) > self._longest:
            raise UserError("context_exceeded", f"it has {len(ids)} tokens, and at most {self._longest} fit")
        behind = len(ids) - ids[::-1].index(token)
        while behind < len(ids) and ids[behind] in self._tokenizer.special_ids:  # markers behind the image
            behind += 1
        if behind == len(ids):
            raise UserError("text_empty", "its text has special tokens alone")
        return ImagePrompt(pair.file_name, tuple(ids), image, behind)


def spread(pairs: Sequence[Pair], most: int | None) -> Sequence[Pair]:
    """Return at most `most` pairs, evenly spread."""
    if most is None or len(pairs) <= most:
        return pairs
    return [pairs[i * len(pairs) // most] for i in range(most)]


def read_pairs(folder: Path) -> list[Pair]:
    """Return the pairs that a folder's metadata names. Raises UserError where there are none, and for a line that is
    no such object."""
    try:
        with _opened(folder) as root:
            data = read_inside(root, METADATA, MAX_METADATA)
    except UserError as error:
        if error.code == "file_not_found" and folder.is_dir():
            layout = f'{METADATA}, with lines such as {{"file_name": "a.png", "text": "A cat."}}'
            raise UserError("file_not_found", f"{folder} has no {layout}") from None
        raise UserError(error.code, f"{folder}: {METADATA} {error}" if folder.is_dir() else str(error)) from None
    lines = enumerate(data.split(b"\n"), 1)
    pairs = [_pair(line, folder / METADATA, number) for number, line in lines if line.strip()]
    if not pairs:
        raise UserError("text_empty", f"{folder / METADATA} is empty")
    return pairs


def _pair(line: bytes, path: Path, number: int) -> Pair:
    try:
        value = strict_json.parse_as_python(line)
    except strict_json.JSONError:
        value = None
    name, text = (value.get("file_name"), value.get("text")) if isinstance(value, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str) or not _is_unicode(name + text):
        message = f"{path}, line {number}: expected a JSON object with strings under `file_name` and `text`"
        raise UserError("file_malformed", message)
    return Pair(name, text)


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield the descriptor of a folder."""
    try:
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError:
        raise UserError("file_wrong_kind", f"{folder} is a file: name a folder with {METADATA}") from None
    except FileNotFoundError:
        raise UserError("file_not_found", f"{folder}: no such folder") from None
    try:
        yield root
    finally:
        os.close(root)


def read_inside(root: int, name: str, most: int) -> bytes:
    """Return the content of a regular file within the folder of a descriptor, of at most `most` bytes.

    No symbolic link is followed, and nothing waits, as opening a pipe would. Raises UserError with a clause.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in name or len(name.encode()) > MAX_NAME:
        raise UserError("file_unsafe", "its name leads out of the folder, or is no name")
    at, opened = root, list[int]()
    try:
        for part in parts[:-1]:
            at = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            opened.append(at)
        last = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        opened.append(last)
        if not stat.S_ISREG(os.fstat(last).st_mode):
            raise UserError("file_wrong_kind", "is no regular file")
        with open(last, "rb", closefd=False) as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise UserError("file_not_found", "there is no such file") from None
    except PermissionError:
        raise UserError("file_not_permitted", "it may not be read") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UserError("file_unsafe", "a symbolic link, or a file in place of a folder, is not followed") from None
        raise UserError("file_wrong_kind", f"cannot be read: {os.strerror(error.errno or 0)}") from None
    finally:
        for each in reversed(opened):
            os.close(each)
    if len(data) > most:
        raise UserError("image_too_large", f"has more than {most >> 20} MiB")
    return data
