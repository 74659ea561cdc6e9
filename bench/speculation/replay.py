"""Speed of speculative decoding at a chosen acceptance: a replay of known texts, drafts on and off by turns.

    PYTHONPATH=bench python -m speculation.replay MODEL [--right 0.8] [--drafts 3] [--batch 1] [--prompt 64]
        [--tokens 128] [--rounds 5]

MODEL may have random weights: its own text is drafted, and the share RIGHT of its tokens is right. It says how much the
kernels gain at that acceptance, not how much a drafter would. --drafts auto takes as many as pay. Printed are tokens a
second and processor seconds without drafts and with, in one run, with the tokens of a step and c(r).

    PYTHONPATH=bench python -m speculation.replay MODEL --trees [--right 0.5] [--second 0.3] [--head HEAD] [--text FILE]
        [...]

prints a table of chains beside trees of 4, 8 and 16 nodes. In a replay the first candidate of a place is right with the
chance RIGHT, and each further one, where those before it are wrong, with the chance SECOND. With --head the drafts are
those of a head, at --temperature, behind prompts of a text.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.engine.speculation import drafter
from attar.evaluation import row_costs
from attar.protocol.request import SamplingParams
from attar.protocol.speculation import MAX_DRAFT_TOKENS
from attar.sampling.drafters.branching import Node, static_tree
from attar.sampling.drafters.drafter import Draft, Drafter, DraftRequest
from attar.sampling.drafters.replay import ReplayDrafter
from attar.scheduling.sequence import Sequence as Tokens
from speculation.runs import Prompt, Run, answer, engine

ROWS = (1, 2, 3, 4, 6, 8)  # whose costs are measured
SHAPES = (("chain", 1), ("chain", 2), ("chain", 3), ("chain", 4), ("chain", 8), ("tree", 4), ("tree", 8), ("tree", 16))


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
    replay = Replay(args)
    (trees if args.trees else chains)(args, replay)


class Replay:
    """A model with prompts, and its texts behind them once they are known."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.llm, self.context = LLM(args.model, verify=False), args.prompt + args.tokens
        self.prompts = _prompts(self.llm, args)
        self.texts: dict[Prompt, list[int]] = {}
        self._params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=1, ignore_eos=True)

    def run(self, engine: Engine) -> Run:
        """Answer all prompts. Raises RuntimeError where a text is not the one that is known."""
        run, said = answer(engine, [(prompt, self._params) for prompt in self.prompts])
        found = dict(zip(self.prompts, said, strict=True))
        if self.texts not in ({}, found):
            raise RuntimeError("drafts have changed a text")
        self.texts.update(found)
        return run


def chains(args: argparse.Namespace, replay: Replay) -> None:
    """Print what a replay gains, in rounds by turns."""
    llm, batch, count = replay.llm, args.batch, None if args.drafts == "auto" else int(args.drafts)
    drafts = ReplayDrafter(replay.texts, args.right)
    off, on = (engine(llm, batch, each, count, context=replay.context) for each in (None, drafts))
    for each in (off, on):
        replay.run(each)  # records its steps; the first makes the texts
    rounds = [(replay.run(off), replay.run(on)) for _ in range(args.rounds)]
    without, with_drafts = zip(*rounds, strict=True)
    whole = sum(with_drafts, Run())
    gains = sorted(a.seconds / b.seconds for a, b in rounds)
    rates = [statistics.median(each.tokens / each.seconds for each in side) for side in (without, with_drafts)]
    costs = row_costs.measure(llm.decoder, llm.decoder.lossless, args.prompt, ROWS)
    a_pass = whole.tokens / whole.passes
    print(f"replay at {args.right:g}, {args.drafts} drafts, batch {batch}: {a_pass:.2f} tokens a pass")
    print(f"tokens/s without {rates[0]:.1f}, with {rates[1]:.1f}")
    print(f"ratio {statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f})")
    print(f"processor seconds {sum(each.processor for each in without):.2f}, {whole.processor:.2f}")
    print("c(r) " + ", ".join(f"{rows}: {cost / costs[0]:.2f}" for rows, cost in zip(ROWS, costs, strict=True)))


def trees(args: argparse.Namespace, replay: Replay) -> None:
    """Print the table of chains and trees: tokens a step, milliseconds a step, and speed over none, in rounds by
    turns."""
    engines = {("none", 0): engine(replay.llm, args.batch, None, context=replay.context)}
    for kind, count in SHAPES:
        tree, drafts = kind == "tree", _drafter(args, replay, kind == "tree")
        engines[kind, count] = engine(
            replay.llm, args.batch, drafts, None if tree else count, draft_tree=count if tree else None,
            context=replay.context,
        )  # fmt: skip
    for each in engines.values():
        replay.run(each)
    rounds = [{key: replay.run(each) for key, each in engines.items()} for _ in range(args.rounds)]
    source = f"replay, {args.right:g} and {args.second:g}" if args.head is None else f"head {Path(args.head).name}"
    print(f"{source}; temperature {args.temperature:g}, batch {args.batch}, {args.rounds} rounds")
    print("| drafts | tokens a step | ms a step | times as fast (least to most) |")
    print("|---|---|---|---|")
    for kind, count in engines:
        own = [each[kind, count] for each in rounds]
        gains = sorted(each["none", 0].seconds / each[kind, count].seconds for each in rounds)
        steps, seconds = own[0].steps, statistics.median(run.seconds for run in own)
        print(
            f"| {kind if kind == 'none' else f'{kind} of {count}'} | {(args.tokens - 1) / steps:.2f} "
            f"| {1000 * seconds / steps:.2f} | {statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f}) |"
        )


def _drafter(args: argparse.Namespace, replay: Replay, tree: bool) -> Drafter:
    if args.head is None:
        return TreeReplay(replay.texts, args.right, args.second, tree)
    model, context = replay.llm.model, replay.context
    made = drafter(args.head, model, context, args.batch, activations="int8g128", verify=False, trees=tree)
    assert made is not None
    return made


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


def _prompts(llm: LLM, args: argparse.Namespace) -> list[Prompt]:
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
