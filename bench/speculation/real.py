"""What drafts gain on a real model and real texts: on and off by turns, in one run, and equal texts.

    PYTHONPATH=bench python -m speculation.real MODEL --draft suffix|DRAFT|suffix,DRAFT [--kinds code edit chat]
        [--temperatures 0 0.8] [--top-p 0.95] [--prompts 8] [--tokens 96] [--batch 1] [--rounds 3] [--out FILE]
        [--llama-server PROGRAM [--llama-draft FILE]]

MODEL is a file or folder that attar reads. Prompts are those of `texts.py`, from ATTAR_TEST_DATA. Each
prompt, or batch of prompts, is answered without drafts and with, by two engines that share the weights; which comes
first changes from one to the next. Times are those behind the first token of each answer. A draft model's reading of a
prompt counts as drafting. Before each round the drafter forgets all texts, so that no answer is drafted from an earlier
one of the same prompt. --draft-tokens is `auto`, or always so many.

Printed are tokens a second by wall clock, the ratios of seconds and of processor seconds with their 95 % intervals
(bootstrap over pairs), right drafts by position, tokens a pass, D (seconds of drafting for each draft, over
a step of one row), the speed that c(r) and the passes allow, and the best fixed number of drafts by c(r), D and the
shares. The last line is a JSON object. Exit status 1 where a text differs.

With --llama-server, llama.cpp's server of the same file answers each prompt too, without drafts and with each of its
settings (`llama_server.py`). Its best setting for a kind of texts counts, none included.

With --out rounds are appended to a file, and what there is of the same setting is summed up: --rounds 0 prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.engine.speculation import drafter
from attar.evaluation import row_costs
from attar.sampling.drafters.drafter import Drafter
from speculation import texts
from speculation.llama_server import Peer, serving
from speculation.runs import CONTEXT, Ask, Prompt, Run, answer, asks, engine
from speculation.tables import ROWS, Pair, RowCosts, beside, summary, table

COST_PROMPT = 192  # tokens before the rows whose costs are measured
COST_ROUNDS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--draft-tokens", default="auto")
    parser.add_argument("--kinds", nargs="+", default=("code", "edit", "chat"), choices=texts.KINDS)
    parser.add_argument("--temperatures", nargs="+", type=float, default=(0.0, 0.8))
    parser.add_argument("--top-p", type=float, default=0.95, help="where the temperature is not 0")
    for name, default in (("prompts", 8), ("tokens", 96), ("batch", 1), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--llama-draft", help="its draft model, a GGUF file")
    args = parser.parse_args()
    kept = read(args) if args.out is not None and args.out.exists() else []
    rounds = []
    for each in measured(args) if args.rounds else ():
        rounds.append(each)
        if args.out is not None:  # at once: what was measured is kept where the run is broken off
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(setting(args) | each) + "\n")
    found = figures([*kept, *rounds], args.batch)
    print(table([(name, each) for name, each in found["texts"].items()]))
    if any("llama.cpp" in each for each in found["texts"].values()):
        print(beside([(name, each) for name, each in found["texts"].items()]))
    costs = zip(ROWS, found["row_costs"], strict=True)
    print("c(r): " + ", ".join(f"{rows}: {cost / found['row_costs'][0]:.2f}" for rows, cost in costs))
    print(json.dumps(found))
    return int(found["different"] > 0)


def setting(args: argparse.Namespace) -> dict[str, Any]:
    """What rounds of one table have in common."""
    same = ("draft", "draft_tokens", "top_p", "prompts", "tokens", "batch")
    return {"model": Path(args.model).name} | {name: getattr(args, name) for name in same}


def read(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds of the setting that were measured before."""
    lines = [json.loads(line) for line in args.out.read_text(encoding="utf-8").splitlines()]
    wanted = setting(args)
    return [each for each in lines if {name: each.get(name) for name in wanted} == wanted]


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the costs of rows, then each pair of each round."""
    llm = LLM(args.model, verify=False)
    yield costs_of(llm)
    drafts = drafter(args.draft, llm.model, CONTEXT, args.batch, activations="int8g128", verify=False)
    assert drafts is not None
    count = None if args.draft_tokens == "auto" else int(args.draft_tokens)
    off, on = engine(llm, args.batch, None), engine(llm, args.batch, drafts, count)
    prompts = {kind: texts.prompts(llm, kind, args.prompts + args.batch) for kind in args.kinds}
    with ExitStack() as stack:
        peers: list[Peer] = []
        if args.llama_server is not None:
            threads = torch.get_num_threads()
            peers = stack.enter_context(serving(args.llama_server, args.model, args.llama_draft, threads))
        yield from pairs(args, prompts, (off, on), drafts, peers)
    yield costs_of(llm)


def costs_of(llm: LLM) -> dict[str, Any]:
    """Seconds of a step by its rows, and the machine's load."""
    costs = row_costs.measure(llm.decoder, llm.decoder.lossless, COST_PROMPT, ROWS, COST_ROUNDS)
    return {"row_costs": costs, "load": os.getloadavg()[0]}


