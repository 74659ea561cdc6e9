"""Asks /livez twenty times a second, in a process of its own: the load's own hurry is in no figure of it.

    python probe.py HOST PORT

It stops when its standard input ends, and prints the seconds that each answer took.
"""

from __future__ import annotations

import select
import socket
import sys
import time

INTERVAL = 0.05


def main() -> None:
    times = []
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as sock:
        while not select.select([sys.stdin], [], [], INTERVAL)[0]:
            began = time.perf_counter()
            sock.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):  # head and body may come apart
                more = sock.recv(4096)
                if not more:
                    raise ConnectionError("the server closed the connection of the probe")
                answer += more
            assert b" 200 " in answer
            times.append(time.perf_counter() - began)
    print(*times)


if __name__ == "__main__":
    main()
