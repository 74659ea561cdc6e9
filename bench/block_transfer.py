"""Speed of blocks from a prefill engine to a decode engine, beside a raw Unix socket in the same run.

Both sides are processes, as are those of the raw socket. Blocks have the shapes of a model's cache. They are copied out
of one, checked, sent, received, checked and copied into another. The last line is JSON, with the best of some runs.

    python bench/block_transfer.py --layers 30 --kv-heads 3 --head-dim 64 --blocks 64
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from attar.kv.block_bytes import BlockBytes
from attar.kv.pages import PagedKV
from attar.kv.schemes import scheme
from attar.transfer.header import Origin
from attar.transfer.listener import LentBlocks, PrefillAsked, PrefillListener
from attar.transfer.puller import Puller
from attar.transfer.wire import Address, Prefill

BLOCK, RAW = 64, 4 << 20  # tokens of a block, and bytes of a message of the raw socket


def serve(folder: Path, options: argparse.Namespace, ready: Any) -> None:
    """Send, as a process of its own: blocks of a cache at one socket, and plain bytes at another."""
    source = cache(options)
    origin = Origin("", "", source.layout_id, BLOCK, source.nbytes)

    def tell(what: Any) -> None:
        if isinstance(what, PrefillAsked):
            what.reply.put(LentBlocks(list(range(options.blocks)), None))

    listener = PrefillListener(Address(folder / "prefill"), origin, source.read, tell)
    with socket.socket(socket.AF_UNIX) as plain:
        plain.bind(str(folder / "raw"))
        plain.listen()
        ready.set()
        sent, count = bytearray(RAW), options.blocks * origin.size // RAW
        for _ in range(options.runs):
            connected, _ = plain.accept()
            with connected:
                for _ in range(count):
                    connected.sendall(sent)
        plain.accept()  # the other process has ended
    listener.close()


def raw(path: Path, count: int) -> float:
    """Return bytes a second of a Unix socket from the other process, for `count` messages."""
    out = bytearray(RAW)
    with socket.socket(socket.AF_UNIX) as connected:
        began = time.perf_counter()
        connected.connect(str(path))
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
    options = parser.parse_args()
    target = cache(options)
    origin = Origin("", "", target.layout_id, BLOCK, target.nbytes)
    tokens, total = array("i", range(options.blocks * BLOCK)), options.blocks * target.nbytes
    moved, beside = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder, ready = Path(name), multiprocessing.get_context("spawn").Event()
        other = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, options, ready), daemon=True)
        other.start()
        assert ready.wait(120)
        puller, ask = Puller(Address(folder / "prefill"), origin), Prefill(tokens.tobytes(), b"", b"", "", 0, 30.0)
        for _ in range(options.runs):
            beside.append(raw(folder / "raw", total // RAW))
            began = time.perf_counter()
            count = puller.pull(ask, tokens, target.write, lambda: True)
            moved.append(total / (time.perf_counter() - began))
            assert count == options.blocks, puller.pulled
        puller.close()
        raw(folder / "raw", 0)
        other.join()
    gb = {"raw_gb_s": max(beside) / 1e9, "moved_gb_s": max(moved) / 1e9}
    print(json.dumps({**gb, "share": max(moved) / max(beside), "block_bytes": origin.size, "blocks": options.blocks}))


if __name__ == "__main__":
    main()
