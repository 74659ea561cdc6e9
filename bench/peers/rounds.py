"""What the peers' programs that only round weights have in common: the jobs of a file, each done and told of."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any


def main(run: Callable[[str, dict[str, Any]], tuple[float, float]], packages: Sequence[str]) -> None:
    """Do `run(folder, job)` for every job; it returns seconds and bits a weight."""
    work = json.loads(Path(sys.argv[1]).read_text())
    seconds, bits = {}, {}
    for job in work["jobs"]:
        seconds[job["name"]], bits[job["name"]] = run(work["model"], job)
    print(json.dumps({"seconds": seconds, "bits": bits, "versions": {name: version(name) for name in packages}}))
