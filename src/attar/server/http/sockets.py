"""Sockets of the server: where it listens, how many connections it may have open, and which goes where there are more.

A connection over which nothing is asked costs its client nothing, and here one of the files that a process may open.
When those are gone nobody else gets in, not even who asks whether the server is alive. So beyond a number the one that
has waited longest for its next request is closed, as it would be a little later anyhow: clients open another.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
from typing import Protocol

FILES = 256  # descriptors of this process besides connections: half of all that there are, where those are few
BACKLOG = 512  # connections that wait to be accepted
MANY = 1 << 16  # connections, where a user may open any number of files

logger = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address. Raises OSError when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off for sockets that say they are TCP; with 0, "the default", answers wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class Closable(Protocol):
    """A connection."""

    def hang_up(self) -> None:
        """Close it."""


class Waiting:
    """The connections over which nothing is asked at the moment, longest first. At most `most` may be open in all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: dict[Closable, None] = {}

    def add(self, connection: Closable, opened: int) -> None:
        """It waits from now on. `opened`: how many there are in all."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None
        if opened > self.most:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.hang_up()

    def remove(self, connection: Closable) -> None:
        """Something is asked over it, or it has been closed."""
        self._waiting.pop(connection, None)


def allow(requests: int) -> None:
    """See that this process may have so many open, and as many that wait, as far as its user allows."""
    needed = 2 * requests + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < requests + FILES:
        logger.warning("this process may open %d files, too few for %d requests at a time", most, requests)


def allowed() -> int:
    """Connections that this process may have open: one at least. Says so where they are few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MANY
    kept = min(FILES, soft // 2)
    most = min(MANY, max(1, soft - kept))
    if kept < FILES:
        logger.warning("this process may open %d files, which leaves %d connections at a time", soft, most)
    return most


def explained(error: OSError, host: str, port: int) -> Exception:
    """Name the address in an error that says it cannot be had; return others as they are."""
    if error.filename is not None:
        return error
    at = f"cannot listen at {host}, port {port}: {str(error.strerror).lower()}"
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return ValueError(f"{at}; --port takes another, and 0 a free one")
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return ValueError(f"{at}; --host is an address or a name of this machine, such as 127.0.0.1 or ::1")
    return error
