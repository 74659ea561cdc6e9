"""Search: every configuration judged by the goals, those that meet them, the best, and the nearest miss.

Weights, KV formats and rows of a step are combined in full, a few hundred at most. Memory is counted to the byte, times
come from the step-time model and, for several users or a trace, from a simulation. Of the configurations that meet all
goals the best has the most tokens a second, where the goals limit quality, and the least divergence where they do not.
A difference within both spreads counts as none: the smaller one then wins. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from attar.errors import UserError
from attar.kv.schemes import KvScheme
from attar.model.config import ModelConfig
from attar.model.split import Share
from attar.model.vision.config import VisionConfig
from attar.plan import fit as planning
from attar.plan.costs import BLOCK, Storage
from attar.plan.fit import CacheLimits, Deployment, Fit
from attar.plan.goals import candidates, quality, simulate, techniques
from attar.plan.goals.candidates import Rejected, Weights
from attar.plan.goals.cells import Cell, TowerSpread, cells_of, widened
from attar.plan.goals.parse import Goal, shown
from attar.plan.goals.simulate import Arrival, Capacity, Latencies
from attar.plan.goals.techniques import Changed, Technique
from attar.plan.gpus import GpuSpec
from attar.plan.rates.profile import MachineProfile
from attar.plan.rates.step_time import StepModel
from attar.plan.steps import StepLimits
from attar.plan.vision import EncodingTime
from attar.protocol.scheduler_config import PRESETS

SEPARATE = 0.02  # relative difference of two values that counts, at least
ROWS = tuple(dict.fromkeys((512, *(each.max_step_tokens for each in PRESETS.values()))))
"""Rows of a step, by default and of the scheduler's presets: large steps make prompts cheap, small ones keep gaps
between tokens even."""
FRONT = 8  # rows of the Pareto set that are shown


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests: users at once, tokens of each prompt and answer, and a trace's arrivals in place of users."""

    users: int
    prompt: int
    answer: int
    trace: tuple[Arrival, ...] = ()
    given: bool = True  # whether a number of users was given
    encoding: EncodingTime | None = None  # of the images of each request, whose rows are part of its prompt

    @property
    def context(self) -> int:
        """Return the positions of the longest request."""
        return max((each.length for each in self.trace), default=self.prompt + self.answer)

    @property
    def longest_prompt(self) -> int:
        """Return the tokens of the longest prompt."""
        return max((each.prompt for each in self.trace), default=self.prompt)

    @property
    def loaded(self) -> bool:
        """Return whether requests compete."""
        return bool(self.trace) or self.users > 1


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: a model, goals, a workload, and the machine. memory: bytes, None where only goals limit it."""

    config: ModelConfig
    storage: Storage
    goals: tuple[Goal, ...]
    workload: Workload
    profile: MachineProfile
    memory: int | None
    limits: StepLimits
    gpu: GpuSpec | None = None
    kv: str | None = None
    rows: int | None = None  # of a step, where they are set
    outputs: tuple[Weights, ...] = ()
    calib: str = "self"  # calibration text of recipes that read one
    factors: Mapping[str, float] = field(default_factory=dict)  # of ranges, by past errors (`history`)
    acceptance: float | None = None  # of drafts, where it was measured
    images: int = 0  # bytes of a vision tower and of features of images
    tower_size: int = 0  # bytes of a vision tower on disk
    vision: VisionConfig | None = None  # of the tower, where requests have images
    share: Share = planning.WHOLE  # of several GPUs, whose memory each is `memory`

    def steps(self, storage: Storage, kv: KvScheme) -> StepModel:
        """Return the step-time model of weights and a cache: of one GPU's part of all layers, because pipeline stages
        run one after another in decoding. So they do here for prompts, whose pieces really overlap: times of prompts
        are upper bounds with `pp`. What GPUs send each other takes no time. Raises UserError for weights that cannot be
        split so."""
        stage = planning.shared(self.config, storage, Share(0, self.share.tp))[1]
        return StepModel(stage, storage, kv, self.profile)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration with its predicted quantities, by the labels of goals (ttft_p95 and the like)."""

    weights: Weights
    kv: KvScheme
    rows: int
    fit: Fit
    fits: bool
    cells: Mapping[str, Cell]
    fitted: tuple[str, ...] = ()  # curves that the step-time model had to fit
    tried: bool = False  # whether it ran here: its times and divergence are then those of experiments
    technique: Technique | None = None

    @property
    def name(self) -> str:
        beside = "" if self.technique is None else f" + {self.technique.name}"
        return f"{self.weights.label} + {self.kv.name} KV{beside}"

    @property
    def assumed(self) -> bool:
        """Return whether its speed rests on an acceptance that nothing measured."""
        return self.technique is not None and self.technique.assumed

    def meets(self, goals: Sequence[Goal]) -> bool:
        """Return whether it fits and every quantity is within its limit."""
        return self.fits and all(each <= 1 for each in self.excess(goals).values())

    def cell(self, goal: Goal) -> Cell:
        """Return the quantity that a goal limits."""
        return self.cells[goal.label if goal.label in self.cells else f"{goal.name}_p95"]

    def excess(self, goals: Sequence[Goal]) -> dict[Goal, float]:
        """Return how many times over its limit each goal is."""
        return {goal: goal.excess(self.cell(goal).value) for goal in goals}


