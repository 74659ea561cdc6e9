"""Speed of speculative decoding at a chosen acceptance: a replay of known texts, drafts on and off by turns.

    python bench/speculation.py MODEL [--right 0.8] [--drafts 3] [--batch 1] [--prompt 64] [--tokens 128] [--rounds 5]

MODEL may have random weights: its own text is drafted, and the share RIGHT of its tokens is right. It says how much the
kernels gain at that acceptance, not how much a drafter would. --drafts auto takes as many as pay. Printed are tokens a
second and processor seconds without drafts and with, in one run, with the tokens of a step and c(r).

    python bench/speculation.py MODEL --trees [--right 0.5] [--second 0.3] [--head HEAD] [--text FILE] [...]

prints a table of chains beside trees of 4, 8 and 16 nodes. In a replay the first candidate of a place is right with the
chance RIGHT, and each further one, where those before it are wrong, with the chance SECOND. With --head the drafts are
those of a head, at --temperature, behind prompts of a text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from attar.engine.config import EngineConfig
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.engine.speculation import drafter
from attar.evaluation import row_costs
from attar.protocol.messages import Delta, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.speculation import MAX_DRAFT_TOKENS, MAX_STEP_DRAFTS
from attar.sampling.drafters.branching import Node, static_tree
from attar.sampling.drafters.drafter import Draft, Drafter, DraftRequest
from attar.sampling.drafters.replay import ReplayDrafter
from attar.scheduling.sequence import Sequence as Tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--right", type=float, default=0.8)
    parser.add_argument("--trees", action="store_true", help="a table of chains and trees")
    parser.add_argument("--second", type=float, default=0.3)
    parser.add_argument("--head", help="a head of Medusa or EAGLE, instead of a replay")
    parser.add_argument("--text", type=Path, help="prompts of --head")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafts", default="3", help=f"auto, or 1 to {MAX_DRAFT_TOKENS}")
    for name, default in (("batch", 1), ("prompt", 64), ("tokens", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if args.trees:
        trees(args)
        return
    llm = LLM(args.model, verify=False)
    texts: dict[tuple[int, ...], list[int]] = {}
    length = args.prompt + args.tokens
    config = EngineConfig(
        args.batch * -(-length // 32) + args.batch, length, SchedulerConfig(max_drafts=MAX_STEP_DRAFTS),
        drafter=ReplayDrafter(texts, args.right), draft_tokens=None if args.drafts == "auto" else int(args.drafts),
    )  # fmt: skip
    engine = Engine(llm.decoder, None, config)
    draw = random.Random(0)
    prompts = [
        tuple(draw.randrange(llm.decoder.config.vocab_size) for _ in range(args.prompt)) for _ in range(args.batch)
    ]

    def run(drafts: int | None) -> tuple[float, float]:
        """Return seconds and processor seconds of the decode steps."""
        params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True, draft_tokens=drafts)
        for number, prompt in enumerate(prompts):
            engine.submit(Submit(f"{number}", prompt, params))
        said: dict[str, list[int]] = {}
        since = time.perf_counter(), time.process_time()
        while not engine.idle:
            for event in engine.step():
                if isinstance(event, Delta):
                    if len(said) < len(prompts):  # the prompts are read
                        since = time.perf_counter(), time.process_time()
                    said.setdefault(event.id, []).extend(event.token_ids)
        texts.update({prompt: said[f"{number}"] for number, prompt in enumerate(prompts)})
        return time.perf_counter() - since[0], time.process_time() - since[1]

    run(0)
    run(None)  # records its steps
    assert engine.speculation is not None
    before = engine.speculation.gains.steps, engine.speculation.accepted
    rounds = [(run(0), run(None)) for _ in range(args.rounds)]
    steps, accepted = engine.speculation.gains.steps - before[0], engine.speculation.accepted - before[1]
    steps -= args.rounds * args.batch * (args.tokens - 1)  # of the runs without drafts
    rates = [[args.batch * args.tokens / each[side][0] for each in rounds] for side in (0, 1)]
    gains = sorted(off[0] / on[0] for off, on in rounds)
    numbers = (1, 2, 3, 4, 6, 8)
    cost = row_costs.measure(llm.decoder, llm.decoder.lossless, args.prompt, numbers)
    print(
        f"replay at {args.right:g}, {args.drafts} drafts, batch {args.batch}: {1 + accepted / steps:.2f} tokens a step"
    )
    print(f"tokens/s without {statistics.median(rates[0]):.1f}, with {statistics.median(rates[1]):.1f}")
    print(f"ratio {statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f})")
    print(f"processor seconds {sum(off[1] for off, _ in rounds):.2f}, {sum(on[1] for _, on in rounds):.2f}")
    print(
        "c(r) "
        + ", ".join(f"{rows}: {each / cost[0]:.2f}" for rows, each in zip((1, 2, 3, 4, 6, 8), cost, strict=True))
    )


class TreeReplay:
    """A drafter of known texts in chains or static trees, whose candidates are right with given chances."""

    name, costly = "replay of trees", False

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], right: float, second: float, tree: bool) -> None:
        self.texts, self.right, self.second, self.tree = texts, right, second, tree

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft(request.sequence, request.limit) for request in requests]

    def _draft(self, sequence: Tokens, limit: int) -> Draft:
        text = self.texts.get(tuple(sequence.tokens[: sequence.prompt]), ())
        shape = static_tree(limit, limit) if self.tree else [Node(i, i, 0) for i in range(limit)]
        tokens: list[int] = []
        for node in shape:
            at = sequence.output + node.depth
            token = text[at] if at < len(text) else 0
            tokens.append(token if node.rank == self._rank(at) else token ^ (1 + node.rank))
        return Draft(tuple(tokens), 1, parents=tuple(node.parent for node in shape) if self.tree else ())

    def _rank(self, at: int) -> int:
        """Return the rank of the right candidate at a place of a text."""
        draw = random.Random(at)
        if draw.random() < self.right:
            return 0
        return next((rank for rank in range(1, MAX_DRAFT_TOKENS) if draw.random() < self.second), -1)

    def forget(self, sequence: Tokens) -> None:
        """Nothing is kept."""

    def reset(self) -> None:
        """Nothing is kept."""


def trees(args: argparse.Namespace) -> None:
    """Print the table of chains and trees: tokens a step, milliseconds a step, and speed over none, in rounds by
    turns."""
    llm = LLM(args.model, verify=False)
    texts: dict[tuple[int, ...], list[int]] = {}
    length = args.prompt + args.tokens
    prompts = _prompts(llm, args)
    kinds = [("none", 0), *(("chain", n) for n in (1, 2, 3, 4, 8)), *(("tree", n) for n in (4, 8, 16))]
    engines = {}
    for kind, count in kinds:
        tree = kind == "tree"
        drafts: Drafter | None
        if args.head is None:
            drafts = TreeReplay(texts, args.right, args.second, tree)
        else:
            drafts = drafter(args.head, llm.model, length, args.batch, activations="int8g128", verify=False, trees=tree)
        config = EngineConfig(
            args.batch * (-(-length // 32) + 1) + 2 * MAX_STEP_DRAFTS, length,
            SchedulerConfig(max_drafts=MAX_STEP_DRAFTS, headroom=0.0), drafter=drafts,
            draft_tokens=None if tree else count, draft_tree=count if tree else None,
        )  # fmt: skip
        engines[kind, count] = Engine(llm.decoder, None, config)

    def run(engine: Engine) -> tuple[float, int]:
        """Return seconds and steps behind the prompts."""
        params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=1, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.submit(Submit(f"{number}", prompt, params))
        said: dict[str, list[int]] = {}
        since, before = time.perf_counter(), engine.steps
        while not engine.idle:
            for event in engine.step():
                if isinstance(event, Delta):
                    if len(said) < len(prompts):  # the prompts are read
                        since, before = time.perf_counter(), engine.steps
                    said.setdefault(event.id, []).extend(event.token_ids)
        found = {prompt: said[f"{number}"] for number, prompt in enumerate(prompts)}
        assert texts in ({}, found), "drafts have changed a text"
        texts.update(found)
        return time.perf_counter() - since, engine.steps - before

    for engine in engines.values():
        run(engine)
    rounds = [{key: run(engine) for key, engine in engines.items()} for _ in range(args.rounds)]
    source = f"replay, {args.right:g} and {args.second:g}" if args.head is None else f"head {Path(args.head).name}"
    print(f"{source}; temperature {args.temperature:g}, batch {args.batch}, {args.rounds} rounds")
    print("| drafts | tokens a step | ms a step | times as fast (least to most) |")
    print("|---|---|---|---|")
    for kind, count in kinds:
        own = [each[kind, count] for each in rounds]
        gains = sorted(each["none", 0][0] / each[kind, count][0] for each in rounds)
        steps, seconds = own[0][1], statistics.median(seconds for seconds, _ in own)
        print(
            f"| {kind if kind == 'none' else f'{kind} of {count}'} | {(args.tokens - 1) / steps:.2f} "
            f"| {1000 * seconds / steps:.2f} | {statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f}) |"
        )


def _prompts(llm: LLM, args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Return prompts of a text, or random ones."""
    if args.text is None:
        draw = random.Random(0)
        return [
            tuple(draw.randrange(llm.decoder.config.vocab_size) for _ in range(args.prompt)) for _ in range(args.batch)
        ]
    ids = llm.tokenizer.encode(args.text.read_text()[: 40 * args.prompt * args.batch], add_special_tokens=False)
    return [tuple(ids[at * args.prompt : (at + 1) * args.prompt]) for at in range(args.batch)]


if __name__ == "__main__":
    main()
