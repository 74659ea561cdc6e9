"""LAMBADA by EleutherAI's lm-evaluation-harness over `attar serve`, beside `attar eval`: are the figures the same?

    python bench/lm_eval_lambada.py --task lambada_test.jsonl [--model demo] [--items 500] [--peer PYTHON]

The harness runs in an environment of its own and reaches the server by HTTP, as `local-completions`: it sends token
ids, and reads log-probabilities of the echoed prompt. Its task is defined here from the file, so that nothing is
downloaded. `attar eval` scores the same file by the decoder itself, in another process, in other batches, without a
cache.

Three things decide whether both score the same tokens. The tokenizer: transformers rebuilds that of a Llama by rules of
its own, so the harness is given `tokenizer.json` as it stands. BOS: the harness is told to put it in front where the
tokenizer does. The boundary between context and target: where tokens lie across it, the two have different rules
(`evaluation/tasks.py`), so items are counted for which these differ, and a third row has attar's own scores of the
tokens that the harness sent. That row must equal the harness's, item by item, on any model.

The bar: figures equal to four digits, scores of every item within `CLOSE` nats, and as greedy. Both sides add float32
in different orders.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from clients import await_ready

from attar.checkpoints.sources import hf, hub
from attar.evaluation import tasks
from attar.evaluation.tasks import Encoded, Score
from attar.text.tokenizer import Tokenizer

CLOSE = 1e-3  # nats of an item

HARNESS = """
import json, sys
import lm_eval
settings = json.loads(sys.argv[1])
task = {
    "task": "lambada_local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": settings["file"]}},
    "test_split": "test", "output_type": "loglikelihood",
    "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}", "doc_to_target": "{{' '+text.split(' ')[-1]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}
sent = []
from lm_eval.models.openai_completions import LocalCompletionsAPI
made = LocalCompletionsAPI._create_payload
def watched(self, messages, **more):
    sent.extend(messages)
    return made(self, messages, **more)
