"""lm-eval's models of an OpenAI-compatible server, with tasks of its own format over local data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from checks import At, command, run

COMMON = "dataset_path: json\ndataset_kwargs: {data_files: {test: DATA}}\ntest_split: test\n"
TASKS = {
    "choice": "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_target: 0\n"
    "doc_to_choice: [' Paris', ' Oslo']\nmetric_list: [{metric: acc}]\n",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n",
    "written": "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: 'Paris'\n"
    "generation_kwargs: {until: ['\\n'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n",
}


def measured(at: At, task: str, kind: str, route: str, settings: str, *more: str) -> dict[str, Any]:
    """Run one task; return its results."""
    data, tasks, out = Path("data.jsonl"), Path("tasks"), Path(f"out-{task}-{kind}")
    data.write_text('{"text": "The capital of France is"}\n{"text": "The capital of Norway is"}\n')
    tasks.mkdir(exist_ok=True)
    for name, body in TASKS.items():
        (tasks / f"{name}.yaml").write_text(f"task: {name}\n" + COMMON.replace("DATA", str(data.resolve())) + body)
    command(
        "lm_eval", "--model", kind, "--model_args", f"model={at.model},base_url={at.v1}/{route},{settings}", "--tasks",
        task, "--include_path", str(tasks), "--output_path", str(out), "--limit", "2", *more,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(next(out.rglob("results*.json")).read_text())["results"][task]
    return found


def completions(at: At, task: str, settings: str = "tokenizer_backend=remote") -> dict[str, Any]:
    return measured(at, task, "local-completions", "completions", settings)


def loglikelihood(at: At) -> None:
    """The server tokenizes: `/tokenizer_info` and `/tokenize`."""
    assert completions(at, "choice")["acc,none"] in {0.0, 0.5, 1.0}


def rolling(at: At) -> None:
    assert math.isfinite(completions(at, "rolling")["word_perplexity,none"])


def generation(at: At) -> None:
    assert "exact_match,none" in completions(at, "written")


def texts(at: At) -> None:
    assert "exact_match,none" in completions(at, "written", "tokenizer_backend=None,tokenized_requests=False")


def chat(at: At) -> None:
    route = ("local-chat-completions", "chat/completions", "num_concurrent=2")
    assert "exact_match,none" in measured(at, "written", *route, "--apply_chat_template")


if __name__ == "__main__":
    run("lm_eval", loglikelihood, rolling, generation, texts, chat)
