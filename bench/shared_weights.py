"""Memory of engines that are forked from one process, beside that of a single one: proportional set sizes.

    python bench/shared_weights.py MODEL [--engines 4] [--tokens 1024]

All engines have one thread and a small cache, and answer one request each. Counted are the engines and the process that
forked them; pages that several hold are divided among them, so the sum is what they take together. The cache's part is
that of one small request. `alone` is an engine that loaded the model itself. The bar for 4 is 1.3 times one. Seconds
are from the start of a process until its socket is there: of the first engine with the loading, of the next without.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from attar.checkpoints.sources import hub
from attar.protocol.messages import Event, Finished, Submit, encode
from attar.protocol.request import SamplingParams
from attar.protocol.settings import Settings
from attar.server.replicas.forked import ForkServerProcess

ALONE = (sys.executable, "-m", "attar.engine.main")
FORKS = (sys.executable, "-m", "attar.engine.fork_server")


MOST_SECONDS = 300.0


def pss(pid: int) -> int:
    """Bytes of a process, its part of shared pages alone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return int(next(line.split()[1] for line in lines if line.startswith("Pss:"))) << 10


def own_socket(folder: Path, name: str) -> str:
    """The path of a socket in a folder of its own, which its engine removes."""
    (folder / name).mkdir(mode=0o700)
    return str(folder / name / "socket")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def answer(path: Path) -> float:
    """Have one request answered by the engine at a socket; returns the seconds until the socket was there."""
    start = time.monotonic()
    while not path.exists():
        if time.monotonic() > start + MOST_SECONDS:
            raise SystemExit("the engine does not start: see above")
        time.sleep(0.005)
    waited = time.monotonic() - start
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(encode([Submit("a", tuple(range(5, 37)), SamplingParams(max_tokens=8, temperature=0))]))
        with client.makefile("rb") as stream:
            while head := stream.read(4):
                events = msgspec.msgpack.decode(stream.read(int.from_bytes(head, "little")), type=list[Event])
                if any(isinstance(event, Finished) for event in events):
                    return waited
    raise SystemExit("the engine went away")


def alone(settings: Settings) -> tuple[int, float]:
    """Bytes and seconds of an engine that loads the model itself."""
    with subprocess.Popen(ALONE, stdin=subprocess.PIPE) as engine:
        assert engine.stdin is not None
        engine.stdin.write(settings.line())
        engine.stdin.flush()
        seconds = answer(Path(settings.socket))
        return pss(engine.pid), seconds


def forked(settings: Settings, count: int) -> tuple[list[int], list[float]]:
    """Bytes of all processes with 1, 2, ... engines, and the seconds that each engine took."""
    cores = sorted(os.sched_getaffinity(0))
    server, engines = ForkServerProcess(FORKS, settings, cores), []
    sizes, seconds = list[int](), list[float]()
    for number in range(count):
        engine = server.start(cores)
        engines.append(engine)
        assert engine.stdin is not None
        placed = msgspec.structs.replace(settings, socket=own_socket(Path(settings.socket), f"engine{number}"))
        engine.stdin.write(placed.line())
        engine.stdin.flush()
        seconds.append(answer(Path(placed.socket)))
        (loader,) = (pid for pid in children(os.getpid()) if "fork_server" in Path(f"/proc/{pid}/cmdline").read_text())
        sizes.append(sum(map(pss, [loader, *children(loader)])))
    for engine in engines:
        engine.kill()
        engine.wait()
    server.end()
    return sizes, seconds


def main(given: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="that the cache of each holds")
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory(prefix="attar-") as folder:
        settings = Settings(
            str(hub.resolve(options.model)), folder, memory=64 << 30, sharers=options.engines, threads=1,
            max_cached_tokens=options.tokens, verify=False,
        )  # fmt: skip
        base, seconds = alone(msgspec.structs.replace(settings, sharers=1, socket=own_socket(Path(folder), "alone")))
        print(f"alone       {base / 1e6:8.0f} MB              {seconds:6.2f} s")
        sizes, started = forked(settings, options.engines)
        for number, (size, taken) in enumerate(zip(sizes, started, strict=True), 1):
            print(f"{number} forked    {size / 1e6:8.0f} MB  {size / base:5.2f} times  {taken:6.2f} s")


if __name__ == "__main__":
    main()
