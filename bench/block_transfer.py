"""Speed of blocks from a prefill engine to a decode engine, beside a raw Unix socket in the same run.

Both sides are threads of this process, as are those of the raw socket. Blocks have the shapes of a model's cache.
They are copied out of one, checked, sent, received, checked and copied into another. The last line is JSON, with the
best of some runs.

    python bench/block_transfer.py --layers 30 --kv-heads 3 --head-dim 64 --blocks 64
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
import threading
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


def raw(total: int) -> float:
    """Return bytes a second of a Unix socket between two threads."""
    one, other = socket.socketpair()
    sent, out = bytearray(RAW), bytearray(RAW)

    def send() -> None:
        for _ in range(total // RAW):
            one.sendall(sent)

    thread = threading.Thread(target=send)
    began = time.perf_counter()
    thread.start()
    for _ in range(total // RAW):
        view = memoryview(out)
        while len(view):
            view = view[other.recv_into(view) :]
    seconds = time.perf_counter() - began
    thread.join()
    one.close()
    other.close()
    return total // RAW * RAW / seconds


def caches(options: argparse.Namespace) -> tuple[BlockBytes, BlockBytes]:
    """Return two caches of the shapes that are asked for."""
    shape = options.blocks, BLOCK, options.kv_heads, options.head_dim, scheme(options.kv)
    first, second = ([PagedKV.zeros(*shape) for _ in range(options.layers)] for _ in range(2))
    for each in (*first, *second):
        for part in each.parts():
            part.fill_(1)  # memory that was never written is not there yet
    return BlockBytes(first), BlockBytes(second)


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 30), ("kv-heads", 3), ("head-dim", 64), ("blocks", 64), ("runs", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv", default="float32")
    options = parser.parse_args()
    source, target = caches(options)
    origin = Origin("", "", source.layout_id, BLOCK, source.nbytes)
    tokens = array("i", range(options.blocks * BLOCK))
    total = options.blocks * origin.size

    def tell(what: Any) -> None:
        if isinstance(what, PrefillAsked):
            what.reply.put(LentBlocks(list(range(options.blocks)), None))

    moved, beside = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        address = Address(Path(folder) / "prefill")
        listener, puller = PrefillListener(address, origin, source.read, tell), Puller(address, origin)
        ask = Prefill(tokens.tobytes(), b"", b"", "", 0, 30.0)
        for _ in range(options.runs):
            beside.append(raw(total))
            began = time.perf_counter()
            count = puller.pull(ask, tokens, target.write, lambda: True)
            moved.append(total / (time.perf_counter() - began))
            assert count == options.blocks, puller.pulled
        puller.close()
        listener.close()
    gb = {"raw_gb_s": max(beside) / 1e9, "moved_gb_s": max(moved) / 1e9}
    print(json.dumps({**gb, "share": max(moved) / max(beside), "block_bytes": origin.size, "blocks": options.blocks}))


if __name__ == "__main__":
    main()
