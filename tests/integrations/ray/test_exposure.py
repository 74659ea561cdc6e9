"""What listens on a node, by a /proc of files."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from attar.integrations.ray import exposure
from attar.integrations.ray.exposure import Listener
from tests.errors import user_error

ROOT = Path(__file__).resolve().parents[3]
HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
SITE = "/x/site-packages/ray"

pytestmark = pytest.mark.skipif(sys.byteorder != "little", reason="the files are those of a little-endian machine")


def process(root: Path, pid: int, command: str, *sockets: int) -> None:
    folder = root / str(pid) / "fd"
    folder.mkdir(parents=True)
    (root / str(pid) / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
    for at, inode in enumerate(sockets):
        os.symlink(f"socket:[{inode}]", folder / str(at))


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    net = tmp_path / "self" / "net"
    net.mkdir(parents=True)
    row = "   0: {} 00000000:0000 {} 00000000:00000000 00:00000000 00000000     0        0 {} 1\n"
    (net / "tcp").write_text(
        HEAD + row.format("0100007F:1F40", "0A", 1) + row.format("00000000:0050", "0A", 2)
        + row.format("0100007F:0051", "01", 3)
    )  # fmt: skip
    (net / "tcp6").write_text(
        HEAD + row.format("0000000000000000FFFF00000100007F:18EB", "0A", 4)
        + row.format("00000000000000000000000000000000:18EC", "0A", 5)
    )  # fmt: skip
    process(tmp_path, 10, "ray::ServeReplica:attar:Http", 1)
    process(tmp_path, 11, "/usr/sbin/nginx", 2)
    process(tmp_path, 12, f"{SITE}/core/src/ray/gcs/gcs_server --log_dir=x", 3, 4)
    process(tmp_path, 13, f"{SITE}/core/src/ray/raylet/raylet", 5)
    return tmp_path


def test_listeners_are_those_of_ray(proc: Path) -> None:
    assert exposure.listeners(proc) == [
        Listener("gcs_server", "::ffff:7f00:1", 0x18EB), Listener("raylet", "::", 0x18EC),
        Listener("worker", "127.0.0.1", 0x1F40),
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="it looks on Linux only")
def test_a_listener_beyond_loopback_is_refused(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "token_required", lambda: True)
    with user_error("ray_exposed"):
        exposure.require(False, root=proc)
    exposure.require(True, root=proc)
    exposure.require(False, http=0x18EC, root=proc)


def test_a_cluster_without_a_token_is_refused(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "token_required", lambda: False)
    with user_error("ray_exposed"):
        exposure.require(False, http=0x18EC, root=proc)


@pytest.mark.parametrize("address, loopback", [
    ("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::", False),
    ("0.0.0.0", False), ("::ffff:10.0.0.1", False), ("192.168.1.2", False),
])  # fmt: skip
def test_loopback(address: str, loopback: bool) -> None:
    assert Listener("worker", address, 1).loopback is loopback


def test_every_process_that_is_known_stands_in_security_md() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    table = text[text.index("## Ray") : text.index("## Running it")]
    listed = set(re.findall(r"^\| `([^`]+)` \|", table, re.M))
    commands = [
        f"{SITE}/core/src/ray/gcs/gcs_server", f"{SITE}/core/src/ray/raylet/raylet",
        f"python -u {SITE}/autoscaler/_private/monitor.py", f"python {SITE}/dashboard/dashboard.py",
        "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::IDLE", "ray::ServeReplica:attar:Engine",
        "python -m ray.util.client.server",
    ]  # fmt: skip
    assert {exposure._name(each.split(" ")) for each in commands} == listed
    assert exposure._name(["python", "/home/ray/monitor.py"]) in ("", "monitor")
    assert exposure._name(["/usr/bin/vim"]) == ""


def test_only_an_address_beyond_loopback_widens_what_ray_listens_to() -> None:
    assert exposure.environment("127.0.0.1") == exposure.START_ENVIRONMENT
    wide = exposure.environment("10.0.0.7")
    assert exposure.START_ENVIRONMENT.items() - wide.items() == {(exposure.LOOPBACK_CLUSTER, "0")}
