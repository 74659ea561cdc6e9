"""What one event of a stream costs the server's process: an engine that does nothing else sends tokens, clients read.

    python bench/server_events.py [--streams 32] [--tokens 400] [--step 0.001]

Three processes: the engine (a token for every open request, every `step` seconds), the server as `attar serve` runs it,
and this one, with a thread per client. The figure is processor time of the server per event, which does not depend on
how fast the clients read as long as they keep up; more streams make bigger batches of events, and cheaper ones.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from attar.checkpoints.sources.hub import embedded

ENGINE = """
import asyncio, sys
import msgspec
from attar.protocol.messages import Cancel, Command, Delta, Finished, Ready, Submit, encode

async def serve(reader, writer):
    writer.write(encode([Ready("bench", 4096, 4096, 100, 16, 256, ())]))
    decoder, left = msgspec.msgpack.Decoder(list[Command]), {}

    async def steps():
        while True:
            events = []
            for name, count in list(left.items()):
                events.append(Delta(name, 0, (count,), " word"))
                left[name] = count - 1
                if count == 1:
                    events.append(Finished(name, 0, "length", 1))
                    del left[name]
            if events:
                writer.write(encode(events))
                await writer.drain()
            await asyncio.sleep(float(sys.argv[2]))

    task = asyncio.create_task(steps())
    while True:
        size = int.from_bytes(await reader.readexactly(4), "little")
        for command in decoder.decode(await reader.readexactly(size)):
            if isinstance(command, Submit):
                left[command.id] = command.params.max_tokens
            elif isinstance(command, Cancel):
                left.pop(command.id, None)

async def main():
    await (await asyncio.start_unix_server(serve, sys.argv[1])).serve_forever()

asyncio.run(main())
"""
SERVER = """
import sys
from pathlib import Path
from attar.server.options import ServerOptions
from attar.server.serve import serve
from attar.text.tokenizer import Tokenizer
serve(Path(sys.argv[1]), Tokenizer.load(Path(sys.argv[2])), ServerOptions(port=0), lambda url: print(url, flush=True))
"""


def ask(port: int, path: str, body: bytes) -> bytes:
    """One request; the answer up to its end, or its headers where it has no body."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        start = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{start}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        pieces = []
        while piece := sock.recv(1 << 18):
            pieces.append(piece)
        return b"".join(pieces)


def processor_seconds(pid: int) -> float:
    """What a process has used, in itself and for the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(port: int, pid: int, path: str, streams: int, tokens: int) -> dict[str, object]:
    """All streams at once."""
    body: dict[str, object] = {"max_tokens": tokens, "stream": True}
    body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    counts: list[int] = []
    data = json.dumps(body).encode()

    def client() -> None:
        counts.append(ask(port, path, data).count(b"data: "))

    threads = [threading.Thread(target=client) for _ in range(streams)]
    used, started = processor_seconds(pid), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, used = time.perf_counter() - started, processor_seconds(pid) - used
    events = sum(counts)
    return {
        "path": path,
        "streams": streams,
        "events": events,
        "per_second": round(events / seconds),
        "us_per_event": round(1e6 * used / events, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step", type=float, default=0.001)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "engine.sock")
        program = [sys.executable, "-c"]
        engine = subprocess.Popen([*program, ENGINE, path, str(given.step)], stderr=subprocess.DEVNULL)
        server = subprocess.Popen([*program, SERVER, path, str(embedded())], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            while b" 200 " not in ask(port, "/readyz", b"")[:20]:
                time.sleep(0.05)
            found = []
            print(f"{'path':>22} {'streams':>8} {'events':>8} {'events/s':>9} {'CPU us/event':>13}")
            for route in ("/v1/completions", "/v1/chat/completions", "/v1/messages"):
                for streams in (1, given.streams):
                    one = measure(port, server.pid, route, streams, given.tokens)
                    found.append(one)
                    print(
                        f"{route:>22} {streams:>8} {one['events']:>8} {one['per_second']:>9} {one['us_per_event']:>13}"
                    )
            print(json.dumps(found))
        finally:
            for process in (server, engine):
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
