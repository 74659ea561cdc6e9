"""Round one model with HQQ, once for each job of a file. Runs in an environment of its own.

    .venv-hqq/bin/python bench/peers/hqq_rounding.py JOBS.json

The file is that of `llm_compressor.py`, a job being {"name", "out", "bits", "group_size"}: groups along the inputs,
scales and zero points in float16, unrounded, as HQQ's defaults have it. It reads no text. What comes out is the model
with its weights rounded and dense, in float32. The last line printed is {"seconds": {name: seconds}, "bits": {name:
what HQQ stores of the linears, a weight}, "versions": {...}}.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import rounds
import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from transformers import AutoModelForCausalLM

PACKAGES = ("hqq", "transformers", "torch")


def run(folder: str, job: dict[str, Any]) -> tuple[float, float]:
    """Seconds from the model in memory to its rounded weights, and their bits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = BaseQuantizeConfig(nbits=job["bits"], group_size=job["group_size"], axis=1)
    stored = weights = 0
    began = time.monotonic()
    for name, linear in model.named_modules():
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        rounded = HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu", del_orig=False)
        parts = [rounded.W_q, rounded.meta["scale"], rounded.meta["zero"]]
        stored += sum(part.numel() * part.element_size() for part in parts)
        weights += linear.weight.numel()
        linear.weight.data = rounded.dequantize().float()
    seconds = time.monotonic() - began
    model.save_pretrained(job["out"])
    return round(seconds, 3), 8 * stored / weights


if __name__ == "__main__":
    rounds.main(run, PACKAGES)
