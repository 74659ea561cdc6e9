"""Passkeys by depth: is a number found that stands somewhere in a long text (Mohtashami and Jaggi 2023)?

A needle with five digits is put at some depth of a text, and asked for. *Question known*: it is the end of the prompt.
*Not known*: the text is the prompt, and the question comes after it, as in the next turn of a chat. The full cache
answers the same prompts, so that a miss is not the model's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attar.errors import UserError
from attar.evaluation.long_context.windows import Subject, run
from attar.execution import kv_cache
from attar.kv.sparse import SparseAttention
from attar.kv.sparse_prefill import SparsePrefill
from attar.model import sparse_layers
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.sparse_layers import SparseLayers
from attar.progress import Progress

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEEDLE = "\nThe pass key is {key}. Remember it: {key} is the pass key.\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
SEED = 5
SPARE = 4  # tokens of an answer beyond those of the key


class Few(NamedTuple):
    """How little is read: by rows of outputs, and by rows of prompts; None where all is."""

    sparse: SparseLayers | None
    prefill: SparsePrefill | None

    def __str__(self) -> str:
        attention = "" if self.sparse is None else f"sparse attention {self.sparse.settings}"
        prompts = "" if self.prefill is None else f"sparse prefill {self.prefill}"
        return ", ".join(filter(None, (attention, prompts)))


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
    cache_bytes: int
    more_bytes: int  # beside the cache

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
        lines = [
            f"passkeys found of {self.prompts} at each depth of {self.context:,} tokens, {self.settings}",
            f"  {'depth':<27}{depths}",
            *(f"  {name:<27}{''.join(f'{each:>7}' for each in found)}" for name, found in rows),
            f"  keys read        {seen}, {of_prompts}",
            f"  bytes            {self.cache_bytes / 1e6:,.1f} MB of cache, and {self.more_bytes / 1e6:,.1f} MB more",
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


def measure(
    model: str,
    text: Path,
    sparse: SparseAttention | None = None,
    prefill: SparsePrefill | None = None,
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
    decoder, scheme = subject.decoder, subject.scheme
    if scheme.recent:
        raise UserError("option_conflict", f"passkeys are asked in caches without unfinished blocks, not {scheme.name}")
    if sparse is not None:
        sparse.check(scheme)
    few = Few(None if sparse is None else kv_cache.sparse_layers_of(decoder, sparse, progress), prefill)
    caches = [decoder.cache(context, scheme=scheme) for _ in range(2 if prefill is not None else 1)]
    if few.sparse is not None:
        for cache in caches:
            sparse_layers.attach(cache.layers, decoder, few.sparse, context)
    whole = _Text(decoder, caches[0], None)
    little = whole if prefill is None else _Text(decoder, caches[1], prefill)
    found = {(i, known): [0] * len(DEPTHS) for i in range(2) for known in (True, False)}
    numbers, done = random.Random(SEED), 0
    with torch.inference_mode():
        for prompt in range(prompts):
            for place, depth in reversed(list(enumerate(DEPTHS))):
                key = str(numbers.randrange(10_000, 100_000))
                body, question, count = _prompt(subject, prompt, prompts, depth, key)
                for known in (True, False):
                    for i, one in enumerate((whole, little)):
                        one.fill([*body, *question] if known else body)
                        said = one.answer([] if known else question, count, few=i == 1)
                        found[i, known][place] += key in subject.tokenizer.decode(said)
                done += 1
                told("passkeys", done, prompts * len(DEPTHS))
    seen, signs = context - 1, 0
    until = context if prefill is None else prefill.until(context)
    read = [n if prefill is None or n > until else prefill.tokens_read(n) for n in range(1, context + 1)]
    if few.sparse is not None:
        signs = sum(p.signs.bits.nbytes + p.signs.scales.nbytes for p in caches[0].layers if p.signs is not None)
    full_known, full_unknown, few_known, few_unknown = (
        tuple(found[i, known]) for i in range(2) for known in (True, False)
    )
    return PasskeyReport(
        str(few), context, prompts, DEPTHS, full_known, full_unknown, few_known, few_unknown,
        seen, seen if sparse is None else sparse.tokens_read(seen), (context + 1) / 2, sum(read) / context,
        sum(pages.nbytes for pages in caches[0].layers) - signs, signs,
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
