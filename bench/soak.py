"""Load, held for as long as is asked: what a server must bear, in parts, each with its gates.

    python bench/soak.py [mixed] [disconnects] [overload] [queue] [slow] [idle] [signals] [timing]
                         [--seconds N] [--disconnects N] [--pairs N] [--json FILE]

* mixed: 64 clients of every kind for ten minutes, every answer checked (`soaks/mixed.py`).
* disconnects: 10,000 of them, at every phase of a request (`soaks/disconnects.py`).
* overload: ten times the clients that the server has room for (`soaks/overload.py`).
* queue: the same where the door has room for all, and the engine's queue has not.
* slow: readers of a kilobyte a second, and of nothing (`soaks/slow.py`).
* idle: connections over which nothing is asked, or a byte a second (`soaks/idle.py`).
* signals: the engine killed, and the server told to end, both under load (`soaks/signals.py`).
* timing: 2,000 pairs of requests that time what another key has asked for (`soaks/timing.py`).

Each part starts its own `attar serve` of the embedded model, on loopback, and ends it. The load generator shares the
machine with the server, as the gates have it; what it takes of a core is in the table. Exit status 1 where a gate does
not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soaks import disconnects, idle, mixed, overload, signals, slow, timing
from soaks.served import Gate, Served

FILES = 8192  # descriptors, of the load and of the server alike


@dataclass(frozen=True)
class Part:
    """One part: the server's options, seconds by default, and what runs."""

    options: tuple[str, ...]
    seconds: float
    run: Callable[[Served, float, Callable[[str], None]], list[Gate]]
    key: str | None = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", help="mixed, disconnects, overload, queue, slow, idle, signals, timing; default: all"
    )
    parser.add_argument("--seconds", type=float, help="of each part that takes as long as it is told")
    parser.add_argument("--disconnects", type=int, default=disconnects.COUNT)
    parser.add_argument("--pairs", type=int, default=timing.PAIRS)
    parser.add_argument("--json", type=Path, help="write the table here too")
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES if hard == resource.RLIM_INFINITY else min(FILES, hard), hard))
    keys = timing.key_file()
    parts = {
        "mixed": Part(mixed.OPTIONS, 600, lambda *given: asyncio.run(mixed.run(*given))),
        "disconnects": Part(
            disconnects.OPTIONS, 0, lambda served, _, tell: asyncio.run(disconnects.run(served, args.disconnects, tell))
        ),
        "overload": Part(overload.OPTIONS, 60, lambda *given: asyncio.run(overload.run(*given))),
        "queue": Part(
            overload.QUEUE_OPTIONS,
            60,
            lambda served, seconds, tell: asyncio.run(overload.run(served, seconds, tell, overload.QUEUE_SLOTS)),
        ),
        "slow": Part(slow.OPTIONS, 45, lambda *given: asyncio.run(slow.run(*given))),
        "idle": Part((), 30, lambda *given: asyncio.run(idle.run(*given))),
        "signals": Part((), 0, lambda served, _, tell: signals.run(served, tell)),
        "timing": Part(
            ("--api-key-file", keys.name),
            0,
            lambda served, _, tell: asyncio.run(timing.run(served, args.pairs, tell)),
            timing.FIRST,
        ),
    }
    if unknown := set(args.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    tables: dict[str, list[Gate]] = {}
    for name in args.parts or parts:
        part = parts[name]
        served = Served(*part.options, key=part.key)
        try:
            tables[name] = part.run(served, args.seconds or part.seconds, progress(name))
        except RuntimeError as error:
            tables[name] = [Gate("the part ran to its end", str(error), "yes", False)]
        finally:
            served.end()
        print(file=sys.stderr)
        show(name, tables[name])
    if args.json:
        about = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()}
        found = {name: [gate.as_dict() for gate in gates] for name, gates in tables.items()}
        args.json.write_text(json.dumps(about | {"parts": found}, indent=1) + "\n")
    return int(any(gate.held is False for gates in tables.values() for gate in gates))


def progress(name: str) -> Callable[[str], None]:
    """One line, rewritten where that can be seen; else a line now and then."""
    end = "\r" if sys.stderr.isatty() else "\n"
    return lambda text: print(f"{name}: {text}".ljust(150), end=end, file=sys.stderr, flush=True)


def show(name: str, gates: list[Gate]) -> None:
    wide = max(len(gate.name) for gate in gates)
    print(f"{name}")
    for gate in gates:
        verdict = {True: "held", False: "NOT HELD", None: ""}[gate.held]
        print(f"  {gate.name:<{wide}}  {gate.value}{'   bar: ' + gate.bar if gate.bar else ''}   {verdict}".rstrip())
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
