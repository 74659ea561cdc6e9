"""What Ray's processes of this node listen to, and the refusal to run among ports that others may reach.

Ray pickles: whoever reaches its ports with its token runs code. By its own settings Ray listens on every address.
With `START_ENVIRONMENT` and loopback as the node's address it listens on loopback alone. One port remains, that of each
Serve replica, which `narrow_replica_port` binds to the node's address.

attar does not trust the settings. Each replica looks at the sockets of Ray's processes on its node when it starts and
at each health check. `SECURITY.md` lists the ports, and a test compares.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from attar.errors import UserError
from attar.server.http.security import is_loopback

TOKEN_BITS = 256
LOOPBACK_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
START_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # The name is that of the systems for which Ray made loopback clusters; 0 makes one on Linux too.
    LOOPBACK_CLUSTER: "0",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
}
"""Environment of a cluster that listens on loopback alone."""
LISTENS = "0A"  # a socket's state in /proc/net/tcp
_AGENTS = {"DashboardAgent": "dashboard agent", "RuntimeEnvAgent": "runtime environment agent"}


@dataclass(frozen=True, order=True, slots=True)
class Listener:
    """A listening socket of one of Ray's processes, which SECURITY.md calls `process`."""

    process: str
    address: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listeners(root: Path = Path("/proc")) -> list[Listener]:
    """Return the listening sockets of Ray's processes that belong to this user. Linux only."""
    sockets = dict(_listening(root))
    found = []
    for pid, name in _processes(root):
        for inode in _inodes(root / pid / "fd"):
            if inode in sockets:
                found.append(Listener(name, *sockets[inode]))
    return sorted(found)


def require(insecure: bool, http: int = 0, root: Path = Path("/proc")) -> None:
    """Raise UserError where the cluster asks for no token, or a Ray process of this node listens beyond loopback and
    the start is not `insecure`. The port `http` is that of attar's HTTP server, which checks its own address."""
    if insecure:
        return
    if not token_required():
        message = "the Ray cluster asks for no token: start it with RAY_AUTH_MODE=token, or give --ray-insecure"
        raise UserError("ray_exposed", message)
    if sys.platform != "linux":
        return
    for each in listeners(root):
        if not each.loopback and each.port != http:
            message = f"Ray's {each.process} listens at {each.address} port {each.port}, beyond loopback: whoever "
            message += "reaches it with the cluster's token runs code; start Ray on loopback, or give --ray-insecure"
            raise UserError("ray_exposed", message)


def environment(address: str) -> dict[str, str]:
    """Return the environment of a cluster whose node has this address; beyond loopback, Ray listens on every one."""
    names = dict(START_ENVIRONMENT)
    if not is_loopback(address):
        del names[LOOPBACK_CLUSTER]
    return names


def token_required() -> bool:
    """Return whether Ray asks for a token in this process."""
    from ray._raylet import AuthenticationMode, get_authentication_mode

    return bool(get_authentication_mode() == AuthenticationMode.TOKEN)


def narrow_replica_port() -> None:
    """Let this replica's port for other deployments listen at the node's address alone; Serve has no setting for it.
    Where a release of Ray does it otherwise, nothing changes here, and `require` refuses."""
    import ray
    from ray.serve._private import replica

    add = getattr(replica, "add_port_to_grpc_server", None)
    if add is None or getattr(add, "narrowed", False):
        return
    address = ray.util.get_node_ip_address()
    host = f"[{address}]" if ":" in address else address

    def narrowed(server: object, at: str) -> object:
        return add(server, at.replace("[::]", host, 1))

    narrowed.narrowed = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = narrowed


def _listening(root: Path) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the inodes of listening TCP sockets of this network namespace, with their addresses."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "self" / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENS:
                host, _, port = fields[1].partition(":")
                yield fields[9], (_address(host), int(port, 16))


def _address(digits: str) -> str:
    """Return an address of /proc/net/tcp, whose words of 32 bits have the machine's order of bytes."""
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def _processes(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the ids of Ray's processes of this user, with their names in SECURITY.md."""
    for folder in root.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            mine = folder.stat().st_uid == os.geteuid()
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        name = _name([word.decode(errors="replace") for word in words])
        if mine and name:
            yield folder.name, name


def _name(words: list[str]) -> str:
    """Return the name of one of Ray's processes by its command line; empty for others."""
    first = words[0]
    if first.startswith("ray::"):
        title = first[5:].split(".")[0].split(":")[0].split("(")[0]
        return _AGENTS.get(title, "worker")
    for word in words[:6]:
        for part, name in (
            ("/gcs/gcs_server", "gcs_server"), ("/raylet/raylet", "raylet"), ("/monitor.py", "monitor"),
            ("/dashboard/dashboard.py", "dashboard"), ("ray.util.client.server", "client server"),
            ("/dashboard/agent.py", "dashboard agent"), ("/runtime_env/agent/main.py", "runtime environment agent"),
            ("/workers/default_worker.py", "worker"),
        ):  # fmt: skip
            if part in word and ("/ray/" in word or part == word):
                return name
    return ""


def _inodes(folder: Path) -> Iterator[str]:
    try:
        for each in folder.iterdir():
            link = os.readlink(each)
            if link.startswith("socket:["):
                yield link[8:-1]
    except OSError:  # the process, or one of its files, is gone
        return
