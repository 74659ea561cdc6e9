"""Compress one model with llm-compressor, once for each job of a file. Runs in the peers' own environment.

    .venv-peers/bin/python bench/peers/llm_compressor.py JOBS.json

The file holds {"model": folder, "tokens": [[id, ...], ...], "jobs": [job, ...]}, a job being

    {"name", "out", "method": "rtn" | "awq" | "gptq", "group_size", "observer"}

and for GPTQ also "order" ("static" or null), "block_size" and "damping", for AWQ "duo_scaling" (true). Any of them may
have "bits" (4) and "symmetric" (true). Two more methods are of other kinds: {"method": "smoothquant", "strength"},
which ends in W8A8 by GPTQ and with "through" smooths the inputs of down as well, and {"method": "sparsegpt" | "wanda",
"pattern": "2:4"}, with "damping" (0.01) for the first, whose output is dense. Models are loaded as they are stored
unless "dtype" says otherwise. Token sequences go in as they are, in order, without a mask: no tokenizer, shuffling
or padding stands between the two sides. Each job writes a checkpoint to `out`; the last line printed is {"seconds":
{name: seconds}, "versions": {...}}. Where a Hessian cannot be factored, llm-compressor does without it and says so in
its log only: here that ends the run, because the figures would be of another method than their name. So does an
embedding or a head that has changed: everybody leaves those as they are.
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

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from loguru import logger
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

PACKAGES = ("llmcompressor", "compressed-tensors", "transformers", "torch")
FALLBACKS = ("round-to-nearest instead of GPTQ", "Failed to invert hessian")
BATCH = 8  # sequences of one forward call


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    logger.remove()
    logger.add(sys.stderr, level="WARNING")
    fallbacks: list[str] = []
    logger.add(
        lambda message: fallbacks.append(str(message)),
        filter=lambda record: any(each in record["message"] for each in FALLBACKS),
    )
    if not torch.accelerator.is_available():
        # Its AWQ pins memory, to copy faster to a device, without asking whether there is one: an error on a CPU.
        IntermediatesCache.pin_memory = lambda *args, **kwargs: None
    rows = [{"input_ids": torch.tensor(ids)} for ids in work["tokens"]]
    seconds = {job["name"]: round(run(work["model"], rows, job), 3) for job in work["jobs"]}
    if fallbacks:
        raise SystemExit("\n".join(fallbacks))
    print(json.dumps({"seconds": seconds, "versions": {name: version(name) for name in PACKAGES}}))


def run(folder: str, rows: list[dict[str, torch.Tensor]], job: dict[str, Any]) -> float:
    """Seconds from the model in memory to the compressed model on disk."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=job.get("dtype", "auto"))
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    before = [weight.detach().clone() for weight in ends]
    began = time.monotonic()
    oneshot(
        model=model,
        recipe=recipe(job),
        dataset=None if job["method"] == "rtn" else DataLoader(rows, batch_size=BATCH),
        num_calibration_samples=len(rows),
    )
    model.save_pretrained(job["out"], save_compressed=True)
    seconds = time.monotonic() - began
    ends = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    if not all(torch.equal(was, now.cpu()) for was, now in zip(before, ends, strict=True)):
        raise SystemExit(f"{job['name']}: the embedding or the head has changed, which nobody was asked to do")
    return seconds


def recipe(job: dict[str, Any]) -> list[Any]:
    if job["method"] in ("sparsegpt", "wanda"):
        # Blocks are named, not the linears in them: these two look for what to ignore below a target, by names that
        # begin with the target's, so that a head which is a target of its own is never ignored.
        where = {"sparsity": 0.5, "mask_structure": job["pattern"], "targets": [r"re:model\.layers\.\d+$"]}
        if job["method"] == "wanda":
            return [WandaPruningModifier(**where)]
        return [SparseGPTModifier(**where, dampening_frac=job.get("damping", 0.01))]
    if job["method"] == "smoothquant":
        # Its own mappings for Llama, and one more: outliers of down's inputs, into up. Those of o's cannot go into v
        # where queries share heads.
        mappings = [
            [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"],
            [["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"],
            [["re:.*down_proj"], "re:.*up_proj"],
        ]
        return [
            SmoothQuantModifier(smoothing_strength=job["strength"], mappings=mappings if job.get("through") else None),
            GPTQModifier(targets=["Linear"], scheme="W8A8", ignore=["lm_head"]),
        ]
    weights = QuantizationArgs(
        num_bits=job.get("bits", 4), strategy="group", group_size=job["group_size"],
        symmetric=job.get("symmetric", True), observer=job["observer"],
    )  # fmt: skip
    grids = {
        "config_groups": {"all": QuantizationScheme(targets=["Linear"], weights=weights)},
        "ignore": ["lm_head"],
    }
    if job["method"] == "gptq":
        options = {"block_size": job["block_size"], "dampening_frac": job["damping"], "actorder": job["order"]}
        return [GPTQModifier(**grids, **options)]
    rounding = QuantizationModifier(**grids)
    return [AWQModifier(duo_scaling=job.get("duo_scaling", True)), rounding] if job["method"] == "awq" else [rounding]


if __name__ == "__main__":
    main()
