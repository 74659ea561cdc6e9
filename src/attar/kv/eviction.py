"""Settings of KV-cache eviction: which keys of a sequence are dropped, and before which token. Torch-free.

A policy evicts before tokens whose index is a function of the prompt's length and these settings alone. No call of the
model crosses such an index. So a text is the same in any batch, with any chunks of its prompt, and after a preemption.

`sink` (StreamingLLM; Xiao et al. 2023) keeps the first tokens, the sinks, and the newest ones. Tokens are dropped a
block at a time, so blocks never move: only the sinks do.

The other policies drop keys once, behind the prompt: in each layer and key-value head those of the lowest rank
(`ranking.py`). The others keep their positions, and the answer's keys are added to them. `snapkv` (Li et al. 2024)
ranks by the weights of the prompt's last rows. The question has to stand there: what a later one asks for may be gone.
`h2o` (Zhang et al. 2023) ranks by the weights of all rows of the prompt, and keeps the newest half of its budget.
`expected` (Devoto et al. 2025) ranks by the weights that queries like the prompt's would give in future positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from attar.errors import UserError
from attar.kv.schemes import SCHEMES, KvScheme, Layout

NEVER = 1 << 62  # past every token
BLOCK = 64  # slots of a block, which are dropped together
LEAST = 2 * BLOCK  # slots of the smallest budget
MOST = 1 << 24
MOST_SINKS = BLOCK // 2  # they lie in one block
STREAM = 1 << 20  # tokens of the longest stream, prompt and output
NONE = "none"  # in a request: keep every key
LAYOUTS = (Layout.FLOAT32, Layout.BFLOAT16, Layout.INT8, Layout.FP8, Layout.BIT_PLANES)
"""Layouts in which a token's keys and values are stored apart from all others, so that they can be moved."""
ONCE = {"snapkv": 32, "h2o": NEVER, "expected": 256}  # policies by the number of a prompt's last rows they look at
*_FIRST, _LAST = ("sink:SINKS+WINDOW", *(f"{policy}:TOKENS" for policy in ONCE))
FORMS = f"{', '.join(_FIRST)} or {_LAST}"


