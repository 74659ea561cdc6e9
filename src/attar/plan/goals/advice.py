"""Advice: what each technique brings on this machine, for this model, number of users and context, as computed rows.

No rule of thumb is written here. A row compares the time of a decode step with and without the technique, by the
step-time model, and names the number that decides. Usual rules (4 bits for small devices, W8A8 for throughput, KV
quantization for long contexts) follow where the numbers say so. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from attar.formats.scheme import Scheme
from attar.kv.schemes import SCHEMES, KvScheme
from attar.model.config import ModelConfig
from attar.model.split import Share
from attar.plan import costs
from attar.plan.costs import Storage
from attar.plan.fit import shared
from attar.plan.goals import quality
from attar.plan.goals.candidates import compressed, divided
from attar.plan.goals.parse import shown
from attar.plan.goals.quality import Quality
from attar.plan.goals.search import Question
from attar.plan.goals.techniques import changed, expected_tokens, techniques
from attar.plan.rates.step_time import SHEET, UNREAD, StepModel, fitted, kind

WORTH = 1.05  # a technique pays where a step is so many times as fast
SHARE = 0.5  # of a step: what takes more binds it
MOST_DRAFTS = 8
GUESSED = 0.6  # acceptance that copies of the prompt often reach; a draft that needs more seldom pays


@dataclass(frozen=True, slots=True)
class Advice:
    """One technique: whether it pays here, the sentence with the number that decides, and the options that ask for
    it."""

    technique: str
    pays: bool
    reason: str
    how: str = ""

    def __str__(self) -> str:
        how = f"; {self.how}" if self.pays and self.how else ""
        return f"{self.technique}: {'yes' if self.pays else 'no'}, {self.reason}{how}"


def break_even(relative: dict[int, float]) -> tuple[float, int] | None:
    """Return the least acceptance at which drafts pay, and the number of drafts that does best there; None where none
    pay at 0.99. `relative` is c(r), the time of a step of r rows over that of one."""
    for step in range(1, 100):
        acceptance = step / 100
        gain, drafts = max((expected_tokens(acceptance, r - 1) / c, r - 1) for r, c in relative.items())
        if gain >= WORTH:
            return acceptance, drafts
    return None


def crossover(question: Question, scheme: Scheme) -> float:
    """Return the number of rows from which products with a scheme take more time to compute than to read."""
    profile = question.profile
    rate = (profile.tile or profile.int8).value
    if profile.isa in (SHEET, UNREAD):
        rate = profile.bf16.value if scheme.activation is None else profile.int8.value
        return rate * scheme.bits_per_weight((4096, 4096)) / 8 / (2 * profile.bandwidth.value)
    curve = profile.products.get(scheme.name) or profile.products.get(kind(scheme))
    if curve is None:
        return math.inf
    found = fitted(curve, profile.bandwidth.value, rate)
    return rate * found.compute * curve.bytes / (2 * profile.bandwidth.value * found.read)


def advise(question: Question, kv: KvScheme) -> list[Advice]:
    """Return a row for each technique, for decode steps of all users at their context with caches in `kv`."""
    return [each for rows in (_weights, _cache, _drafts, _sparsity, _attention) for each in rows(question, kv)]


def _step(q: Question, storage: Storage, kv: KvScheme) -> tuple[float, float]:
    """Return the seconds of a decode step of all users, and the share of attention."""
    found = q.steps(storage, kv).decode(_together(q), q.workload.context)
    return found.total, found.attention / found.total


def _together(q: Question) -> int:
    return min(q.workload.users, q.limits.sequences)


def _range(cost: Quality) -> str:
    return f"KL {cost.kl:.2g} ({cost.evidence}, {cost.low:.2g} to {cost.high:.2g})"


def _held(q: Question, storage: Storage) -> ModelConfig:
    """Return the part of the model that one process of the question holds: weights, and heads and layers of caches."""
    return shared(q.config, storage, q.share)[1]


def _read(q: Question, storage: Storage) -> int:
    """Return the bytes of weights that a decode step reads, of which stages read theirs one after another."""
    return costs.step_bytes(shared(q.config, storage, Share(0, q.share.tp))[1], storage)


def _weights(q: Question, kv: KvScheme) -> Iterator[Advice]:
    if compressed(q.config, q.storage):
        yield Advice("weights", False, f"{q.storage.label} weights are compressed already")
        return
    rows, (now, share) = _together(q), _step(q, q.storage, kv)
    four, eight = (divided(each, q.config, q.storage, q.share) for each in ("w4g{g}", "w8a8"))
    times = {}
    for name, made, key in (("W4A16", four, "gptq-w4"), ("W8A8", eight, "smoothquant+gptq-w8a8")):
        method = key.rpartition("-")[0]
        if isinstance(made, str):
            yield Advice(name, False, made)
            continue
        _, storage = made
        assert storage.linears is not None, f"{name} names a scheme"
        times[name], _ = _step(q, storage, kv)
        least = min(now, *times.values())
        star = crossover(q, storage.linears)
        bytes_of = _read(q, storage) / _read(q, q.storage) - 1
        where = f"{rows} row{'s' * (rows > 1)} {'<' if rows < star else '>='} B* = {star:.0f}"
        said = f"step {shown('ttft', now)} -> {shown('ttft', times[name])}"
        if now / times[name] >= WORTH and times[name] <= least * WORTH:
            cost = _range(quality.WEIGHTS[key])
            reason = f"{where}; {said}; {bytes_of:+.0%} bytes of weights; {cost}"
            yield Advice(name, True, reason, f"attar compress --recipe {method}-{storage.linears.name}")
        elif share > SHARE:
            yield Advice(name, False, f"attention takes {share:.0%} of a step at {q.workload.context:,} tokens; {said}")
        elif now / times[name] >= WORTH:
            yield Advice(name, False, f"W4A16 takes {shown('ttft', times['W4A16'])} a step, and this {said}; {where}")
        else:
            yield Advice(name, False, f"{where}; {said}")


def _cache(q: Question, kv: KvScheme) -> Iterator[Advice]:
    wide = SCHEMES["bfloat16"]
    (now, share), held = _step(q, q.storage, wide), _cache_bytes(q, wide)
    for name in ("int8", "int4"):
        try:
            bytes_of = _cache_bytes(q, SCHEMES[name])
        except ValueError as error:
            yield Advice(f"KV {name}", False, str(error))
            continue
        then, _ = _step(q, q.storage, SCHEMES[name])
        total = held + costs.weight_bytes(_held(q, q.storage), q.storage).total
        saved = (held - bytes_of) / total
        said = (
            f"cache {shown('memory', held)} -> {shown('memory', bytes_of)}, {saved:.0%} of weights and cache; step "
            f"{shown('ttft', now)} -> {shown('ttft', then)}"
        )
        if saved >= WORTH - 1 or now / then >= WORTH:
            yield Advice(f"KV {name}", True, f"{said}; {_range(quality.KV[name])}", f"attar serve --kv {name}")
        else:
            yield Advice(f"KV {name}", False, f"attention is {share:.0%} of a step; {said}")


def _cache_bytes(q: Question, kv: KvScheme) -> int:
    return q.workload.users * -(-q.workload.context // costs.BLOCK) * costs.block_bytes(_held(q, q.storage), kv)


def _drafts(q: Question, kv: KvScheme) -> Iterator[Advice]:
    model = q.steps(q.storage, kv)
    users, context = _together(q), q.workload.context
    relative = dict(model.relative(range(2, MOST_DRAFTS + 2), users, context))
    found = break_even(relative)
    where = f"at {users} sequence{'s' * (users > 1)}"
    if found is None:
        yield Advice("speculation", False, f"no number of drafts pays {where}: c(2) = {relative[2]:.2f}")
        return
    acceptance, drafts = found
    cost = f"c({drafts + 1}) = {relative[drafts + 1]:.2f}"
    said = f"pays {where} from an acceptance of {acceptance:.2f} on (K = {drafts}, {cost})"
    if (off := _off(model, context, users)) is not None:
        said += f", and at {GUESSED} no more from {off} sequences on"
    yield Advice("speculation", acceptance <= GUESSED, said, f"attar serve --draft suffix --draft-tokens {drafts}")


def _off(model: StepModel, context: int, users: int) -> int | None:
    """Return the least power of two of sequences, above `users`, at which drafts of a usual acceptance pay no more."""
    for power in range(users.bit_length(), 10):
        found = break_even(dict(model.relative(range(2, MOST_DRAFTS + 2), 1 << power, context)))
        if found is None or found[0] > GUESSED:
            return 1 << power
    return None


def _sparsity(q: Question, kv: KvScheme) -> Iterator[Advice]:
    """Yield the row of 2:4 sparsity, beside 4-bit weights, which have about as many bytes."""
    if compressed(q.config, q.storage):
        return
    cost, four = _range(quality.WEIGHTS["prune-2:4"]), divided("w4g{g}", q.config, q.storage, q.share)
    sparse = Storage.named("sparse24", q.storage.head, q.storage.dtype)
    try:
        then, _ = _step(q, sparse, kv)
    except ValueError as error:
        yield Advice("2:4 sparsity", False, str(error))
        return
    now, _ = _step(q, q.storage, kv)
    least = min(now, now if isinstance(four, str) else _step(q, four[1], kv)[0])
    said = f"step {shown('ttft', now)} -> {shown('ttft', then)}; {cost}"
    if then <= least / WORTH:
        yield Advice("2:4 sparsity", True, said, "attar compress --recipe prune-2:4-sparse24")
    else:
        other = f"W4A16 takes {shown('ttft', least)}" if least < now else "no faster"
        yield Advice("2:4 sparsity", False, f"{said}; {other}")


def _attention(q: Question, kv: KvScheme) -> Iterator[Advice]:
    """Yield the rows of sparse attention and KV eviction, on a bfloat16 cache, each of the strongest setting."""
    work, wide = q.workload, SCHEMES["bfloat16"]
    found, out = techniques(q.config, q.gpu, work.longest_prompt, work.context, None, q.vision)
    yield from (Advice(each.technique, False, each.reason) for each in out)
    strongest = {each.words[0]: each for each in found if not each.drafts}
    for each in strongest.values():
        model = q.steps(q.storage, wide)
        now = model.decode(_together(q), work.context)
        then = changed(model, each, work.longest_prompt).decode(_together(q), work.context).total
        name = "sparse attention" if each.sparse is not None else "KV eviction"
        share = f"attention takes {now.attention / now.total:.0%} of a step at {work.context:,} tokens"
        said = f"{share}; {each.name}: step {shown('ttft', now.total)} -> {shown('ttft', then)}; {_range(each.cost)}"
        yield Advice(name, now.total / then >= WORTH, said, f"attar serve {' '.join(each.words)}")