@dataclass(frozen=True)
class Answer:
    """The outcome: the best configuration, None where none meets the goals, all judged ones, and why others fell."""

    question: Question
    best: Configuration | None
    nearest: Configuration
    front: tuple[Configuration, ...]
    all: tuple[Configuration, ...]
    rejected: tuple[Rejected, ...]
    relaxed: Mapping[Goal, Configuration | None] = field(default_factory=dict)
    excluded: tuple[Rejected, ...] = ()  # those of `rejected` that no configuration could be made with

    @property
    def met(self) -> bool:
        return self.best is not None


def search(question: Question) -> Answer:
    """Judge every configuration. Raises UserError for a model or a workload that no plan can be made for."""
    candidates.check_size(question.config)
    planning.longest(question.config, question.workload.context)
    chosen, rejected = candidates.weights(
        question.config, question.storage, question.gpu, question.outputs, question.share
    )
    formats, refused = candidates.kv(question.config, question.gpu, question.kv, question.vision)
    work = question.workload
    beside, without = techniques.techniques(
        question.config, question.gpu, work.longest_prompt, work.context, question.acceptance, question.vision
    )
    rows = (question.rows,) if question.rows is not None else _rows(question)
    first = tuple(each for each in rows if each in ROWS[:2]) or rows
    found = [each for of in chosen for each in _configurations(question, of, formats, beside, first)]
    out = (*rejected, *refused, *without)
    answer = judged(question, found, out)
    # The memory of a step is a sum over all layers: further presets are tried with the best weights alone.
    if later := rows[len(first) :]:
        found += _configurations(question, answer.nearest.weights, formats, (), later)
        answer = judged(question, found, out)
    return answer


def judged(question: Question, found: Sequence[Configuration], rejected: Sequence[Rejected] = ()) -> Answer:
    """Judge configurations by the goals. `rejected` are techniques that none of them uses.

    Where some that ran here meet the goals, the best is one of them.
    """
    goals = question.goals
    possible = [each for each in found if each.fits]
    meeting = [each for each in possible if each.meets(goals)]
    known = [each for each in meeting if each.tried] or [each for each in meeting if not each.assumed]
    best = _best(known or meeting, goals)
    nearest = best or min(
        possible or found, key=lambda each: (max(each.excess(goals).values()), sum(each.excess(goals).values()))
    )
    weights = list({id(each.weights): each.weights for each in found}.values())
    formats = list({each.kv.name: each.kv for each in found}.values())
    why = [*rejected, *_rejections(weights, formats, found, meeting, goals)]
    for name in dict.fromkeys(each.technique.name for each in found if each.technique is not None):
        using = [each for each in found if each.technique is not None and each.technique.name == name]
        if not any(each.meets(goals) for each in using):
            why.append(Rejected(name, _why(using, goals)))
    relaxed = {}
    for goal in goals:
        wider = tuple(
            replace(g, limit=g.limit * (1.1 if g.bound == "<=" else 1 / 1.1)) if g is goal else g for g in goals
        )
        relaxed[goal] = _best([each for each in possible if each.meets(wider)], goals)
    front = _front(meeting or possible or found, goals)
    return Answer(question, best, nearest, front, tuple(found), tuple(why), relaxed, tuple(rejected))


