"""`attar serve` as a child process, looked at from outside: its metrics, and what /proc knows of its two processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soaks.wire import Address, Connection, once, request

START_SECONDS = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Gate:
    """One figure. `bar`: what it has to be. `held`: None where it is only shown. `timed`: it depends on the machine."""

    name: str
    value: str
    bar: str = ""
    held: bool | None = None
    timed: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Process:
    """What /proc says of one."""

    anonymous: int  # bytes of memory of its own, swapped out or not
    descriptors: int
    threads: int
    cpu: float  # seconds

    @classmethod
    def look(cls, pid: int) -> Process:
        folder = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        memory = sum(int(status.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "VmSwap"))
        times = (folder / "stat").read_text().rpartition(")")[2].split()
        cpu = (int(times[11]) + int(times[12])) / TICKS
        return cls(memory, len(os.listdir(folder / "fd")), int(status["Threads"]), cpu)


@dataclass(frozen=True)
class State:
    """What /metrics says; the engine's part is zero while there is none."""

    open: int  # HTTP requests, this look among them
    running: int
    waiting: int
    free: int
    active: int
    cached: int
    steps: int
    step_seconds: float
    asked: int  # tokens of prompts that the prefix cache was asked for
    reused: int
    lag: float  # the worst of the event loop, ever

    @classmethod
    async def look(cls, connection: Connection) -> State:
        text = (await connection.ask(request("GET", "/metrics"))).body.decode()
        lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith("attar_"))
        found = {name.removeprefix("attar_"): float(value) for name, _, value in lines}
        free, active, cached = (
            int(found.get(f'kv_blocks{{state="{state}"}}', 0)) for state in ("free", "active", "cached")
        )
        return cls(
            int(found["http_requests_open"]),
            int(found.get("requests_running", 0)),
            int(found.get("requests_waiting", 0)),
            free,
            active,
            cached,
            int(found.get("steps_total", 0)),
            found.get("step_seconds_total", 0.0),
            int(found.get("prefix_tokens_asked_total", 0)),
            int(found.get("prefix_tokens_hit_total", 0)),
            found["event_loop_lag_max_seconds"],
        )

    @property
    def idle(self) -> bool:
        return self.open == 1 and not (self.running or self.waiting or self.active)

    @property
    def blocks(self) -> int:
        return self.free + self.active + self.cached


class Served:
    """A server of the embedded model with `options`. Raises RuntimeError where it does not come up. `key`: one that
    it knows, where `options` name a file of keys."""

    def __init__(self, *options: str, key: str | None = None) -> None:
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it is open as long as the server writes
        began = time.perf_counter()
        command = [sys.executable, "-m", "attar", "serve", "--port", "0", "--json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.end()
            raise RuntimeError(f"the server did not start: {self.said()}")
        self.address = Address("127.0.0.1", int(json.loads(line)["url"].rpartition(":")[2]))
        try:
            asyncio.run(self.ready())
        except BaseException:
            self.end()
            raise
        self.load_seconds = time.perf_counter() - began

    def engine(self) -> int:
        """The engine's process id."""
        found = children(self.process.pid)
        return next(pid for pid in found if b"engine.main" in Path(f"/proc/{pid}/cmdline").read_bytes())

    async def ready(self, status: int = 200, seconds: float = START_SECONDS) -> float:
        """Wait until /readyz gives `status`; returns the seconds that took. Raises RuntimeError."""
        began = time.perf_counter()
        while (await once(self.address, request("GET", "/readyz", **self.headers))).status != status:
            if time.perf_counter() - began > seconds:
                raise RuntimeError(f"/readyz was not {status} within {seconds:g} s: {self.said()}")
            await asyncio.sleep(0.005)
        return time.perf_counter() - began

    def look(self) -> tuple[Process, Process]:
        """The HTTP process, and the engine's."""
        return Process.look(self.process.pid), Process.look(self.engine())

    async def settled(self, before: tuple[Process, Process], seconds: float = 5.0) -> tuple[Process, Process]:
        """Its processes, once they have no more descriptors than before, or time is up."""
        end = time.perf_counter() + seconds
        while True:
            after = self.look()
            back = all(a.descriptors <= b.descriptors for a, b in zip(after, before, strict=True))
            if back or time.perf_counter() > end:
                return after
            await asyncio.sleep(0.05)

    def said(self) -> str:
        """The end of its log."""
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - 2000))
        return self.log.read()

    def end(self) -> None:
        """Kill it, if it runs."""
        self.process.kill()
        self.process.wait()


async def idle(connection: Connection, seconds: float = 30.0) -> tuple[float, State]:
    """Wait until nothing runs, waits or holds blocks; seconds that took, and the state. Raises RuntimeError."""
    began = time.perf_counter()
    while True:
        state = await State.look(connection)
        now = time.perf_counter() - began
        if state.idle:
            return now, state
        if now > seconds:
            raise RuntimeError(f"not idle within {seconds:g} s: {state}")
        await asyncio.sleep(0.005)


async def rest(address: Address) -> tuple[float, State]:
    """As `idle`, over a connection of its own: the server closes those that are not used."""
    connection = await Connection.open(address)
    try:
        return await idle(connection)
    finally:
        connection.transport.abort()


def children(pid: int) -> list[int]:
    """Process ids of a process's children."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


class Probe:
    """`probe.py`, running."""

    def __init__(self, address: Address) -> None:
        command = [sys.executable, str(Path(__file__).with_name("probe.py")), address.host, str(address.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def end(self) -> list[float]:
        """Seconds that each answer took."""
        out, _ = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError("the probe of /livez failed")
        return [float(each) for each in out.split()]
