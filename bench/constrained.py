"""What a constraint costs and what forced tokens bring: JSON extraction by schema with a real model.

    python bench/constrained.py MODEL [--texts N] [--tokens N] [--threads N] [--valid-only] [--answers FILE]

The same prompts are answered four ways in turn: free, constrained, constrained with the tokens that the schema forces
as drafts, and with these trusted, whatever the model draws in their place. Times are processor seconds of decoding, so
that other programs disturb them less, and ratios are medians over the prompts. The share of masks is that of masks,
forced bytes and consumed tokens in a constrained step. Every constrained answer that ends is checked against the
schema, and the two without trust with each other. `--valid-only` answers with forced tokens alone: that is enough to
check answers, on a machine that is busy as well. The output ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import torch

from attar import LLM, SamplingParams
from attar.kernels import ops
from attar.protocol.messages import Stats
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


class Asker:
    """Answers one prompt in four ways, or constrained with forced tokens alone, as a row of figures."""

    def __init__(self, model: str, tokens: int, valid_only: bool) -> None:
        self.llm, self.meter, self.valid_only = LLM(model), Meter(), valid_only
        for name in ("allowed", "consume", "forced"):
            self.meter.watch(GrammarMask, name)
        self.meter.watch(ops, "mask")
        self.forcing = SamplingParams(max_tokens=tokens, temperature=0, seed=0)
        answer(self.llm, "Hello", replace(self.forcing, max_tokens=4), SCHEMA)  # what is made once

    def row(self, prompt: str) -> dict[str, Any]:
        """The figures of a prompt. Seconds are those of a token."""
        before = self.stats()
        forced, quick = answer(self.llm, prompt, self.forcing, SCHEMA)
        check(forced)
        row = {
            "prompt": prompt, "text": forced.text, "end": forced.finish_reason, "tokens": len(forced.token_ids),
            "forced": quick, "saved": self.stats().forced_tokens - before.forced_tokens,
        }  # fmt: skip
        if self.valid_only:
            return row
        plain = replace(self.forcing, draft_tokens=0)
        _, row["free"] = answer(self.llm, prompt, plain, None)
        self.meter.on, self.meter.seconds = True, 0.0
        constrained, row["constrained"] = answer(self.llm, prompt, plain, SCHEMA)
        self.meter.on, row["masks"] = False, self.meter.seconds
        assert constrained.token_ids == forced.token_ids, "forced tokens changed an answer"
        before = self.stats()
        trusting, row["trusting"] = answer(self.llm, prompt, replace(self.forcing, trust_forced=True), SCHEMA)
        check(trusting)
        row["trusted"] = self.stats().forced_tokens - before.forced_tokens
        row["overruled"] = self.stats().overruled_tokens - before.overruled_tokens
        row["differs"] = trusting.text != forced.text
        return row

    def stats(self) -> Stats:
        assert self.llm.running.engine is not None
        return self.llm.running.engine.stats()


def check(found: Completion) -> None:
    """Raise ValidationError or ValueError where an answer that ended does not satisfy the schema."""
    if found.finish_reason == "stop":
        jsonschema.validate(json.loads(found.text), SCHEMA)


def kept(file: Path | None, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file of this setting, without a last one that broke off; the file begins with the setting."""
    if file is None:
        return []
    found: list[dict[str, Any]] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    found = found or [setting]
    if found[0] != setting:
        raise SystemExit(f"{file} has answers of {found[0]}, not of {setting}")
    file.write_text("".join(json.dumps(each) + "\n" for each in found))
    return found[1:]


def report(rows: Sequence[dict[str, Any]], whole: bool) -> dict[str, Any]:
    """The figures of all rows; `whole` ones have all four ways."""

    def total(name: str) -> Any:
        return sum(row[name] for row in rows)

    tokens, ends = sum(row["tokens"] for row in rows), Counter(row["end"] for row in rows)
    told = {
        "texts": len(rows), "tokens": tokens, "ends": dict(ends), "longest": max(row["tokens"] for row in rows),
        "steps_saved": round(total("saved") / tokens, 3),
    }  # fmt: skip
    if not whole:
        return told
    without = sum(row["constrained"] * row["tokens"] for row in rows)
    over_free = {
        f"{way}_over_free": round(statistics.median(row["free"] / row[way] for row in rows), 3)
        for way in ("constrained", "forced", "trusting")
    }
    return {
        **told, **over_free,
        "forced_over_constrained": round(without / sum(row["forced"] * row["tokens"] for row in rows), 3),
        "mask_share": round(total("masks") / without, 4), "mask_us": round(total("masks") / tokens * 1e6),
        "trusted": total("trusted"), "overruled": total("overruled"), "answers_that_differ": total("differs"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--valid-only", action="store_true", help="answer with forced tokens alone, and tell no times")
    parser.add_argument("--answers", type=Path, help="rows, a line each; a run that was broken off goes on behind them")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    setting = {"model": Path(args.model).name, **{name: getattr(args, name) for name in ("tokens", "threads")}}
    rows = kept(args.answers, {**setting, "valid_only": args.valid_only})[: args.texts]
    asker = Asker(args.model, args.tokens, args.valid_only) if len(rows) < args.texts else None
    with contextlib.ExitStack() as stack:
        out = None if args.answers is None else stack.enter_context(args.answers.open("a"))
        for prompt in prompts(args.texts)[len(rows) :]:
            assert asker is not None
            row = asker.row(prompt)
            rows.append(row)
            if out is not None:
                print(json.dumps(row), file=out, flush=True)
            told = [f"{way} {row['free'] / row[way]:.3f} of free" for way in ("constrained", "forced") if "free" in row]
            print(", ".join([row["end"], f"{row['tokens']} tokens", *told]), flush=True)
    print(f"{args.model}, {args.threads} thread(s): each answer that ended `stop` is valid")
    print(json.dumps({**setting, **report(rows, not args.valid_only)}))


if __name__ == "__main__":
    main()
