"""How long a model takes from the start of a process to its first token, files in the page cache.

    PYTHONPATH=bench python -m reals.start FILE.gguf [--llama-cli PROGRAM]

`first_token_s` is until `attar generate` has written the first byte of its text, `torch_s` what a process takes that
only imports torch, `beyond_s` the difference. `llama_cli_s` is the whole time of llama-cli for one token. One run of
each goes first, to fill the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROMPT = "The capital of France is"


def first_byte(command: Sequence[str]) -> float:
    """Seconds until a process has written something to stdout. It is waited for. Raises SystemExit where it fails."""
    since = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.read(1)
        seconds = time.perf_counter() - since
        child.stdout.read()
        said = child.stderr.read()
    if child.returncode:
        raise SystemExit(f"status {child.returncode} of {' '.join(command)}\n{said[-2000:].decode(errors='replace')}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--llama-cli", type=Path)
    args = parser.parse_args()
    options = ("--prompt", PROMPT, "--max-tokens", "1", "--temperature", "0", "--quiet")
    ours = (sys.executable, "-m", "attar", "generate", args.file, *options)
    torch = (sys.executable, "-c", "import torch; print()")
    first_byte(ours)
    found = {"first_token_s": first_byte(ours), "torch_s": first_byte(torch)}
    found["beyond_s"] = found["first_token_s"] - found["torch_s"]
    if args.llama_cli is not None:
        theirs = (str(args.llama_cli), "-m", args.file, "-p", PROMPT, "-n", "1", "--temp", "0", "-no-cnv")
        times = []
        for _ in range(2):
            since = time.perf_counter()
            subprocess.run(theirs, check=True, capture_output=True, stdin=subprocess.DEVNULL)
            times.append(time.perf_counter() - since)
        found["llama_cli_s"] = times[1]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
