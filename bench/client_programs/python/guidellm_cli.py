"""The command line `guidellm`: a benchmark of three requests by each of its routes."""

from __future__ import annotations

import json
from pathlib import Path

from checks import At, command, run


def measured(at: At, route: str, *more: str, stream: bool = True) -> None:
    """Run a benchmark; its report has three requests without an error."""
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": "Tell story {each}."}}\n' for each in range(3)))
    out = Path(route.replace("/", "-") + f"-{stream}.json")
    backend = {"kind": "openai_http", "target": at.url, "request_format": route, "stream": stream, "model": at.model}
    command(
        "guidellm", "run", "--backend", json.dumps(backend), "--profile", "kind=synchronous",
        "--constraint", "kind=max_requests,count=3", "--data", "kind=json_file,path=prompts.jsonl",
        "--output", f"kind=json,path={out}", "--disable-console", *more,
    )  # fmt: skip
    totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (3, 0), totals


def chat(at: At) -> None:
    measured(at, "/v1/chat/completions")


def whole(at: At) -> None:
    measured(at, "/v1/chat/completions", stream=False)


def completions(at: At) -> None:
    measured(at, "/v1/completions")


def responses(at: At) -> None:
    measured(at, "/v1/responses")


def embeddings(at: At) -> None:
    measured(at, "/v1/embeddings", stream=False)


if __name__ == "__main__":
    run("guidellm", chat, whole, completions, responses, embeddings)