@dataclass(frozen=True, slots=True)
class Eviction:
    """Keep at most `budget` slots of a sequence, by a `policy`; of these, `sinks` first tokens.

    `parse` checks the values; a test may make smaller ones.
    """

    policy: str
    budget: int
    sinks: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a policy and its budget in tokens, such as `sink:4+2044` or `snapkv:2048`.

        Raises ValueError for other text (`option_malformed`) and for budgets out of range (`option_out_of_range`).
        """
        policy, _, amount = text.partition(":")
        numbers = amount.split("+")
        wanted = 2 if policy == "sink" else int(policy in ONCE)
        if len(numbers) != wanted or not all(n.isascii() and n.isdecimal() and len(n) < 10 for n in numbers):
            raise UserError("option_malformed", f"KV eviction is {FORMS}, not {text[:80]!r}")
        kept = [int(number) for number in numbers]
        found = cls(policy, sum(kept), kept[0] if policy == "sink" else 0)
        if not LEAST <= found.budget <= MOST:
            raise UserError("option_out_of_range", f"{text}: a budget has {LEAST} to {MOST} tokens")
        if found.sinks > MOST_SINKS:
            raise UserError("option_out_of_range", f"{text}: there are at most {MOST_SINKS} sinks")
        return found

    def __str__(self) -> str:
        return f"{self.policy}:{self.budget}" if self.once else f"sink:{self.sinks}+{self.budget - self.sinks}"

    @property
    def once(self) -> bool:
        """Return whether keys are dropped once, behind the prompt, and in each layer and head others."""
        return self.policy in ONCE

    def watched(self, prompt: int) -> range:
        """Return the rows of a prompt that rank its keys; none where nothing is ranked or dropped."""
        if not self.once or prompt <= self.budget:
            return range(0)
        return range(max(0, prompt - ONCE[self.policy]), prompt)

    @property
    def streams(self) -> bool:
        """Return whether a sequence may run past the model's context, since no two of its keys lie that far apart."""
        return self.policy == "sink"

    def longest(self, context: int) -> int:
        """Return the most tokens that prompt and output have together, with a model of this context."""
        return max(STREAM, context) if self.streams else context

    def most_slots(self, context: int, prompt: int | None = None) -> int:
        """Return the most slots that a sequence of `context` tokens holds at a time.

        A stream holds a block of first tokens besides. A policy that drops once holds a `prompt` and what it keeps of
        it. None: the prompt takes the context.
        """
        prompt = context if prompt is None else min(prompt, context)
        if self.once:
            return context if prompt <= self.budget else self.budget + max(prompt, context - prompt)
        return min(context, self.budget + BLOCK)

    def longest_in(self, slots: int) -> int:
        """Return the tokens of the longest prompt whose sequence holds no more than so many slots; 0: no prompt that a
        policy drops keys of."""
        return max(0, slots - self.budget) if self.once else slots

    def slots_read(self, context: int) -> int:
        """Return the most slots that a row reads behind `context` tokens, if they are a prompt."""
        return min(context, self.budget)

    def cut(self, prompt: int, dropped: int) -> int:
        """Return the index of the token before which keys are evicted next, once `dropped` tokens have no slot."""
        if self.once:
            return prompt if prompt > self.budget and not dropped else NEVER
        return dropped + self.budget

    def plain(self, prompt: int) -> int:
        """Return how many first tokens have the keys that they have without eviction."""
        return self.cut(prompt, 0)

    def reusable(self, prompt: int) -> int:
        """Return how many first tokens may be taken from a prefix cache, at most: before the rows that rank keys."""
        return self.watched(prompt).start if self.once and prompt > self.budget else self.cut(prompt, 0) - 1

    def check(self, scheme: KvScheme, device: str = "cpu", processes: int = 1, **besides: bool) -> None:
        """Raise ValueError (`option_conflict`) for what eviction does not go with.

        That is a cache of another scheme, another device than a CPU, and several processes. `besides` may name `trees`
        of drafts, whose slots are not their positions, and `sparse` attention or prefill: what they read depends on
        keys that eviction drops.
        """
        movable = ", ".join(name for name, each in SCHEMES.items() if moves(each))
        against = (
            (not moves(scheme), f"needs a KV cache in one of {movable} (--kv), not {scheme.name}"),
            (device != "cpu", f"runs on CPUs (--device cpu), not on {device}"),
            (processes > 1, f"runs in one process (--tp 1 --pp 1), not in {processes}"),
            (besides.get("trees", False), "takes chains of drafts (--draft), not trees (--draft-tree)"),
            (besides.get("sparse", False), "does not go with --sparse-attention and --sparse-prefill"),
        )
        for refused, why in against:
            if refused:
                raise UserError("option_conflict", f"KV eviction {why}")

    def check_model(self, windows: tuple[int | None, ...], learned: int, grows: bool, context: int) -> None:
        """Raise ValueError (`option_conflict`) for a model whose keys cannot be moved or dropped, by its config.

        These have layers with sliding windows, `learned` positions, or rotary angles that grow with the length. So has
        a `context` that the budget does not fit in (`context_exceeded`).
        """
        against = (
            (any(window is not None for window in windows), "layers with sliding windows, which evict by themselves"),
            (learned > 0, "learned positions"),
            (grows, "rotary angles that grow with the length"),
        )
        for refused, why in against:
            if refused:
                raise UserError("option_conflict", f"KV eviction does not go with this model's {why}")
        if self.budget > context:
            raise UserError("context_exceeded", f"{self} keeps more than the {context:,} tokens of the context")

    def check_room(self, blocks: int) -> None:
        """Raise ValueError (`memory_insufficient`) where a cache of so many blocks is too small for one sequence."""
        if (least := 2 * -(-self.budget // BLOCK)) > blocks:
            there = f"there are {blocks * BLOCK:,}"
            message = f"{self} takes {least * BLOCK:,} tokens of cache at its first eviction: {there}"
            raise UserError("memory_insufficient", message)


def moves(scheme: KvScheme) -> bool:
    """Return whether keys of a cache in this scheme can be moved to other slots without being rounded anew.

    Those of `kivi4`, `kivi2`, `nuq3` and `nuq4` are rounded by their place in a block; `klt2`, `kivi4` and `kivi2` keep
    the tokens of an unfinished block in 16 bits.
    """
    return scheme.layout in LAYOUTS and not scheme.recent


def parse_all(texts: tuple[str, ...]) -> tuple[Eviction, ...]:
    """Read several policies. Raises ValueError as `Eviction.parse`, and for one that is named twice."""
    found = tuple(map(Eviction.parse, texts))
    if len(set(found)) < len(found):
        raise UserError("option_conflict", "a KV eviction policy is named twice")
    return found
