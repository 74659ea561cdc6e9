"""A folder of private files: nobody else may enter it, and it belongs to one process at a time.

The folder is opened once, and files are reached through that descriptor. So nothing that replaces a part of its path
later is ever followed. Files are regular, of this user, and of mode 600; anything else is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from attar.errors import UserError

KEY = "key"  # name of the file with the folder's key
KEY_BYTES = 32
TEMPORARY = "writing-"  # names of files that are not whole begin so


class PrivateFolder:
    """The folder at `path`, made with mode 700 where there is none, and its key.

    Raises UserError where it is a link, is no folder, belongs to another user, or may be entered by others; OSError
    where it can be neither opened nor made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise UserError(
                    "file_unsafe", f"{path} is no folder, or a link to one: name the folder itself"
                ) from None
            raise
        status = os.fstat(self.descriptor)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            self.close()
            message = f"{path} must belong to this user alone: chmod 700 it, or name a folder that is not there yet"
            raise UserError("file_unsafe", message)
        try:
            self.key = self._read_key()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the folder, and give up its lock."""
        os.close(self.descriptor)

    def lock(self) -> None:
        """Make the folder this process's, until it is closed or the process ends. Raises UserError where it is
        another's."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"{self.path} is in use by another process: each server needs a folder of its own"
            raise UserError("output_locked", message) from None

    def secret(self, purpose: str) -> bytes:
        """Return 32 bytes that follow from the key, for one purpose."""
        return hashlib.blake2b(purpose.encode(), key=self.key, digest_size=32).digest()

    def open(self, name: str) -> int:
        """Open a file for reading. Raises UserError where it is not a regular file of this user alone, and OSError."""
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self.descriptor)
        status = os.fstat(file)
        regular = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
        if not regular or stat.S_IMODE(status.st_mode) & 0o077:
            os.close(file)
            raise UserError("file_unsafe", f"{name} of {self.path} is no file of this user alone")
        return file

    def write(self, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write a file whole: to a temporary one, which is flushed to the disk and renamed. Raises OSError, and then
        leaves nothing behind where that can be helped."""
        temporary = TEMPORARY + name
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        self.remove(temporary)
        file = os.open(temporary, flags | os.O_EXCL, 0o600, dir_fd=self.descriptor)
        try:
            try:
                for piece in pieces:
                    view = memoryview(piece)
                    while len(view):
                        view = view[os.write(file, view) :]
                os.fsync(file)
            finally:
                os.close(file)
            os.rename(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except BaseException:
            self.remove(temporary)
            raise

    def remove(self, name: str) -> None:
        """Remove a file; nothing is raised where that fails."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.descriptor)

    def touch(self, name: str, nanoseconds: int) -> None:
        """Set the date of a file's last use; nothing is raised where that fails."""
        with contextlib.suppress(OSError):
            os.utime(name, ns=(nanoseconds, nanoseconds), dir_fd=self.descriptor, follow_symlinks=False)

    def files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the name and status of each regular file."""
        with os.scandir(self.descriptor) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if entry.is_file(follow_symlinks=False):
                        yield entry.name, entry.stat(follow_symlinks=False)

    def _read_key(self) -> bytes:
        """Return the key; make one where there is none. Raises UserError for one of another length."""
        with contextlib.suppress(FileNotFoundError):
            file = self.open(KEY)
            try:
                key = os.read(file, KEY_BYTES + 1)
            finally:
                os.close(file)
            if len(key) != KEY_BYTES:
                message = f"{KEY} of {self.path} has not {KEY_BYTES} bytes: remove the folder, and with it the cache"
                raise UserError("key_invalid", message)
            return key
        key = os.urandom(KEY_BYTES)
        self.write(KEY, [key])
        return key