LocalCompletionsAPI._create_payload = watched
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args={
        "model": settings["model"], "base_url": settings["url"] + "/v1/completions", "tokenizer": settings["folder"],
        "tokenizer_backend": "huggingface", "tokenized_requests": True, "add_bos_token": settings["bos"],
        "num_concurrent": 8, "max_length": settings["context"],
    },
    tasks=[task], limit=settings["items"], log_samples=True, bootstrap_iters=0,
)
samples = sorted(found["samples"]["lambada_local"], key=lambda each: each["doc_id"])
figures = found["results"]["lambada_local"]
print("FOUND", json.dumps({
    "ppl": figures["perplexity,none"], "accuracy": figures["acc,none"],
    "scores": [each["filtered_resps"][0] for each in samples], "texts": [each["doc"]["text"] for each in samples],
    "sent": sent,
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", type=Path, required=True, help="LAMBADA as .jsonl, a text a line")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--items", type=int, help="the first so many; default: all")
    parser.add_argument("--peer", default=".venv-lmeval/bin/python", help="a Python that has lm-eval")
    args = parser.parse_args()
    folder = hub.resolve(args.model)
    tokenizer = Tokenizer.load(folder)
    decoder = hf.load(folder, hf.compute_dtype("float32"), lambda done, total: None)
    context = decoder.config.context

    began = time.monotonic()
    ours = tasks.evaluate_task(args.model, "lambada", args.task, limit=args.items)
    middle = time.monotonic()
    theirs = harness(args, folder, tokenizer, context)
    print(f"attar eval: {middle - began:.0f} s, the harness over HTTP: {time.monotonic() - middle:.0f} s")

    items = tasks.lambada(args.task)[: args.items]
    same = [splits(tokenizer, item, context) for item in items]
    sent = [harness_split(tokenizer, item) for item in items]
    unsent = {tuple(each) for each in theirs["sent"]} ^ {each.ids for each in sent}
    again = [each for item in sent for each in score(decoder, item)]
    rows = {
        "attar eval": (ours.figures["ppl"].value, ours.figures["accuracy"].value),
        "lm-eval": (theirs["ppl"], theirs["accuracy"]),
        "attar, the tokens of lm-eval": (
            math.exp(-sum(each.log_likelihood for each in again) / len(again)),
            sum(each.greedy for each in again) / len(again),
        ),
    }
    print(f"\n{'':<30}{'perplexity':>14}{'accuracy':>12}")
    for name, (ppl, accuracy) in rows.items():
        print(f"{name:<30}{ppl:>14.6g}{accuracy:>12.4%}")
    gaps = [abs(each.log_likelihood - seen[0]) for each, seen in zip(again, theirs["scores"], strict=True)]
    greedy = sum(each.greedy != seen[1] for each, seen in zip(again, theirs["scores"], strict=True))
    own = [
        abs(each.log_likelihood - seen[0])
        for each, seen, alike in zip(ours.scores, theirs["scores"], same, strict=True)
        if alike
    ]
    print(f"\n{len(items)} items; {len(unsent)} prompts that only one side knows; largest difference of an item, same")
    print(f"tokens: {max(gaps):.1e} nats; greedy on one side only: {greedy}")
    print(f"{sum(same)} items whose target both rules cut alike: largest difference {max(own, default=0.0):.1e} nats")
    held = not unsent and max(gaps) < CLOSE and not greedy and max(own, default=0.0) < CLOSE
    if all(same):
        held = held and close(rows["attar eval"], rows["lm-eval"])
    print("the bar is met" if held else "the bar is MISSED")
    print(json.dumps({
        "items": len(items), "alike": sum(same), "held": held, "worst": max(gaps), "greedy_differs": greedy,
        **{name: {"ppl": ppl, "accuracy": accuracy} for name, (ppl, accuracy) in rows.items()},
    }))  # fmt: skip


def close(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Equal to four digits, and the same number of greedy items."""
    return math.isclose(a[0], b[0], rel_tol=1e-4) and math.isclose(a[1], b[1], abs_tol=1e-9)


def harness(args: argparse.Namespace, folder: Path, tokenizer: Tokenizer, context: int) -> dict[str, Any]:
    """What lm-eval finds, asking a server that is started for it."""
    command = [sys.executable, "-m", "attar", "serve", args.model, "--port", "0", "--json"]
    with tempfile.TemporaryDirectory() as cache, _started(command) as server:
        as_it_stands(folder, Path(cache))
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            await_ready(url)
            with urllib.request.urlopen(url + "/v1/models") as answer:
                name = json.load(answer)["data"][0]["id"]
            settings = {
                "file": str(args.task.resolve()), "model": name, "url": url, "folder": cache, "items": args.items,
                "bos": tokenizer.added_bos is not None, "context": context,
            }  # fmt: skip
            environment = os.environ | {
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_CACHE": f"{cache}/datasets",
                "TQDM_DISABLE": "1",
            }
            done = subprocess.run(
                [args.peer, "-c", HARNESS, json.dumps(settings)], env=environment, capture_output=True, text=True
            )
        finally:
            server.terminate()
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.partition("FOUND ")[2])
    return found


def as_it_stands(folder: Path, place: Path) -> None:
    """The tokenizer of a model, under the name of the class that takes `tokenizer.json` at its word."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (place / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (place / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "PreTrainedTokenizerFast"}))


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def harness_split(tokenizer: Tokenizer, item: tasks.Item) -> Encoded:
    """The tokens that lm-eval sends: the context's, and behind them those of the whole past as many."""
    alone, whole = tokenizer.encode(item.context), tokenizer.encode(item.context + item.target)
    rest = whole[len(alone) :]
    return Encoded((*alone, *rest), len(rest))


def splits(tokenizer: Tokenizer, item: tasks.Item, context: int) -> bool:
    """Whether both rules give the same tokens."""
    return tasks.encode(tokenizer, item, context) == harness_split(tokenizer, item)


def score(decoder: Any, item: Encoded) -> list[Score]:
    """One item's score; lm-eval counts a target without tokens as certain."""
    return tasks.score(decoder, [item]) if item.targets else [Score(0.0, 0, True)]


if __name__ == "__main__":
    main()
