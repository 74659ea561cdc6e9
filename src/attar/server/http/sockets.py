"""Sockets of the server: where it listens, how many connections may be open, and which is closed beyond that.

An idle connection costs its client nothing, and this process one of the files that it may have open. When those are
used up no client gets in, not even a liveness check. So beyond a number, the connection that has waited longest for its
next request is closed, as it would be a little later anyhow: clients open another.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket

from attar.errors import UserError

FILES = 256  # descriptors of this process besides connections: half of all where few are allowed
BACKLOG = 512  # connections that wait to be accepted
MANY = 1 << 16  # connections, where the number of files is unlimited

logger = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Listen at an address. Raises OSError where it is not available."""
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


class Waiting:
    """Idle connections, longest idle first. At most `most` connections may be open in all."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._waiting: dict[asyncio.BaseTransport, None] = {}

    def add(self, connection: asyncio.BaseTransport, opened: int) -> None:
        """Add a connection that is idle from now on. `opened`: how many are open in all."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = None
        if opened > self.most:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.close()

    def remove(self, connection: asyncio.BaseTransport) -> None:
        """Remove a connection that has a request, or was closed."""
        self._waiting.pop(connection, None)


def allow(requests: int) -> None:
    """Raise the limit of open files for `requests` connections, and as many idle ones, as far as the user may."""
    needed = 2 * requests + FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < requests + FILES:
        logger.warning("this process may open %d files, too few for %d requests at a time", most, requests)


def allowed() -> int:
    """Return how many connections this process may have open, at least one. Logs where they are few."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MANY
    kept = min(FILES, soft // 2)
    most = min(MANY, max(1, soft - kept))
    if kept < FILES:
        logger.warning("this process may open %d files, which leaves %d connections at a time", soft, most)
    return most


def explained(error: OSError, host: str, port: int) -> Exception:
    """Add the address to an error about its availability; return other errors as they are."""
    if error.filename is not None:
        return error
    at = f"cannot listen at {host}, port {port}: {str(error.strerror).lower()}"
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return UserError("address_invalid", f"{at}; --port takes another, and 0 a free one")
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        message = f"{at}; --host is an address or a name of this machine, such as 127.0.0.1 or ::1"
        return UserError("address_invalid", message)
    return error