def _configurations(
    question: Question, weights: Weights, formats: Sequence[KvScheme], beside: Sequence[Technique], rows: Sequence[int]
) -> list[Configuration]:
    """Return the configurations of one choice of weights: each KV format with each number of `rows` of a step, and with
    each technique at the first of these.

    All sums over weights are made once.
    """
    q, work = question, question.workload
    first = q.steps(weights.storage, formats[0])
    models = [first, *(first.with_kv(kv) for kv in formats[1:])]
    size = candidates.disk_bytes(q.config, weights.storage) + q.tower_size
    least = min(work.users, q.limits.sequences)
    found = []
    for number, each in enumerate(rows):
        limits = replace(q.limits, rows=max(each, q.limits.sequences) if each < least else each)
        deployment = Deployment(q.config, weights.storage, formats[0], q.share, q.gpu)
        divided = _divided(q, deployment, limits)
        for kv, model in zip(formats, models, strict=True):
            of_kv = quality.KV.get(kv.name)
            for technique in (None, *(each for each in beside if number == 0 and each.takes(kv))):
                taken = planning.with_kv(divided, _sparse(deployment, technique), kv, limits)
                taken = _shortened(q, taken, technique, limits)
                cost = weights.quality + of_kv if of_kv is not None else None
                if cost is not None and technique is not None:
                    cost += technique.cost
                seconds = techniques.changed(model, technique, work.longest_prompt)
                asked = _fewer(work, technique)
                latencies = _latencies(seconds, asked, limits, taken)
                needed = _needed(taken) + q.images
                spread = TowerSpread.of(work.encoding, latencies, asked.answer, work.loaded)
                cells = cells_of(cost, needed, size, seconds, latencies, technique, spread)
                fits = q.memory is None or needed <= q.memory
                found.append(Configuration(
                    weights, kv, limits.rows, taken, fits, widened(cells, q.factors), model.fitted, technique=technique,
                ))  # fmt: skip
    return found


def _rows(q: Question) -> tuple[int, ...]:
    """Return the numbers of rows to try: one that all prompts together do not fill is as the next smaller one, and one
    that an image does not fit into, whose rows see each other, is none."""
    work, least = q.workload, 0
    together = work.longest_prompt * work.users
    if q.vision is not None and q.vision.bidirectional and work.encoding is not None:
        least = work.encoding.load.rows + q.limits.sequences - 1 + q.limits.drafts
    more = tuple(each for each in ROWS[1:] if least <= each <= together)
    return (ROWS[0], *more) if work.loaded else ROWS[:1]


def _sparse(deployment: Deployment, technique: Technique | None) -> Deployment:
    return deployment if technique is None else replace(deployment, sparse=technique.sparse)


