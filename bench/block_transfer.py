"""Speed of blocks from a prefill engine to a decode engine, beside a raw socket in the same run.

Both sides are processes, as are those of the raw socket. Blocks have the shapes of a model's cache. They are sent from
one and received into another, and checked on both sides. Sockets are Unix sockets, or TLS on loopback, with the same
certificates and cipher for both. The last line is JSON, with the best of some runs.

    python bench/block_transfer.py --layers 30 --kv-heads 3 --head-dim 64 --blocks 64 [--kv int8] [--tls]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from attar.kv.block_bytes import BlockBytes
from attar.kv.pages import PagedKV
from attar.kv.schemes import scheme
from attar.transfer.credentials import Credentials, load
from attar.transfer.header import Origin
from attar.transfer.listener import LentBlocks, PrefillAsked, PrefillListener
from attar.transfer.puller import Puller
from attar.transfer.wire import Address, Prefill

BLOCK, RAW = 64, 4 << 20  # tokens of a block, and bytes of a message of the raw socket


class Sides:
    """The sockets of both sides: in a folder, or on two ports of loopback behind TLS, with keys in the folder."""

    def __init__(self, folder: Path, ports: tuple[int, int] | None) -> None:
        self._folder, self._ports = folder, ports
        self.credentials: Credentials | None = None
        if ports is not None:
            self.credentials = load([folder / "key"], folder / "ca.pem", folder / "peer.pem", "peer")
        self.blocks = Address(folder / "prefill") if ports is None else Address(None, "127.0.0.1", ports[0])

    def listen(self) -> socket.socket:
        """Listen for the raw connection."""
        if self._ports is not None:
            return socket.create_server(("127.0.0.1", self._ports[1]))
        made = socket.socket(socket.AF_UNIX)
        made.bind(str(self._folder / "raw"))
        made.listen()
        return made

    def accept(self, listener: socket.socket) -> socket.socket:
        """Accept a raw connection."""
        connected, _ = listener.accept()
        known = self.credentials
        return connected if known is None else known.answers.wrap_socket(connected, server_side=True)

    def connect(self) -> socket.socket:
        """Connect as the raw connection."""
        if self._ports is None or self.credentials is None:
            made = socket.socket(socket.AF_UNIX)
            made.connect(str(self._folder / "raw"))
            return made
        plain = socket.create_connection(("127.0.0.1", self._ports[1]))
        return self.credentials.asks.wrap_socket(plain, server_hostname=self.credentials.name)


def certify(folder: Path) -> None:
    """Put an authority, a certificate of the name `peer` and a key into a folder."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (folder / "names").write_text("subjectAltName=DNS:peer")
    openssl("req", *curve, "-keyout", "peer.key", "-out", "peer.csr", "-subj", "/CN=peer")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
    openssl("x509", "-req", "-in", "peer.csr", *signed, "-out", "peer.crt", "-days", "2")
    (folder / "peer.pem").write_bytes((folder / "peer.crt").read_bytes() + (folder / "peer.key").read_bytes())
    (folder / "key").write_bytes(os.urandom(32))
    for name in ("peer.pem", "key"):
        (folder / name).chmod(0o600)


def free_ports() -> tuple[int, int]:
    """Return two ports of loopback that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def serve(folder: Path, ports: tuple[int, int] | None, options: argparse.Namespace, ready: Any) -> None:
    """Send, as a process of its own: blocks of a cache at one socket, and plain bytes at another."""
    source, sides = cache(options), Sides(folder, ports)
    origin = Origin("", "", source.layout_id, BLOCK, source.nbytes)

    def tell(what: Any) -> None:
        if isinstance(what, PrefillAsked):
            what.reply.put(LentBlocks(list(range(options.blocks)), None))

    listener = PrefillListener(sides.blocks, origin, source.views, tell, sides.credentials)
    with sides.listen() as plain:
        ready.set()
        sent, count = bytearray(RAW), options.blocks * origin.size // RAW
        for _ in range(options.runs):
            with sides.accept(plain) as connected:
                for _ in range(count):
                    connected.sendall(sent)
                connected.recv(1)  # until the other side closes
        sides.accept(plain).close()  # the other process has ended
    listener.close()


def raw(sides: Sides, count: int) -> float:
    """Return bytes a second of a plain connection from the other process, for `count` messages."""
    out = bytearray(RAW)
    with sides.connect() as connected:
        began = time.perf_counter()
        for _ in range(count):
            view = memoryview(out)
            while len(view):
                view = view[connected.recv_into(view) :]
        return count * RAW / (time.perf_counter() - began)


def cache(options: argparse.Namespace) -> BlockBytes:
    """Return a cache of the shapes that are asked for."""
    shape = options.blocks, BLOCK, options.kv_heads, options.head_dim, scheme(options.kv)
    made = [PagedKV.zeros(*shape) for _ in range(options.layers)]
    for each in made:
        for part in each.parts():
            part.fill_(1)  # memory that was never written is not there yet
    return BlockBytes(made)


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 30), ("kv-heads", 3), ("head-dim", 64), ("blocks", 64), ("runs", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv", default="float32")
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    target = cache(options)
    origin = Origin("", "", target.layout_id, BLOCK, target.nbytes)
    tokens, total = array("i", range(options.blocks * BLOCK)), options.blocks * target.nbytes
    moved, beside = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder, ready = Path(name), multiprocessing.get_context("spawn").Event()
        ports = None
        if options.tls:
            certify(folder)
            ports = free_ports()
        given = (folder, ports, options, ready)
        other = multiprocessing.get_context("spawn").Process(target=serve, args=given, daemon=True)
        other.start()
        assert ready.wait(120)
        sides, ask = Sides(folder, ports), Prefill(tokens.tobytes(), b"", b"", "", 0, 30.0)
        puller = Puller(sides.blocks, origin, sides.credentials)
        for _ in range(options.runs):
            beside.append(raw(sides, total // RAW))
            began = time.perf_counter()
            count = puller.pull(ask, tokens, target.views, lambda: True)
            moved.append(total / (time.perf_counter() - began))
            assert count == options.blocks, puller.pulled
        puller.close()
        sides.connect().close()
        other.join()
    gb = {"raw_gb_s": max(beside) / 1e9, "moved_gb_s": max(moved) / 1e9}
    sizes = {"block_bytes": origin.size, "blocks": options.blocks}
    print(json.dumps({"tls": options.tls, **gb, "share": max(moved) / max(beside), **sizes}))


if __name__ == "__main__":
    main()
