"""Network namespaces that stand for hosts: the rest of a machine is shared, but the network is not.

They are made by `ip`, which needs the rights of an administrator; where it is refused, a test skips with what it says.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TypeVar

import pytest

CLONE_NEWNET = 0x40000000
T = TypeVar("T")


def ip(*arguments: str) -> None:
    """Run `ip`."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def make(*arguments: str) -> None:
    """Make a namespace or a link; skip the test with what `ip` says where that is refused."""
    try:
        ip(*arguments)
    except OSError as error:
        pytest.skip(f"network namespaces are refused: {error}")


class Network:
    """A namespace in the middle, and one for each of two hosts. A link joins each host with the middle.

    At link k the middle has the address `inner(k)`, and its host `outer(k)`. Hosts that are `joined` reach each other
    through the middle.
    """

    def __init__(self, stack: ExitStack, joined: bool = False) -> None:
        if sys.platform != "linux":
            pytest.skip("network namespaces are Linux's")
        mark = f"attar{os.getpid()}"
        self.middle, self.hosts = f"{mark}m", [f"{mark}h{at}" for at in range(2)]
        for name in (self.middle, *self.hosts):
            make("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name])
            ip("-n", name, "link", "set", "lo", "up")
        for at, name in enumerate(self.hosts):
            make("-n", self.middle, "link", "add", f"to{at}", "type", "veth", "peer", "name", "out", "netns", name)
            for space, link, address in ((self.middle, f"to{at}", inner(at)), (name, "out", outer(at))):
                ip("-n", space, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", space, "link", "set", link, "up")
            if joined:
                ip("-n", name, "route", "add", "default", "via", inner(at))
        if joined:
            forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
            subprocess.run([*within(self.middle), "sh", "-c", forward], check=True)

    def link(self, at: int, state: str) -> None:
        """Set the link of a host up or down, at the end in the middle."""
        ip("-n", self.middle, "link", "set", f"to{at}", state)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the middle, in a thread that belongs to it from then on."""
        found = Future[T]()

        def run() -> None:
            try:
                with open(f"/run/netns/{self.middle}", "rb") as space:
                    if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "a thread cannot enter the namespace")
                found.set_result(function())
            except BaseException as error:
                found.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return found


def inner(link: int) -> str:
    """Return the address of a link's end in the middle."""
    return f"10.213.{link}.1"


def outer(link: int) -> str:
    """Return the address of a link's host."""
    return f"10.213.{link}.2"


def within(name: str) -> tuple[str, ...]:
    """Return the words before a command that runs in a namespace."""
    return "ip", "netns", "exec", name
