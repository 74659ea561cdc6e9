"""`attar bench` while other programs take processor time.

    PYTHONPATH=bench python -m reals.beside FILE.gguf [--loops N] [OPTION of attar bench ...]

So many processes run an empty loop meanwhile. Threads are those of OMP_NUM_THREADS. Printed last is what `attar bench
--json` printed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--loops", type=int, default=1)
    args, options = parser.parse_known_args()
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(args.loops)]
    try:
        done = subprocess.run([sys.executable, "-m", "attar", "bench", args.file, "--json", *options])
    finally:
        for each in loops:
            each.kill()
            each.wait()
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
