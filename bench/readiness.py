"""How long `attar serve` takes to be ready, beside what `import torch` alone takes.

    python bench/readiness.py [--model demo] [--rounds 7]

Each round starts a Python that imports torch and ends, and a server, from the process's start to the first 200 of
/readyz, asked every 5 ms; the two in turns, so that both see the same machine. Files are in the page cache after a
first round that is not counted. Printed are the medians, and the time between the two, which is what attar itself adds:
two processes, the model, and its probe. Its bar is 2 s on the embedded model.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import statistics
import subprocess
import sys
import time
from urllib.parse import urlsplit

BAR = 2.0
PATIENCE = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    pairs = [(torch_alone(), served(args.model)) for _ in range(args.rounds + 1)][1:]
    print(f"{'round':>6}{'import torch':>15}{'listening':>12}{'ready':>9}{'beyond':>9}   seconds")
    for number, (alone, (listening, ready)) in enumerate(pairs, 1):
        print(f"{number:>6}{alone:>15.2f}{listening:>12.2f}{ready:>9.2f}{ready - alone:>9.2f}")
    torch = statistics.median(alone for alone, _ in pairs)
    listens = statistics.median(listening for _, (listening, _) in pairs)
    ready = statistics.median(ready for _, (_, ready) in pairs)
    beyond = ready - torch
    print(f"{'median':>6}{torch:>15.2f}{listens:>12.2f}{ready:>9.2f}{beyond:>9.2f}")
    print(f"\nready {beyond:.2f} s beyond `import torch`; the bar is {BAR:g} s: {'met' if beyond < BAR else 'MISSED'}")
    figures = {"import_torch": torch, "listening": listens, "ready": ready, "beyond": beyond, "bar": BAR}
    print(json.dumps({"model": args.model, "rounds": args.rounds} | figures))


def torch_alone() -> float:
    """Seconds from the start of a Python that imports torch to its last line; its end is not counted."""
    began = time.perf_counter()
    program = "import torch; print(1, flush=True)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        return time.perf_counter() - began


def served(model: str) -> tuple[float, float]:
    """Seconds from the start of a server until it listens, and until it is ready."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "attar", "serve", model, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout is not None
            address = urlsplit(json.loads(server.stdout.readline())["url"])
            listening = time.perf_counter() - began
            connection = http.client.HTTPConnection(str(address.hostname), address.port)
            while True:
                connection.request("GET", "/readyz")
                answer = connection.getresponse()
                answer.read()
                if answer.status == 200:
                    return listening, time.perf_counter() - began
                if time.perf_counter() - began > PATIENCE:
                    sys.exit(f"not ready after {PATIENCE:g} s")
                time.sleep(0.005)
        finally:
            server.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
