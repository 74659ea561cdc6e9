"""Speed of speculative decoding at a chosen acceptance: a replay of known texts, drafts on and off by turns.

    python bench/speculation.py MODEL [--right 0.8] [--drafts 3] [--batch 1] [--prompt 64] [--tokens 128] [--rounds 5]

MODEL may have random weights: its own text is drafted, and the share RIGHT of its tokens is right. It says how much the
kernels gain at that acceptance, not how much a drafter would. --drafts auto takes as many as pay. Printed are tokens a
second and processor seconds without drafts and with, in one run, with the tokens of a step and c(r).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from attar.engine.engine import Engine, EngineConfig
from attar.engine.llm.llm import LLM
from attar.evaluation import row_costs
from attar.protocol.messages import Delta, Submit
from attar.protocol.request import SamplingParams
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.speculation import MAX_DRAFT_TOKENS, MAX_STEP_DRAFTS
from attar.sampling.drafters.replay import ReplayDrafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--right", type=float, default=0.8)
    parser.add_argument("--drafts", default="3", help=f"auto, or 1 to {MAX_DRAFT_TOKENS}")
    for name, default in (("batch", 1), ("prompt", 64), ("tokens", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
