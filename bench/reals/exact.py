"""How near prefill with exact rows comes to what torch multiplies in float32 on this machine.

    PYTHONPATH=bench python -m reals.exact FILE.gguf [--prompt N]

The bound is the best of five products of torch's of square matrices, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch

from attar.engine.llm.running import PREFILL_ROWS
from attar.evaluation import decode_speed

SIDE = 2048


def float32_gops() -> float:
    """Operations of a second of torch's own product of two matrices, in 10^9."""
    left, right = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    times = []
    for _ in range(6):
        since = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - since)
    return 2 * SIDE**3 / min(times[1:]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    args = parser.parse_args()
    assert args.prompt <= PREFILL_ROWS, "one step"
    load = decode_speed.Load(args.prompt, 8, 1)
    found = decode_speed.run(partial(decode_speed.load, args.file), load, decode_speed.Setup(activations="exact"))
    bound = float32_gops()
    work = found["compute_fraction"] * found["int8_gops"]
    print(json.dumps(found | {"float32_gops": bound, "float32_fraction": work / bound}))


if __name__ == "__main__":
    main()
