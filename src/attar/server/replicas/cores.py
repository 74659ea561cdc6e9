"""The processor's cores for each replica: equal shares, or lists that the user gives.

A core is a physical one with all of its hyper-threads. Cores of one memory node stand together, so that a share is one
node's where the numbers allow it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path

from attar import machine
from attar.errors import UserError

MOST = 64  # replicas
_RANGE = re.compile(r"\d{1,4}(-\d{1,4})?")


def shares(count: int, given: Sequence[str] = (), root: Path = Path("/")) -> list[tuple[int, ...]]:
    """Return the logical processors of each of `count` replicas, from lists such as 0-3,8 that are `given`, or in equal
    shares. Raises UserError for more replicas than cores, for lists of another number or form, and for processors that
    are listed twice or not allowed."""
    if not hasattr(os, "sched_getaffinity"):
        raise UserError("feature_unsupported", "--replicas needs Linux, where a process can be kept to its cores")
    allowed = sorted(os.sched_getaffinity(0))
    if given:
        return _listed(count, given, allowed)
    cores = physical(allowed, root)
    most = min(len(cores), machine.cores(root), MOST)
    if count > most:
        message = f"--replicas {count}: there are {most} cores, and each replica needs one"
        raise UserError("option_out_of_range", message)
    bounds = [at * len(cores) // count for at in range(count + 1)]
    return [tuple(sorted(cpu for core in cores[low:high] for cpu in core)) for low, high in itertools.pairwise(bounds)]


def physical(allowed: Sequence[int], root: Path = Path("/")) -> list[tuple[int, ...]]:
    """Return the allowed logical processors of each physical core, those of one memory node together."""
    cores: dict[str, list[int]] = {}
    for cpu in allowed:
        try:
            siblings = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, []).append(cpu)
    return sorted(map(tuple, cores.values()), key=lambda core: (node(core[0], root), core))


def node(cpu: int, root: Path = Path("/")) -> int:
    """Return the number of a processor's memory node; 0 where it is not told."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}"
    found = [int(each.name[4:]) for each in folder.glob("node[0-9]*") if each.name[4:].isdecimal()]
    return min(found, default=0)


def threads(share: Sequence[int], count: int, root: Path = Path("/")) -> int:
    """Return the threads of one of `count` replicas: its physical cores, and its part of the processor time that a
    control group allows."""
    return max(1, min(len(physical(share, root)), machine.cores(root) // count))


def _listed(count: int, given: Sequence[str], allowed: Sequence[int]) -> list[tuple[int, ...]]:
    if len(given) != count:
        raise UserError(
            "option_conflict", f"--replica-cores: {len(given)} lists for {count} replicas; give one for each"
        )
    found = list[tuple[int, ...]]()
    for text in given:
        parts = text.split(",")
        if not all(map(_RANGE.fullmatch, parts)):
            raise UserError("option_malformed", f"--replica-cores {text[:80]!r}: write processors like 0-3,8")
        found.append(tuple(sorted({cpu for part in parts for cpu in _range(part)})))
        if not found[-1]:
            raise UserError("option_out_of_range", f"--replica-cores {text[:80]!r}: a range ends before it begins")
    listed = [cpu for share in found for cpu in share]
    if missing := sorted(set(listed) - set(allowed)):
        raise UserError("option_out_of_range", f"--replica-cores: this process may not use processor {missing[0]}")
    if len(listed) > len(set(listed)):
        twice = next(cpu for cpu in listed if listed.count(cpu) > 1)
        raise UserError("option_conflict", f"--replica-cores: processor {twice} is listed for two replicas")
    return found


def _range(part: str) -> range:
    low, _, high = part.partition("-")
    return range(int(low), int(high or low) + 1)
