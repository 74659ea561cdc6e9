"""What a configuration may have beside weights, KV format and rows: sparse attention, KV eviction, drafts.

A technique changes the seconds of a step, the bytes of the cache, and the divergence. Divergences are ranges of the few
measurements in docs/long_context.md. Drafts change no text. Their acceptance depends on it: a given one is `measured`,
else a range is `assumed`, and such a configuration is chosen only where no other meets the goals. One technique at a
time is tried: what two of them cost together was not measured. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attar.errors import UserError
from attar.kv import eviction, sparse
from attar.kv.eviction import Eviction
from attar.kv.schemes import KvScheme
from attar.kv.sparse import SparseAttention
from attar.model.config import ModelConfig
from attar.model.vision.against import Beside, against
from attar.model.vision.config import VisionConfig
from attar.plan.costs import BLOCK
from attar.plan.goals.candidates import Rejected
from attar.plan.goals.quality import UNCHANGED, Quality, ranged
from attar.plan.gpus import GpuSpec
from attar.plan.rates.step_time import Evidence, StepModel, StepSeconds, weakest
from attar.plan.roofline import Chunk

SHARES = {4: ranged(0.0008, 0.017), 8: ranged(0.0014, 0.051), 16: ranged(0.0043, 0.368)}
"""Sparse attention: one in so many tokens is read, and the divergence, of two real models at 4,096 tokens."""
SCAN = 0.23  # time of the scan over one-bit keys, over that of full attention: 0.08 to 0.23 measured
SINK, SNAPKV = ranged(0.0028, 0.063), ranged(0.0093, 0.055)  # keeping a quarter to a third, of two real models
KEPT = 4  # one in so many tokens is kept
SINKS = 4
STREAMED = 64  # rows of a step behind a stream's budget
DRAFTS = (1, 3, 7)  # numbers of drafts that are tried
ASSUMED = (0.3, 0.6, 0.8)  # acceptance where none is given: low, expected, high
KV_OF = {"sparse": ("bfloat16", "int8"), "eviction": ("bfloat16", "int8"), "drafts": ("bfloat16", "int8")}
"""KV formats that a technique is tried with."""


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Return the tokens of one target pass with `drafts` drafts, each right with probability `acceptance`:
    (1 - p^(K+1)) / (1 - p), K + 1 at p = 1 (Leviathan et al. 2023, eq. 1)."""
    if acceptance >= 1.0:
        return drafts + 1.0
    return float((1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance))


@dataclass(frozen=True, slots=True)
class Technique:
    """One technique with its settings. acceptance: low, expected and high; all equal where it was measured."""

    name: str
    words: tuple[str, ...]  # options of `attar serve`
    cost: Quality = UNCHANGED
    sparse: SparseAttention | None = None
    eviction: Eviction | None = None
    drafts: int = 0
    acceptance: tuple[float, float, float] = ASSUMED

    @property
    def assumed(self) -> bool:
        """Return whether its speed rests on an acceptance that nothing measured."""
        return self.drafts > 0 and self.acceptance[0] < self.acceptance[2]

    @property
    def tokens(self) -> tuple[float, float, float]:
        """Return the tokens of a step and sequence: low, expected, high; 1 without drafts."""
        low, middle, high = (expected_tokens(each, self.drafts) for each in self.acceptance)
        return low, middle, high

    def takes(self, kv: KvScheme) -> bool:
        """Return whether the technique is tried with a KV format."""
        kind = "sparse" if self.sparse is not None else "eviction" if self.eviction is not None else "drafts"
        return kv.name in KV_OF[kind]

    def slots(self, context: int, prompt: int) -> int:
        """Return the slots of the cache that a sequence of `context` tokens has at most."""
        return context if self.eviction is None else self.eviction.most_slots(context, prompt)


