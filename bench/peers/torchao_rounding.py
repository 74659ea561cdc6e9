"""Round one model with torchao, once for each job of a file. Runs in an environment of its own.

    .venv-torchao/bin/python bench/peers/torchao_rounding.py JOBS.json

The file is that of `llm_compressor.py`, a job being {"name", "out", "bits", "group_size", "symmetric"}; a group size of
null is a scale for each row, int8 weight-only where the bits are 8. It reads no text. What comes out is the model with
its weights rounded and dense, in float32. The last line printed is {"seconds": {name: seconds}, "bits": {name: bits a
weight}, "versions": {...}}, where scales count 16 bits and zero points as many as codes: as it is, torchao keeps every
code in a byte on a CPU.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import rounds
import torch
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, MappingType, quantize_
from torchao.quantization.granularity import PerAxis, PerGroup
from transformers import AutoModelForCausalLM

PACKAGES = ("torchao", "transformers", "torch")


def config(job: dict[str, Any]) -> Any:
    if job["bits"] == 8 and job["group_size"] is None:
        return Int8WeightOnlyConfig()
    return IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{job['bits']}"),
        granularity=PerAxis(0) if job["group_size"] is None else PerGroup(job["group_size"]),
        mapping_type=MappingType.SYMMETRIC if job["symmetric"] else MappingType.ASYMMETRIC,
    )


def run(folder: str, job: dict[str, Any]) -> tuple[float, float]:
    """Seconds from the model in memory to its rounded weights, and their bits."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    began = time.monotonic()
    quantize_(model, config(job), filter_fn=lambda module, name: name in linears)
    seconds = time.monotonic() - began
    stored = weights = 0
    for name in linears:
        linear = model.get_submodule(name)
        rows, columns = linear.weight.shape
        scales = rows * (1 if job["group_size"] is None else columns // job["group_size"])
        stored += rows * columns * job["bits"] + scales * (16 + (0 if job["symmetric"] else job["bits"]))
        weights += rows * columns
        linear.weight = torch.nn.Parameter(linear.weight.dequantize().float(), requires_grad=False)
    model.save_pretrained(job["out"])
    return round(seconds, 3), stored / weights


if __name__ == "__main__":
    rounds.main(run, PACKAGES)
