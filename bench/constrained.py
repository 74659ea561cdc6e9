"""What a constraint costs and what forced tokens bring: JSON extraction by schema with a real model.

    python bench/constrained.py MODEL [--texts N] [--tokens N] [--threads N]

The same prompts are answered four ways in turn: free, constrained, constrained with the tokens that the schema forces
as drafts, and with these trusted, whatever the model draws in their place. Times are processor seconds of decoding, so
that other programs disturb them less, and ratios are medians over the prompts. The share of masks is that of masks,
forced bytes and consumed tokens in a constrained step. Every constrained answer that ends is checked against the
schema, and the two without trust with each other. The output ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import torch

from attar import LLM, SamplingParams
from attar.kernels import ops
from attar.protocol.request import Completion
from attar.sampling.masks import GrammarMask

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 60},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
        "occupation": {"type": "string", "maxLength": 60},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 60},
                "city": {"type": "string", "maxLength": 40},
                "country": {"type": "string", "maxLength": 40},
            },
            "required": ["street", "city", "country"],
            "additionalProperties": False,
        },
        "email_address": {"type": "string", "maxLength": 60},
        "membership_status": {"enum": ["active", "suspended", "cancelled"]},
    },
    "required": ["full_name", "age_in_years", "occupation", "address", "email_address", "membership_status"],
    "additionalProperties": False,
}
FIRST = ("Anna", "Bela", "Chen", "Dora", "Emil", "Fatima", "Georg", "Hana", "Ivo", "Jun")
LAST = ("Petrov", "Okafor", "Lindqvist", "Moreau", "Tanaka", "Weiss", "Silva", "Novak", "Haddad", "Byrne")
WORK = ("carpenter", "nurse", "translator", "baker", "marine biologist", "bus driver", "violin maker", "teacher")
PLACES = (("Lyon", "France"), ("Graz", "Austria"), ("Porto", "Portugal"), ("Osaka", "Japan"), ("Cork", "Ireland"))


def prompts(count: int) -> list[str]:
    """Texts about people, and the request to extract a record of each."""
    draw, made = random.Random(0), []
    for _ in range(count):
        first, last, (city, country) = draw.choice(FIRST), draw.choice(LAST), draw.choice(PLACES)
        street = f"{draw.choice(['Mill', 'Station', 'Harbour', 'Church'])} Street {draw.randrange(1, 90)}"
        text = (
            f"{first} {last}, who turned {draw.randrange(20, 80)} this spring, is a {draw.choice(WORK)}. The home "
            f"is at {street} in {city}, {country}. Write to {first.lower()}.{last.lower()}@example.org. The membership "
            f"is {draw.choice(['active', 'suspended', 'cancelled'])}."
        )
        keys = ", ".join(SCHEMA["required"])
        made.append(f"Extract the record of the person as JSON with the keys {keys}.\n\n{text}")
    return made


class Meter:
    """Processor seconds of some functions of this process, while it is on."""

    def __init__(self) -> None:
        self.seconds, self.on = 0.0, False

    def watch(self, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            since = time.thread_time()
            try:
                return real(*given, **named)
            finally:
                self.seconds += (time.thread_time() - since) * self.on

        setattr(owner, name, timed)


def answer(llm: LLM, prompt: str, params: SamplingParams, constraint: Any) -> tuple[Completion, float]:
    """An answer, and the processor seconds of each token but the first."""
    stream = llm.stream_chat([{"role": "user", "content": prompt}], params, constraint=constraint)
    since = None
    while True:
        try:
            next(stream)
        except StopIteration as end:
            assert since is not None
            return end.value, (time.process_time() - since) / max(1, len(end.value.token_ids) - 1)
        since = since or time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    llm, meter = LLM(args.model), Meter()
    for name in ("allowed", "consume", "forced"):
        meter.watch(GrammarMask, name)
    meter.watch(ops, "mask")
    plain = SamplingParams(max_tokens=args.tokens, temperature=0, seed=0, draft_tokens=0)
    forcing = SamplingParams(max_tokens=args.tokens, temperature=0, seed=0)
    answer(llm, "Hello", SamplingParams(max_tokens=4, temperature=0, seed=0), SCHEMA)  # what is made once
    reasons, masked, forced, without, tokens, saved = Counter[str](), 0.0, 0.0, 0.0, 0, 0
    slower, faster, trusting = [], [], []
    overruled, trusted, other = 0, 0, 0  # trusted tokens that were not drawn, all of them, and answers that differ
    for prompt in prompts(args.texts):
        meter.on = False
        _, alone = answer(llm, prompt, plain, None)
        meter.on, meter.seconds = True, 0.0
        one, each = answer(llm, prompt, plain, SCHEMA)
        without += each * len(one.token_ids)
        masked += meter.seconds
        assert llm.running.engine is not None
        before = llm.running.engine.stats().forced_tokens
        meter.on = False
        two, quick = answer(llm, prompt, forcing, SCHEMA)
        forced += quick * len(two.token_ids)
        saved += llm.running.engine.stats().forced_tokens - before
        assert one.token_ids == two.token_ids, "forced tokens changed an answer"
        stats = llm.running.engine.stats()
        three, quickest = answer(llm, prompt, replace(forcing, trust_forced=True), SCHEMA)
        trusted += llm.running.engine.stats().forced_tokens - stats.forced_tokens
        overruled += llm.running.engine.stats().overruled_tokens - stats.overruled_tokens
        other += three.text != two.text
        trusting.append(alone / quickest)
        if three.finish_reason == "stop":
            jsonschema.validate(json.loads(three.text), SCHEMA)
        tokens += len(one.token_ids)
        reasons[one.finish_reason] += 1
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), SCHEMA)
        slower.append(alone / each)
        faster.append(alone / quick)
        print(f"{len(one.token_ids)} tokens, over free {alone / each:.3f}, with forced {alone / quick:.3f}", flush=True)
    print(f"{args.model}: {args.texts} texts, {tokens} tokens, ends {dict(reasons)}, each `stop` is valid")
    ratios = statistics.median(slower), statistics.median(faster)
    print(f"tokens/s over free: constrained {ratios[0]:.3f}, with forced {ratios[1]:.3f}")
    print(f"with forced over without: {without / forced:.3f}; steps saved {saved / tokens:.1%}")
    difference = f"{overruled} of {trusted} forced tokens were not drawn; {other} of {args.texts} answers differ"
    print(f"trusted: {statistics.median(trusting):.3f} over free; {difference}")
    print(f"masks: {masked / without:.2%} of a constrained step, {masked / tokens * 1e6:.0f} us a token")
    told = {
        "texts": args.texts, "tokens": tokens, "ends": dict(reasons), "constrained_over_free": round(ratios[0], 3),
        "forced_over_free": round(ratios[1], 3), "forced_over_constrained": round(without / forced, 3),
        "steps_saved": round(saved / tokens, 3), "trusted_over_free": round(statistics.median(trusting), 3),
        "overruled": overruled, "trusted": trusted, "mask_share": round(masked / without, 4),
    }  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main()