class Changed:
    """A step-time model with a technique: the same interface, and other seconds."""

    def __init__(self, model: StepModel, technique: Technique, prompt: int) -> None:
        self._model, self._technique = model.with_attention(self._attended), technique
        self._prompt = prompt
        self.fitted, self.spread = model.fitted, model.spread
        known: Evidence = "assumed" if technique.assumed else "measured"
        if technique.drafts == 0:
            known = "fitted"
        self.evidence = weakest((model.evidence, known))

    def _attended(self, model: StepModel, start: int, rows: int) -> float:
        few, kept = self._technique.sparse, self._technique.eviction
        if few is not None and rows == 1 and (read := few.tokens_read(start + 1)) <= start:
            return model.full_attention(start, rows) * min(1.0, read / (start + 1) + SCAN)
        if kept is not None and kept.streams:
            return model.full_attention(min(start, max(0, kept.budget - rows)), rows)
        if kept is not None and start >= self._prompt > kept.budget:
            return model.full_attention(start - self._prompt + kept.budget, rows)
        return model.full_attention(start, rows)

    def of(self, chunks: Iterable[Chunk]) -> StepSeconds:
        """Return the seconds of a step. A decoding row brings its drafts along."""
        rows = 1 + self._technique.drafts
        if rows == 1:
            return self._model.of(chunks)
        return self._model.of((start, rows, rows) if (n, s) == (1, 1) else (start, n, s) for start, n, s in chunks)

    def decode(self, users: int = 1, context: int = 1, rows: int = 1) -> StepSeconds:
        """Return the seconds of a decode step of all users, with their drafts."""
        return self._model.decode(users, context, rows + self._technique.drafts)

    def prefill(self, tokens: int, before: int = 0, chunk: int = 512) -> float:
        """Return the seconds of a prompt. Past the budget of a stream it is computed in small steps."""
        kept = self._technique.eviction
        if kept is None or not kept.streams or before + tokens <= kept.budget:
            return self._model.prefill(tokens, before, chunk)
        first = max(0, kept.budget - before)
        whole = self._model.prefill(first, before, chunk) if first else 0.0
        steps = -(-(tokens - first) // STREAMED)
        return whole + steps * self._model.of([(kept.budget - STREAMED, STREAMED, 0)]).total


def techniques(
    config: ModelConfig,
    gpu: GpuSpec | None,
    prompt: int,
    context: int,
    acceptance: float | None,
    vision: VisionConfig | None = None,
) -> tuple[list[Technique], list[Rejected]]:
    """Return the techniques to try for requests of a prompt and a whole length, and those that cannot be, with the
    reason. `vision` is the tower of requests with images."""
    found, out = list[Technique](), list[Rejected]()
    if gpu is not None:
        return [], [Rejected("sparse attention, KV eviction", "they run on CPUs")]
    if vision is not None and (why := against(vision, Beside(few=True))) is not None:
        out.append(Rejected("sparse attention", why))
    elif config.angles_grow:
        out.append(Rejected("sparse attention", "rotary angles of this model grow with the length"))
    elif context <= sparse.DENSE_BELOW:
        reason = f"{context:,} tokens; up to {sparse.DENSE_BELOW:,} all are read"
        out.append(Rejected("sparse attention", reason))
    else:
        for share, cost in SHARES.items():
            few = SparseAttention(share=share)
            found.append(Technique(str(few), ("--sparse-attention", str(few)), cost, sparse=few))
    budget = context // KEPT // BLOCK * BLOCK
    for policy, cost in (("sink", SINK), ("snapkv", SNAPKV)):
        if vision is not None:
            why = against(vision, Beside(evicts=True)) or "requests with images keep all keys"
            out.append(Rejected(f"KV eviction {policy}", why))
            continue
        if budget < eviction.LEAST or (policy != "sink" and prompt <= budget):
            out.append(Rejected(f"KV eviction {policy}", f"a quarter of {context:,} tokens is too small a budget"))
            continue
        kept = Eviction(policy, budget, SINKS if policy == "sink" else 0)
        try:
            kept.check_model(config.windows, config.learned_positions, config.angles_grow, context)
        except UserError as error:
            out.append(Rejected(f"KV eviction {policy}", str(error)))
            continue
        found.append(Technique(str(kept), ("--kv-eviction", str(kept)), cost, eviction=kept))
    known = ASSUMED if acceptance is None else (acceptance, acceptance, acceptance)
    for drafts in DRAFTS:
        words = ("--draft", "suffix", "--draft-tokens", str(drafts))
        found.append(Technique(f"{drafts} draft{'s' * (drafts > 1)}", words, drafts=drafts, acceptance=known))
    return found, out


def changed(model: StepModel, technique: Technique | None, prompt: int) -> StepModel | Changed:
    """Return a model's step times with a technique."""
    return model if technique is None else Changed(model, technique, prompt)
