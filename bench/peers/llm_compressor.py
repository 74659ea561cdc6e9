"""Compress one model with llm-compressor, once for each job of a JSON file. Runs in the peers' own environment.

    .venv-peers/bin/python bench/peers/llm_compressor.py JOBS.json

The file holds {"model": folder, "tokens": [[...], ...], "jobs": [job, ...]}, a job being

    {"name", "out", "method": "rtn" | "awq" | "gptq", "group_size", "symmetric", "observer"}

and for GPTQ also "order" ("static" or null), "block_size" and "damping". Token sequences go in as they are, in their
order, without a mask: no tokenizer, shuffling or padding stands between the two sides. Each job writes a checkpoint to
`out`; the last line printed is {"jobs": {name: {"seconds", "warnings"}}, "versions": {...}}. Warnings are handed on because
llm-compressor rounds to nearest, and only says so, where a Hessian cannot be factored.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from loguru import logger
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

PACKAGES = ("llmcompressor", "compressed-tensors", "transformers", "torch")
BATCH = 8  # sequences of one forward call


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    rows = [{"input_ids": torch.tensor(ids)} for ids in work["tokens"]]
    done = {job["name"]: run(work["model"], rows, job) for job in work["jobs"]}
    print(json.dumps({"jobs": done, "versions": {name: version(name) for name in PACKAGES}}))


def run(folder: str, rows: list[dict[str, torch.Tensor]], job: dict[str, Any]) -> dict[str, Any]:
    warnings: list[str] = []
    sink = logger.add(lambda message: warnings.append(str(message).strip()), level="WARNING", format="{message}")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=job.get("dtype", "auto"))
    began = time.monotonic()
    oneshot(
        model=model,
        recipe=recipe(job),
        dataset=None if job["method"] == "rtn" else DataLoader(rows, batch_size=BATCH),  # type: ignore[arg-type]
        num_calibration_samples=len(rows),
    )
    seconds = time.monotonic() - began
    model.save_pretrained(job["out"], save_compressed=True)
    logger.remove(sink)
    return {"seconds": round(seconds, 3), "warnings": warnings}


def recipe(job: dict[str, Any]) -> list[Any]:
    weights = QuantizationArgs(
        num_bits=4,
        strategy="group",
        group_size=job["group_size"],
        symmetric=job["symmetric"],
        observer=job["observer"],
        actorder=job.get("order"),
    )
    common = {
        "config_groups": {"all": QuantizationScheme(targets=["Linear"], weights=weights)},
        "ignore": ["lm_head"],
    }
    if job["method"] == "gptq":
        # The default of the modifier's own `actorder` defers to the scheme's only where that is not None.
        return [
            GPTQModifier(
                **common,
                block_size=job["block_size"],
                dampening_frac=job["damping"],
                actorder=job["order"],
            )
        ]
    rounding = QuantizationModifier(**common)
    return [AWQModifier(), rounding] if job["method"] == "awq" else [rounding]


if __name__ == "__main__":
    main()
