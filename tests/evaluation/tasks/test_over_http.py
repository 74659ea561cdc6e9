"""The same tasks, asked by the harness itself over HTTP: every item has the same score and the same text."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import await_ready
from lm_eval import evaluator

from attar.checkpoints.sources import hf
from attar.evaluation.tasks import run
from attar.evaluation.tasks.catalogue import TaskSource
from attar.evaluation.tasks.harness_model import HarnessModel
from attar.text.tokenizer import Tokenizer
from tests.evaluation.tasks.items import NUMBER, TASKS, write

CLOSE = 1e-3  # nats of an item: both sides add float32 in different orders
GENERATED = ("gsm8k", "ifeval")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "attar", "serve", "demo", "--port", "0", "--json", "--threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        found = json.loads(server.stdout.readline())["url"]
        await_ready(found)
        yield found
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_scores_item_by_item(url: str, demo: Path, tmp_path: Path) -> None:
    sources = [TaskSource(name, write(tmp_path, name)) for name in TASKS if name not in GENERATED]
    with urllib.request.urlopen(url + "/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    served = {
        "model": name, "base_url": url + "/v1/completions", "tokenizer": str(demo), "tokenizer_backend": "huggingface",
        "tokenized_requests": True, "add_bos_token": Tokenizer.load(demo).added_bos is not None, "num_concurrent": 4,
        "max_length": 512,
    }  # fmt: skip
    here = HarnessModel(hf.load(demo, torch.float32), Tokenizer.load(demo), 512, lambda *_: None)
    ours, theirs = (
        evaluator.simple_evaluate(
            model=model, model_args=settings, tasks=list(run._load(sources, 0)), bootstrap_iters=0
        )
        for model, settings in ((here, None), ("local-completions", served))
    )
    assert ours is not None
    assert theirs is not None
    count = 0
    for task, samples in ours["samples"].items():
        by_id = {each["doc_id"]: each for each in theirs["samples"][task]}
        for sample in samples:
            other = by_id[sample["doc_id"]]
            for mine, peers in zip(_scores(sample), _scores(other), strict=True):
                assert mine == pytest.approx(peers, abs=CLOSE), (task, sample["doc_id"])
            count += 1
    assert count == NUMBER * (len(sources) + 1)  # truthfulqa is two tasks


def _scores(sample: dict[str, Any]) -> list[float]:
    """Return the log-likelihoods of an item's choices, as the harness keeps them: numbers, or texts of numbers."""
    return [float(each[0]) for each in sample["filtered_resps"]]
