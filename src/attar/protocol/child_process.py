"""Shared code of the limited child processes (`text/limited_child.py`): answers, and limits of the operating system.

Only the standard library and the framing are imported, for these processes have little more.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Mapping

from attar.protocol.framing import frame

NO_FILES: Mapping[int, int] = {resource.RLIMIT_NOFILE: 3, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
"""No further files or sockets, nothing written to a file, no core dump."""


def send(body: bytes) -> None:
    """Write one answer."""
    sys.stdout.buffer.write(frame(body))
    sys.stdout.buffer.flush()


def limit(limits: Mapping[int, int]) -> None:
    """Set limits by `resource`'s numbers, soft and hard."""
    for what, most in limits.items():
        resource.setrlimit(what, (most, most))


def memory_with(extra: int) -> dict[int, int]:
    """Return the limit of address space at `extra` bytes above what this process has; none on macOS, which does not
    enforce it."""
    if sys.platform != "linux":
        return {}
    with open("/proc/self/statm") as statm:
        return {resource.RLIMIT_AS: int(statm.read().split()[0]) * resource.getpagesize() + extra}


def allow_more_cpu(seconds: int) -> None:
    """Give the next request `seconds` of processor time, and up to one more, as the limit counts whole seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(usage.ru_utime + usage.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
