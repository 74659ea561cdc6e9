"""What bodies of small chunks cost a server beside the same body in one chunk: reading it from bytes and as JSON.

    python bench/chunked_bodies.py [--rounds 15]

One process and no socket. A round times each size once, in turn; the ratio is the median of those of the rounds, in
processor time. The bar for chunks of one byte is 2.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import h11

from attar.server.api.schemas import CompletionBody
from attar.server.api.validation import read
from attar.server.http.limits import MAX_HEAD, _Connection

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
SEGMENT = 1 << 16  # bytes that arrive at once
SIZES = (1, 2, 7, 15, 16, 100, 1000)


def chunked(body: bytes, size: int) -> bytes:
    """The body as chunks of `size` bytes."""
    pieces = (body[at : at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def seconds(data: bytes, body: bytes) -> float:
    """Processor time from bytes to a checked body."""
    start = time.process_time()
    connection, pieces = _Connection(h11.SERVER, MAX_HEAD), []
    for at in range(0, len(data), SEGMENT):
        connection.receive_data(data[at : at + SEGMENT])
        while isinstance(event := connection.next_event(), h11.Request | h11.Data):
            if isinstance(event, h11.Data):
                pieces.append(event.data)
    found = b"".join(pieces)
    read(CompletionBody, found)
    taken = time.process_time() - start
    if found != body:
        raise SystemExit("the body was read wrongly")
    return taken


def main() -> None:
    """Print the ratio of each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    body = b'{"prompt": [%b]}' % b",".join(b"%d" % random.Random(1).randrange(4096) for _ in range(40_000))
    whole = HEAD + chunked(body, len(body))
    cut = {size: HEAD + chunked(body, size) for size in SIZES}
    ratios: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        base = seconds(whole, body)
        for size, data in cut.items():
            ratios[size].append(seconds(data, body) / base)
    print(f"body of {len(body)} bytes, {rounds} rounds: processor time over that of one chunk")
    for size, found in ratios.items():
        print(f"  chunks of {size:4} bytes: {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
