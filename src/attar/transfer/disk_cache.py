"""A cache of finished blocks in a folder: a file for each block, at most so many bytes of them together.

A file is a magic number, the header's length, the header, the block's bytes, and HMAC-SHA-256 of all that precedes it,
keyed with the folder's key. Its name has three parts: the API key's salt as a digest, the origin, and the block's name.
So what belongs to a removed key, or to another model, version or layout, is found and deleted by its name alone. A file
that does not hold what its name says is deleted too.

The index of files is in memory, in order of use; the dates of files keep that order for the next process. A block is
used when it is read or written, and so are all before it. So those at the end of a prompt are deleted first, and no
block stays whose predecessors are gone. Files are read and written by one thread, and another may ask the index.

A disk that fails keeps nothing from being served: reading what cannot be read is a miss, and writing pauses for a
while.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from attar.errors import UserError
from attar.protocol.framing import FrameTooLong
from attar.transfer.folder import TEMPORARY, PrivateFolder
from attar.transfer.header import MAX_HEADER, BlockHeader, BlockMismatch, Names, Origin

MAGIC = b"attar-kv"
MAC = 32  # bytes
PAUSE_SECONDS = 30.0  # without writing, after that has failed
FILE = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})-([0-9a-f]{64})")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Moved:
    """Counts of what was moved, since the start."""

    loaded_blocks: int = 0
    loaded_bytes: int = 0
    saved_blocks: int = 0
    saved_bytes: int = 0
    refused: int = 0  # blocks that were not what they had to be, and were deleted
    failed: int = 0  # reads and writes that failed
    dropped: int = 0  # files deleted to make room


class DiskCache:
    """Blocks of one origin in a folder that this process has locked, of at most `limit` bytes.

    `owners` are the salts of API keys that may have entries; those of others are deleted at once, as is all that has
    another origin. Raises UserError where not even one block fits.
    """

    def __init__(self, folder: PrivateFolder, origin: Origin, limit: int, owners: Collection[bytes]) -> None:
        least = origin.size + MAX_HEADER
        if limit < least:
            message = f"--cache-bytes {limit} holds no block of this model: a block has {origin.size} bytes"
            raise UserError("option_out_of_range", message)
        self.folder, self.origin, self.limit = folder, origin, limit
        self.names = Names(folder.secret("names"), origin)
        self.moved = Moved()
        self._mac_key = folder.secret("authentication of blocks")
        self._lock = threading.Lock()
        self._index: OrderedDict[bytes, tuple[str, int]] = OrderedDict()  # file and bytes by block, least used first
        self._bytes = 0
        self._paused = 0.0  # time until which nothing is written
        self._buffer = bytearray(MAX_HEADER + origin.size + len(MAGIC) + 4 + MAC)
        self._scan({self.names.salt(each).hex() for each in owners})

    @property
    def stored(self) -> tuple[int, int]:
        """Blocks in the cache, and bytes of their files."""
        with self._lock:
            return len(self._index), self._bytes

    @property
    def writable(self) -> bool:
        """Whether blocks are written now: no write has failed of late."""
        return time.monotonic() >= self._paused

    def holds(self, name: bytes) -> bool:
        """Return whether the cache has a block."""
        with self._lock:
            return name in self._index

    def reach(self, names: Sequence[bytes], first: int) -> int:
        """Return how many blocks `names[first:]` begins with that the cache has."""
        with self._lock:
            found = 0
            for name in names[first:]:
                if name not in self._index:
                    break
                found += 1
            self._use(names[: first + found])
            return found

    def missing(self, names: Sequence[bytes]) -> list[int]:
        """Return the indices of blocks that the cache lacks."""
        with self._lock:
            return [at for at, name in enumerate(names) if name not in self._index]

    def load(self, names: Sequence[bytes], at: int, salt: bytes, tokens: array[int]) -> memoryview | None:
        """Return the bytes of block `at` of a prompt, until the next call; None where they cannot be had, or are not
        what they have to be. `tokens` are the block's."""
        name = names[at]
        with self._lock:
            file = self._index.get(name, ("", 0))[0]
        if not file:
            return None
        try:
            found = self._read(file, names[at - 1] if at else b"", self.names.salt(salt), tokens)
        except (BlockMismatch, UserError) as error:
            logger.warning("a cached block is deleted: %s", error)
            self.moved.refused += 1
            self._delete(name)
            return None
        except OSError as error:
            self._failed("read", error)
            self._delete(name)
            return None
        self.folder.touch(file, time.time_ns() - at)
        self.moved.loaded_blocks += 1
        self.moved.loaded_bytes += len(found)
        return found

    def save(
        self, names: Sequence[bytes], at: int, owner: bytes, salt: bytes, tokens: array[int], data: bytearray
    ) -> bool:
        """Write block `at` of a prompt; return whether it was written. `owner` is the API key's salt, `tokens` are the
        block's."""
        if not self.writable or self.missing(names[: at + 1]) != [at]:
            return False  # it is there, or is of no use without those before it
        before = names[at - 1] if at else b""
        header = BlockHeader.of(self.origin, self.names.salt(salt), before, tokens)
        try:
            told = header.encode()
        except FrameTooLong:
            return False
        start = MAGIC + len(told).to_bytes(4, "little") + told
        mac = hmac.new(self._mac_key, start, "sha256")
        mac.update(data)
        size = len(start) + len(data) + MAC
        if not self._make_room(size, set(names[:at])):
            return False
        file = f"{self.names.salt(owner).hex()}-{self.origin.digest().hex()}-{names[at].hex()}"
        try:
            self.folder.write(file, (start, data, mac.digest()))
        except (OSError, UserError) as error:
            self._failed("written", error)
            self._paused = time.monotonic() + PAUSE_SECONDS
            return False
        self.folder.touch(file, time.time_ns() - at)
        with self._lock:
            self._index[names[at]] = file, size
            self._bytes += size
            self._use(names[: at + 1])
        self.moved.saved_blocks += 1
        self.moved.saved_bytes += size
        return True

    def close(self) -> None:
        """Close the folder, which another process may have from now on."""
        self.folder.close()

    def _read(self, file: str, before: bytes, salt: bytes, tokens: array[int]) -> memoryview:
        """Read a file whole, and check all of it; its size first."""
        descriptor = self.folder.open(file)
        try:
            size = os.fstat(descriptor).st_size
            head = len(MAGIC) + 4
            if not head + self.origin.size + MAC < size <= len(self._buffer):
                raise BlockMismatch("another size")
            view = memoryview(self._buffer)[:size]
            got = 0
            while got < size and (more := os.readv(descriptor, [view[got:]])):
                got += more
        finally:
            os.close(descriptor)
        length = int.from_bytes(view[len(MAGIC) : head], "little")
        if got != size or view[: len(MAGIC)] != MAGIC or head + length + self.origin.size + MAC != size:
            raise BlockMismatch("another size")
        if not hmac.compare_digest(hmac.digest(self._mac_key, view[:-MAC], "sha256"), view[-MAC:]):
            raise BlockMismatch("another MAC")
        BlockHeader.decode(view[head : head + length]).check(self.origin, salt, before, tokens)
        return view[head + length : -MAC]

    def _scan(self, owners: Collection[str]) -> None:
        """Read the names of all files, and delete what is of no use."""
        own, removed, found = self.origin.digest().hex(), 0, list[tuple[int, str, str, int]]()
        for file, status in self.folder.files():
            match = FILE.fullmatch(file)
            if file.startswith(TEMPORARY) or (match and (match[2] != own or match[1] not in owners)):
                self.folder.remove(file)
                removed += not file.startswith(TEMPORARY)
            elif match:
                found.append((status.st_mtime_ns, file, match[3], status.st_size))
        for _, file, name, size in sorted(found):
            self._index[bytes.fromhex(name)] = file, size
            self._bytes += size
        if removed:
            logger.info("%d cached blocks of other settings, or of keys that are gone, were deleted", removed)
        self._make_room(0)

    def _make_room(self, size: int, kept: Collection[bytes] = ()) -> bool:
        """Delete the least recently used files until `size` bytes more fit; return whether they do. None of `kept` is
        deleted."""
        files = list[str]()
        with self._lock:
            while self._index and self._bytes + size > self.limit and next(iter(self._index)) not in kept:
                _, (file, freed) = self._index.popitem(last=False)
                self._bytes -= freed
                files.append(file)
            fits = self._bytes + size <= self.limit
        for file in files:  # without the lock, for which the engine's thread waits between steps
            self.folder.remove(file)
        self.moved.dropped += len(files)
        return fits

    def _use(self, names: Sequence[bytes]) -> None:
        """Note the use of a prompt's blocks, of which the first is deleted last. The lock is held."""
        for name in reversed(names):
            if name in self._index:
                self._index.move_to_end(name)

    def _delete(self, name: bytes) -> None:
        with self._lock:
            file, size = self._index.pop(name, ("", 0))
            self._bytes -= size
        if file:
            self.folder.remove(file)

    def _failed(self, what: str, error: Exception) -> None:
        """Count a failure, and log it: a disk that fails keeps nothing from being served."""
        self.moved.failed += 1
        logger.warning("a cached block could not be %s: %s", what, getattr(error, "strerror", None) or error)
