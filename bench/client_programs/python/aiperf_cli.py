"""The command line `aiperf`: four requests by each kind of endpoint.

It makes prompts with the tokenizer of the embedded model: its built-in one is downloaded.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from checks import At, command, run

TOKENIZER = Path(__file__).parents[3] / "src" / "attar" / "data" / "demo"


def measured(at: At, kind: str, *more: str) -> None:
    """Run a profile; its report has four requests without an error."""
    os.environ.pop("HF_HUB_OFFLINE", None)  # with it, a tokenizer's path is taken for the name of a repository
    out = Path(f"out-{kind}")
    command(
        "aiperf", "profile", "--model", at.model, "--url", at.url, "--endpoint-type", kind,
        "--tokenizer", str(TOKENIZER), "--request-count", "4", "--concurrency", "2",
        "--synthetic-input-tokens-mean", "20", "--output-artifact-dir", str(out), "--ui", "none", *more,
    )  # fmt: skip
    found = json.loads((next(out.rglob("profile_export_aiperf.json"))).read_text())
    assert found["request_count"]["avg"] == 4, found
    assert not found.get("error_summary"), found["error_summary"]


def chat(at: At) -> None:
    measured(at, "chat", "--streaming", "--output-tokens-mean", "8")


def completions(at: At) -> None:
    measured(at, "completions", "--streaming", "--output-tokens-mean", "8")


def responses(at: At) -> None:
    measured(at, "responses", "--streaming", "--output-tokens-mean", "8")


def embeddings(at: At) -> None:
    measured(at, "embeddings")


if __name__ == "__main__":
    run("aiperf", chat, completions, responses, embeddings)
