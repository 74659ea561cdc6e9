"""`attar demo`: compress, measure and run the embedded model, with no data and no network.

The calibration text is sampled from the model itself. The evaluation text is sampled from it too, with another seed:
the model finds it likely, and calibration never saw it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attar import LLM, SamplingParams
from attar.checkpoints.sources import hf, hub
from attar.compression.calibration import texts as calibrate
from attar.compression.calibration.amount import Amount
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.errors import UserError
from attar.evaluation.report import evaluate
from attar.evaluation.table import Row, cost_table
from attar.progress import Progress

ORIGINAL = "bf16"
RECIPES = ("rtn-w4g128", "awq-w4g128", "gptq-w4g128")
PROMPT = "It was a dark and stormy night, and"
GREEDY = SamplingParams(max_tokens=48, temperature=0.0)
CALIBRATION = Amount(64, 512, seed=0)
HELD_OUT = Amount(32, 512, seed=1)


@dataclass(frozen=True)
class Demonstration:
    """The cost of each model, and its continuation of `PROMPT`."""

    rows: Sequence[Row]
    texts: Mapping[str, str]

    def text(self) -> str:
        """Return the cost table and the continuations as text for a terminal."""
        return "\n".join([cost_table(self.rows), *(f"\n{name}:\n{PROMPT}{text}" for name, text in self.texts.items())])

    def to_dict(self) -> dict[str, Any]:
        return {"models": [row.to_dict() for row in self.rows], "prompt": PROMPT, "texts": dict(self.texts)}


def demonstrate(folder: Path | None, progress: Progress, overwrite: bool = False) -> Demonstration:
    """Compress the embedded model with each of `RECIPES`, measure each result, and let each continue `PROMPT`.

    The compressed models are left in `folder`; with None they are deleted. Raises ValueError, before any computation,
    where an output name is taken in `folder` (unless `overwrite`) or the folder cannot be written.
    """
    if folder is not None:
        _check(folder, overwrite)
    source = hub.resolve("demo")
    decoder = hf.load(source, torch.float32)

    def sample(stage: str, amount: Amount) -> list[list[int]]:
        return calibrate.sample_from(decoder, amount, progress=lambda d, t: progress(stage, d, t)).tolist()

    calibration, held_out = sample("sampling", CALIBRATION), sample("sampling test", HELD_OUT)
    rows, texts = [], {}
    with nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory() as place:
        for name in (ORIGINAL, *RECIPES):
            path = source if name == ORIGINAL else Path(place) / name
            if name != ORIGINAL:
                request = CompressionRequest(source, path, recipe=name, calibration=calibration, overwrite=overwrite)
                compress_request(request, progress)
            report = evaluate(path, against=None if name == ORIGINAL else decoder, tokens=held_out, progress=progress)
            llm = LLM(path)
            llm.generate(PROMPT, GREEDY)  # warm-up
            began = time.perf_counter()
            written = llm.generate(PROMPT, GREEDY)[0]
            rows.append(Row.of(name, path, report, len(written.token_ids) / (time.perf_counter() - began)))
            texts[name] = written.text
    return Demonstration(rows, texts)


def _check(folder: Path, overwrite: bool) -> None:
    there = [name for name in RECIPES if (folder / name).exists()]
    if there and not overwrite:
        message = f"{folder}: {', '.join(there)} exists and is kept; choose another folder, or pass --overwrite"
        raise UserError("output_exists", message)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"{folder}: nothing can be written there: {(error.strerror or str(error)).lower()}"
        raise UserError("output_invalid", message) from None