def pairs(
    args: argparse.Namespace,
    prompts: dict[str, list[Prompt]],
    engines: tuple[Engine, Engine],
    drafts: Drafter,
    peers: Sequence[Peer],
) -> Iterator[dict[str, Any]]:
    """Yield each pair of each round, behind a first answer of each kind that is not counted."""
    off, on = engines
    for kind in args.kinds:  # records steps, and shows what drafts cost
        for each in (off, on):
            answer(each, asks(prompts[kind][args.prompts :], args.tokens, args.temperatures[-1], args.top_p, 10_000))
    for turn in range(args.rounds):
        for kind in args.kinds:
            for temperature in args.temperatures:
                drafts.reset()
                for at in range(0, args.prompts, args.batch):
                    some = prompts[kind][at : min(at + args.batch, args.prompts)]
                    asked = asks(some, args.tokens, temperature, args.top_p, at)
                    first = (turn + at // args.batch) % 2
                    found = dict(answers(off, on, asked, first))
                    (without, said), (with_drafts, drafted) = found["off"], found["on"]
                    theirs = {peer.name: peer.answer(*asked[0]).to_dict() for peer in peers}
                    yield {
                        "kind": kind, "temperature": temperature, "at": at, "off": without.to_dict(),
                        "on": with_drafts.to_dict(), "same": said == drafted,
                        "llama.cpp": theirs,
                    }  # fmt: skip
                progress(f"round {turn + 1}, {kind} at {temperature:g}")


def answers(
    off: Engine, on: Engine, asked: Sequence[Ask], first: int
) -> Iterator[tuple[str, tuple[Run, list[list[int]]]]]:
    """Yield both engines' answers, the engine with drafts first where `first` is 1."""
    order = (("off", off), ("on", on))
    for name, each in order[::-1] if first else order:
        yield name, answer(each, asked)


def figures(lines: Sequence[dict[str, Any]], batch: int) -> dict[str, Any]:
    """The figures of all rounds, by kind and temperature."""
    measured = [each["row_costs"] for each in lines if "row_costs" in each]
    costs = RowCosts(min(measured, key=lambda own: own[0]))  # the quietest
    pairs: dict[str, list[Pair]] = {}
    for each in lines:
        if "kind" in each:
            name = f"{each['kind']}, T {each['temperature']:g}"
            theirs = {setting: Run(**run) for setting, run in each.get("llama.cpp", {}).items()}
            pairs.setdefault(name, []).append(Pair(Run(**each["off"]), Run(**each["on"]), theirs))
    return {
        "texts": {name: summary(each, costs, batch) for name, each in pairs.items()},
        "row_costs": costs.seconds,
        "different": sum(not each["same"] for each in lines if "kind" in each),
    }


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
