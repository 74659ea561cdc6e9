"""Passkeys by depth: is a number found that stands somewhere in a long text (Mohtashami and Jaggi 2023)?

A needle with five digits is put at some depth of a text, and asked for. *Question known*: it is the end of the prompt.
*Not known*: the text is the prompt, and the question comes after it, as in the next turn of a chat. The full cache
answers the same prompts, so that a miss is not the model's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attar.errors import UserError
from attar.evaluation.long_context.windows import PIECE, Reading, Subject, run
from attar.execution import kv_cache
from attar.execution.model_runner import Runner
from attar.kv.eviction import Eviction
from attar.kv.sparse_prefill import SparsePrefill
from attar.model import sparse_layers
from attar.model.cache import BLOCK, ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.progress import Progress
from attar.protocol.scheduler_config import SchedulerConfig
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence
from attar.scheduling.step_plan import Outcome

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLE = "\nThe pass key is {key}. Remember it: {key} is the pass key.\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
SEED = 5
SPARE = 4  # tokens of an answer beyond those of the key


@dataclass(frozen=True)
class PasskeyReport:
    """Found passkeys of `prompts` at each depth, of the full cache and with few keys read."""

    settings: str
    context: int
    prompts: int  # at each depth
    depths: tuple[float, ...]
    full_known: tuple[int, ...]
    full_unknown: tuple[int, ...]
    few_known: tuple[int, ...]
    few_unknown: tuple[int, ...]
    keys_seen: float  # by a row of an answer, in a layer that is not dense
    keys_read: float
    prompt_keys_seen: float  # by a row of a prompt
    prompt_keys_read: float
    cache_bytes: int  # of the full cache
    more_bytes: int  # beside it
    kept_bytes: int  # of the cache behind an answer, where keys are dropped; else all

    def to_dict(self) -> dict[str, Any]:
        """Return the figures under the names of the fields."""
        return dict(vars(self))

    def table(self) -> str:
        """Return the figures as lines of text."""
        depths = "".join(f"{f'{100 * depth:.0f} %':>7}" for depth in self.depths)
        rows = (
            ("full cache, question known", self.full_known),
            ("full cache, not known", self.full_unknown),
            ("few keys, question known", self.few_known),
            ("few keys, not known", self.few_unknown),
        )
        seen = f"{self.keys_read:,.0f} of {self.keys_seen:,.0f} by rows of answers"
        of_prompts = f"{self.prompt_keys_read:,.0f} of {self.prompt_keys_seen:,.0f} by rows of prompts"
        kept = f"{self.cache_bytes / 1e6:,.1f} MB of cache, and {self.more_bytes / 1e6:,.1f} MB more"
        if self.kept_bytes < self.cache_bytes:
            kept = f"{self.kept_bytes / 1e6:,.1f} MB kept, of {self.cache_bytes / 1e6:,.1f} MB"
        lines = [
            f"passkeys found of {self.prompts} at each depth of {self.context:,} tokens, {self.settings}",
            f"  {'depth':<27}{depths}",
            *(f"  {name:<27}{''.join(f'{each:>7}' for each in found)}" for name, found in rows),
            f"  keys read        {seen}, {of_prompts}",
            f"  bytes            {kept}",
        ]
        return "\n".join(lines)


@dataclass(eq=False)
class _Text:
    """A cache of one sequence that is filled anew from where its text differs from the last."""

    decoder: Decoder
    cache: KVCache
    prefill: SparsePrefill | None
    ids: list[int] = field(default_factory=list)

    def fill(self, ids: list[int]) -> None:
        """Have the cache hold a prompt, but for its last token."""
        most = min(self.cache.filled[0], len(ids) - 1)
        same = next((i for i in range(most) if self.ids[i] != ids[i]), most)
        if self.prefill is not None:
            same = min(same, self.prefill.alike(min(len(self.ids), len(ids))))
            self.cache.read_few(self.prefill, [len(ids)])
        self.ids, self.cache.dense_until = ids, [self.cache.capacity]
        self.cache.truncate(0, same - same % self.cache.block)
        run(self.decoder, self.cache, torch.tensor(ids[self.cache.filled[0] : -1]))

    def answer(self, more: list[int], count: int, few: bool) -> list[int]:
        """Return the `count` most probable tokens behind the prompt and `more`, which is no part of it.

        With `few`, rows behind the prompt read few keys.
        """
        found, rows = list[int](), torch.tensor([self.ids[-1], *more])
        self.cache.dense_until = [len(self.ids) if few else self.cache.capacity]
        for _ in range(count):
            step = ForwardBatch((len(rows),), self.cache.capacity, self.cache)
            rows = self.decoder.forward(rows, step)[-1:].argmax(-1)
            found.append(int(rows))
        self.cache.truncate(0, len(self.ids) - 1)
        return found


@dataclass(eq=False)
class _Evicting:
    """A runner of one sequence, whose keys a policy drops."""

    runner: Runner
    policy: Eviction
    blocks: int = 0  # that the last answer held in the end

    def answer(self, ids: list[int], more: list[int], count: int) -> list[int]:
        """Return the `count` most probable tokens behind the prompt `ids` and `more`, which is no part of it."""
        pool, length = BlockPool(self.runner.pages[0].blocks, BLOCK), len(more) + count
        scheduler = Scheduler(
            pool, PrefixCache(pool), SchedulerConfig(max_running=1, max_step_tokens=PIECE, headroom=0)
        )
        one = Sequence(id="passkey", prompt_ids=ids, max_tokens=length, bypass=True, eviction=self.policy)
        scheduler.add([one], 0.0)
        while one.output < length:
            plan = scheduler.plan(0.0)
            (chunk,) = plan.chunks
            logits = self.runner.run(plan)
            self.blocks = len(one.blocks) + len(one.pristine)
            outcomes = {}
            if chunk.samples:
                token = more[one.output] if one.output < len(more) else int(logits[-1].argmax())
                outcomes = {one.id: Outcome((token,))}
            scheduler.commit(plan, outcomes, 0.0)
        return list(one.tokens[len(ids) + len(more) :])


def measure(
    model: str,
    text: Path,
    reading: Reading,
    *,
    context: int,
    prompts: int = 1,
    kv: str | None = None,
    progress: Progress | None = None,
) -> PasskeyReport:
    """Ask for passkeys in `prompts` texts of `context` tokens for each depth, on native kernels with exact activations.

    Raises ValueError for a text shorter than that, and for what the settings do not go with.
    """
    told = progress or (lambda stage, done, total: None)
    subject = Subject.load(model, text, context, kv=kv, progress=progress)
    decoder, scheme, (sparse, prefill, policy) = subject.decoder, subject.scheme, reading
    if scheme.recent:
        raise UserError("option_conflict", f"passkeys are asked in caches without unfinished blocks, not {scheme.name}")
    caches = [
        decoder.cache(context, scheme=scheme, bases=subject.bases) for _ in range(2 if prefill is not None else 1)
    ]
    if sparse is not None:
        sparse.check(scheme)
        layers = kv_cache.sparse_layers_of(decoder, sparse, progress)
        for cache in caches:
            sparse_layers.attach(cache.layers, decoder, layers, context)
    whole = _Text(decoder, caches[0], None)
    little = whole if prefill is None else _Text(decoder, caches[1], prefill)
    evicting = None if policy is None else _Evicting(subject.evicting_runner(policy), policy)
    found = {(few, known): [0] * len(DEPTHS) for few in (False, True) for known in (True, False)}
    numbers, done = random.Random(SEED), 0
    with torch.inference_mode():
        for prompt in range(prompts):
            for place, depth in reversed(list(enumerate(DEPTHS))):
                key = str(numbers.randrange(10_000, 100_000))
                body, question, count = _prompt(subject, prompt, prompts, depth, key)
                for known in (True, False):
                    ids, more = ([*body, *question], []) if known else (body, question)
                    for few, one in ((False, whole), (True, little)):
                        if few and evicting is not None:
                            said = evicting.answer(ids, more, count)
                        else:
                            one.fill(ids)
                            said = one.answer(more, count, few)
                        found[few, known][place] += key in subject.tokenizer.decode(said)
                done += 1
                told("passkeys", done, prompts * len(DEPTHS))
    seen = context - 1
    until = context if prefill is None else prefill.until(context)
    read = [n if prefill is None or n > until else prefill.tokens_read(n) for n in range(1, context + 1)]
    signs = sum(p.signs.bits.nbytes + p.signs.scales.nbytes for p in caches[0].layers if p.signs is not None)
    cache_bytes = sum(pages.nbytes for pages in caches[0].layers) - signs
    kept = cache_bytes if evicting is None else evicting.blocks * cache_bytes // caches[0].layers[0].blocks
    answers_read = seen if sparse is None else sparse.tokens_read(seen)
    full_known, full_unknown, few_known, few_unknown = (
        tuple(found[few, known]) for few in (False, True) for known in (True, False)
    )
    return PasskeyReport(
        str(reading), context, prompts, DEPTHS, full_known, full_unknown, few_known, few_unknown,
        seen, answers_read if policy is None else min(seen, policy.budget), (context + 1) / 2, sum(read) / context,
        cache_bytes, signs, kept,
    )  # fmt: skip


def _prompt(
    subject: Subject, number: int, count: int, depth: float, key: str
) -> tuple[list[int], list[int], int]:  # fmt: skip
    """Return the tokens of text and needle, those of the question, and how many an answer may have."""
    needle, question, answer = (
        subject.tokenizer.encode(text, add_special_tokens=False)
        for text in (NEEDLE.format(key=key), QUESTION, f" {key}")
    )
    most = len(answer) + SPARE
    length = subject.context - len(needle) - len(question) - most
    if length < len(needle):
        raise UserError("option_out_of_range", f"a window of {subject.context} tokens is too short for a passkey")
    begin = (len(subject.ids) - length) * number // count
    hay = subject.ids[begin : begin + length]
    at = round(depth * length)
    return [*hay[:at], *needle, *hay[at:]], question, most
