"""Compress one model with GPTQModel, once for each job of a file. Runs in an environment of its own.

    .venv-gptqmodel/bin/python bench/peers/gptq_model.py JOBS.json

The file is that of `llm_compressor.py`, a job being {"name", "out", "bits", "group_size", "symmetric", "mse"}: GPTQ
with group-aware order of columns, `mse` the power of the errors by which scales are searched, 0 for minimum and
maximum. Token sequences go in as they are. GPTQModel fails on a tied output matrix that is stored once, so what it
gets is an untied copy of the model, which computes the same. What comes out is its own format, which attar reads. The
last line printed is {"seconds": {name: seconds}, "versions": {...}}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it refuses to work with the one that it gives itself on two cores

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGES = ("gptqmodel", "transformers", "torch")
BATCH = 8  # sequences of one forward call


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in work["tokens"]]
    with tempfile.TemporaryDirectory() as place:
        folder = untied(work["model"], Path(place))
        seconds = {job["name"]: round(run(folder, rows, job), 3) for job in work["jobs"]}
    print(json.dumps({"seconds": seconds, "versions": {name: version(name) for name in PACKAGES}}))


def untied(folder: str, place: Path) -> str:
    """A copy of the model with an output matrix of its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(folder).save_pretrained(place)
    return str(place)


def run(folder: str, rows: list[dict[str, list[int]]], job: dict[str, Any]) -> float:
    """Seconds from the model in memory to the compressed model on disk."""
    config = QuantizeConfig(
        bits=job["bits"], group_size=job["group_size"], sym=job["symmetric"], desc_act=False, act_group_aware=True,
        mse=job["mse"], device="cpu",
    )  # fmt: skip
    model = GPTQModel.load(folder, config, dtype=torch.float32)
    began = time.monotonic()
    model.quantize(rows, batch_size=BATCH)
    model.save(job["out"])
    return time.monotonic() - began


if __name__ == "__main__":
    main()
