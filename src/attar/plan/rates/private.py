"""Files of the user's own cache folder: private, whole or absent, and bounded. Torch-free.

The folder belongs to the user alone (0700). Links are not followed, and a file of another user is an error.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from attar import machine
from attar.errors import UserError


def read(path: Path, most: int) -> bytes | None:
    """Return a file's bytes, None where there is none.

    Raises PermissionError for a folder or file that is not this user's alone, and UserError (`file_too_large`) for
    more than `most` bytes.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.parent.lstat()
        own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        if not own or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{path.parent} is not a folder of this user alone")
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(number, "rb") as file:
            status = os.fstat(number)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError(f"{path} is not a file of this user")
            text = file.read(most + 1)
        if len(text) > most:
            raise UserError("file_too_large", f"{path} has more than {most:,} bytes")
        return text
    return None


def write(path: Path, text: bytes) -> None:
    """Write a file, whole or not at all. Raises OSError where the folder is not this user's alone."""
    make_folder(path.parent)
    machine.write_whole(path, text, 0o600)


def make_folder(path: Path) -> None:
    """Make the folder, and those above it, unless it exists. Raises OSError where it is not this user's alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    machine.private_folder(path)
