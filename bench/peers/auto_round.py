"""Compress one model with auto-round, once for each job of a file. Runs in the peers' own environment.

    .venv-peers/bin/python bench/peers/auto_round.py JOBS.json

The file is that of `llm_compressor.py`, a job being {"name", "out", "bits", "group_size", "symmetric", "iterations"}
and perhaps "extended" (its extended algorithm). Token sequences go in as they are. What comes out is the model with its
weights rounded and dense, in float32, so that no format's own rounding stands between the two sides. The last line
printed is {"seconds": {name: seconds}, "versions": {...}}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.remove(str(Path(__file__).parent))  # where this file would be taken for the package of its name

import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGES = ("auto-round", "transformers", "torch")


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    rows = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))} for ids in work["tokens"]]
    seconds = {job["name"]: round(run(work["model"], rows, job), 3) for job in work["jobs"]}
    print(json.dumps({"seconds": seconds, "versions": {name: version(name) for name in PACKAGES}}))


def run(folder: str, rows: list[dict[str, torch.Tensor]], job: dict[str, Any]) -> float:
    """Seconds from the model in memory to its rounded weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    began = time.monotonic()
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(folder),
        scheme="W4A16",
        bits=job["bits"],
        group_size=job["group_size"],
        sym=job["symmetric"],
        iters=job["iterations"],
        nsamples=len(rows),
        seqlen=rows[0]["input_ids"].shape[1],
        dataset=rows,
        enable_alg_ext=job.get("extended", False),
        enable_torch_compile=False,
        device_map="cpu",
        amp=False,
    )
    model, _ = rounding.quantize()
    seconds = time.monotonic() - began
    model.save_pretrained(job["out"])
    return seconds


if __name__ == "__main__":
    main()