def _shortened(q: Question, taken: Fit, technique: Technique | None, limits: StepLimits) -> Fit:
    """Return the division of a server whose sequences drop keys: their cache has fewer blocks."""
    if technique is None or technique.eviction is None:
        return taken
    each = -(-technique.slots(q.workload.context, q.workload.longest_prompt) // BLOCK)
    least = 2 * -(-technique.eviction.budget // BLOCK)  # as `Eviction.check_room`
    return replace(taken, blocks=max(least, planning.blocks_for(q.workload.users, each, limits.headroom)))


def _fewer(work: Workload, technique: Technique | None) -> Workload:
    """Return a workload whose answers have as many tokens as they take steps, with the drafts of a technique."""
    if technique is None or not technique.drafts:
        return work
    _, tokens, _ = technique.tokens
    trace = tuple(replace(each, answer=math.ceil(each.answer / tokens)) for each in work.trace)
    return replace(work, answer=math.ceil(work.answer / tokens), trace=trace)


def _divided(q: Question, deployment: Deployment, limits: StepLimits) -> Fit:
    """Return the memory of a server with a cache for all users, whether that fits or not."""
    users, context = q.workload.users, q.workload.context
    blocks = planning.blocks_for(users, -(-context // BLOCK), limits.headroom)
    memory = q.memory if q.memory is not None else 1 << 62
    return planning.fit(deployment, memory, context, CacheLimits(blocks * BLOCK), limits)


def _needed(found: Fit) -> int:
    """Return the bytes that a server takes, with the cache that was asked for."""
    return found.memory - found.unused


def _latencies(model: StepModel | Changed, work: Workload, limits: StepLimits, taken: Fit) -> Latencies:
    capacity = Capacity(limits.rows, limits.sequences, taken.tokens)
    encoding = 0.0 if work.encoding is None else work.encoding.seconds
    if work.trace:
        return simulate.traced(model, work.trace, capacity)
    if work.users > 1:
        return simulate.closed(model, work.users, work.prompt, work.answer, capacity, encoding)
    return simulate.unloaded(model, work.prompt, work.answer, limits.rows, encoding)


def _best(meeting: Sequence[Configuration], goals: Sequence[Goal]) -> Configuration | None:
    """Return the best of the configurations that meet all goals.

    With a goal on quality that is the fastest. Where others are as fast, the divergence decides, then the memory, then
    the speed after all. Without such a goal it is the least divergence. Differences within SEPARATE do not count.
    """
    if not meeting:
        return None
    if any(goal.name in ("kl", "top1") for goal in goals):
        fastest = max(each.cells["tokens_per_second"].value for each in meeting)
        near = [each for each in meeting if each.cells["tokens_per_second"].value * (1 + SEPARATE) >= fastest]
        for name in ("kl", "memory"):
            least = min(each.cells[name].value for each in near)
            near = [each for each in near if each.cells[name].value <= least * (1 + SEPARATE)]
        return max(near, key=lambda each: (each.cells["tokens_per_second"].value, each.rows))
    least = min(each.cells["kl"].value for each in meeting)
    near = [each for each in meeting if each.cells["kl"].value <= least * (1 + SEPARATE)]
    return max(near, key=lambda each: (each.cells["tokens_per_second"].value, each.rows))


def _front(found: Sequence[Configuration], goals: Sequence[Goal]) -> tuple[Configuration, ...]:
    """Return the configurations that no other beats in divergence, memory, latency and throughput at once, fastest
    first."""
    names = (("kl", 1), ("memory", 1), ("ttft_p95", 1), ("tpot_p95", 1), ("tokens_per_second", -1))
    points = [tuple(sign * each.cells[name].value for name, sign in names) for each in found]

    def beaten(at: int) -> bool:
        own = points[at]
        for other, point in enumerate(points):
            if other == at:
                continue
            within = all(b <= a + SEPARATE * abs(a) for a, b in zip(own, point, strict=True))
            better = any(b < a - SEPARATE * abs(a) for a, b in zip(own, point, strict=True))
            if within and (better or other < at):
                return True
        return False

    kept = [each for at, each in enumerate(found) if not beaten(at)]
    return tuple(sorted(kept, key=lambda each: each.cells["tpot_p95"].value)[:FRONT])


def _rejections(
    weights: Sequence[Weights], formats: Sequence[KvScheme], found: Sequence[Configuration],
    meeting: Sequence[Configuration], goals: Sequence[Goal],
) -> list[Rejected]:  # fmt: skip
    """Return the weights and KV formats that no configuration meets the goals with, each with the number that
    decides."""
    out = []
    for of in weights:
        if not any(each.weights is of for each in meeting):
            out.append(Rejected(of.label, _why([each for each in found if each.weights is of], goals)))
    for kv in formats:
        if not any(each.kv is kv for each in meeting):
            out.append(Rejected(f"KV cache in {kv.name}", _why([each for each in found if each.kv is kv], goals)))
    return out


def _why(found: Sequence[Configuration], goals: Sequence[Goal]) -> str:
    """Return the goal that the nearest of some configurations misses most, with its value and label."""
    near = min(found, key=lambda each: (not each.fits, max(each.excess(goals).values())))
    if not near.fits:
        return f"memory {shown('memory', near.cells['memory'].value)} is more than there is"
    goal, excess = max(near.excess(goals).items(), key=lambda item: item[1])
    if excess <= 1:
        return "beaten in every quantity by another"
    cell = near.cell(goal)
    return (
        f"{goal.label} {shown(goal.name, cell.value)} ({cell.evidence}) is past {shown(goal.name, goal.limit)}, at best"
    )


def require_users(users: int) -> None:
    """Raise UserError for more users than a plan is made for."""
    if users > 1_000_000:
        raise UserError("option_out_of_range", f"a plan is for at most 1,000,000 users, not {users:,}")
