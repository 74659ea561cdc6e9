"""Memory that a step of the decoder needs besides weights and cache: an upper bound, from the shapes it allocates.

The bound follows `model/layers.py` line by line: which results are alive while the next one is made. N rows, hidden
size I, q, k and v side by side C, query heads together A, feed-forward width W; in float32 numbers per row:

    attention      2 I of the caller, stream, normed, q k v, rotated q, mixed, projected      5 I + C + 2 A
    second norm    2 I of the caller, the three before it, the two it makes                   7 I
    feed-forward   2 I of the caller, stream, normed, delta, gate and up (W where that is one
                   call, else 2 W and the W that is made of them), projected                 6 I + W or 3 W
    logits         of the sampled rows only                                                  the vocabulary

Besides these there are the buffers of the kernels' threads, the tables of rotary angles, and the workspace's free
pages. Results of a megabyte and more lie on pages of their own, of which up to `idle` bytes wait for the next step of
their size (`kernels/native/workspace.py`). Recorded decode steps (`execution/model_runner.py`) keep all their results.
Sampling works in float64 and sorts what its filters leave: up to `SAMPLING` bytes a logit (measured: 144, for flat
logits and a top-p of 0.99999).

Not included: the logits of a whole prompt, which callers must request in pieces of `sequences` rows.

Steps by the reference, for weights without a kernel, need some megabytes more for the rows it converts. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from attar.errors import UserError
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import Lookup, Progressive
from attar.model.config import ModelConfig
from attar.plan.costs import LANES, Storage, against, counted, matrices
from attar.protocol.scheduler_config import SchedulerConfig

LARGE = 1 << 20  # bytes from which a result has pages of its own
UNIT = 2 << 20  # pages of a large result come in multiples of this
IDLE = 512 << 20  # bytes of free pages kept for use, at most
SAMPLING = 150  # bytes a logit during sampling
SAMPLED = 8  # rows whose tokens are sampled together
THREAD = 1 << 20  # bytes of a thread's buffers that do not grow with the model
ANGLES = 256  # rows of a rotary table come in powers of two times this
TABLES = 8  # tables kept for a rope whose angles depend on the length
SPLIT, TILE = 512, 48  # slots and rows that attention handles at once


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes of the largest step, by use."""

    results: int  # alive at once
    idle: int  # kept warm between steps
    buffers: int  # of the kernels' threads
    sampling: int
    angles: int
    recorded: int  # results of recorded decode steps, which are never given back

    @property
    def total(self) -> int:
        return self.results + self.idle + self.buffers + self.sampling + self.angles + self.recorded


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of a step: tokens of all sequences together, and rows whose logits are computed, one for each sequence.

    `drafts` is the number of drafts of all sequences together, each of which has a row and logits too. `sampled` is the
    number of rows whose tokens are sampled at once; `recordings` is the number of recorded decode steps, each of up to
    `sequences` and `drafts` rows. `headroom` is the fraction of all cache blocks that an admission leaves to
    the running sequences. Raises ValueError for values out of range.
    """

    rows: int = 512
    sequences: int = 32
    sampled: int = SAMPLED
    recordings: int = 4
    threads: int = 1
    idle: int = IDLE
    headroom: float = 0.02  # as in `SchedulerConfig`, like rows, sequences and drafts
    drafts: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("rows", 1),
            ("sequences", 1),
            ("sampled", 1),
            ("threads", 1),
            ("recordings", 0),
            ("drafts", 0),
        ):
            if (value := getattr(self, name)) < low:
                raise UserError("option_out_of_range", f"{name} of a step are at least {low}, not {value}")
        if not 0 <= self.headroom < 1:
            raise UserError("option_out_of_range", f"the headroom is a share below 1, not {self.headroom:g}")

    @classmethod
    def of(cls, scheduler: SchedulerConfig, threads: int) -> StepLimits:
        """Bounds of a step on a CPU of so many threads: what memory is planned by, before a start and at it."""
        return cls(
            scheduler.max_step_tokens, scheduler.together, threads=threads, headroom=scheduler.headroom,
            drafts=scheduler.max_drafts,
        )  # fmt: skip


def largest_step(config: ModelConfig, storage: Storage, limits: StepLimits, context: int) -> StepBytes:
    """Return the bound for steps of sequences of up to `context` positions."""
    rows, logit_rows = limits.rows, min(limits.rows, limits.sequences + limits.drafts)
    phases = [*_phases(config, storage, rows), _logits(config, rows, logit_rows)]
    return StepBytes(
        results=max(sum(_taken(size) for size in phase) for phase in phases),
        idle=min(limits.idle, _idle(phases)),
        buffers=_buffers(config, storage, limits, context),
        sampling=min(logit_rows, limits.sampled) * config.vocab_size * SAMPLING,
        angles=_angles(config, context),
        recorded=limits.recordings * recorded_step(config, storage, limits.sequences + limits.drafts),
    )


def _phases(c: ModelConfig, storage: Storage, rows: int) -> Iterator[list[int]]:
    """Yield the bytes of the results that are alive together, phase by phase."""
    query, key = c.heads * c.head_dim, c.kv_heads * c.head_dim
    stream = [4 * rows * c.hidden]
    yield stream * 5 + [4 * rows * (query + 2 * key), 4 * rows * query, 4 * rows * query]
    yield stream * 7
    if not all(map(c.is_sparse, range(c.layers))):
        yield stream * 6 + _wide(c, 4 * rows * c.intermediate, _gated_at_once(c, storage))
    if c.experts is not None:  # all rows may choose the same expert: rows gathered, weighted, added
        width = max(c.experts.intermediate, c.experts.shared_intermediate)
        yield stream * 11 + _wide(c, 4 * rows * width, at_once=False)


def _wide(c: ModelConfig, size: int, at_once: bool) -> list[int]:
    if at_once:
        return [size]
    return [2 * size if c.gated else size, size]


def _gated_at_once(c: ModelConfig, storage: Storage) -> bool:
    """Return whether gate and up are one kernel call in every dense layer (`kernels.native.linear.gateable`)."""
    if not c.gated or len(c.names.gate_up) != 2 or references(c, storage):
        return False
    if not storage.schemes:
        return not _apart(storage.linears)
    stored = {each.name: storage.of(each) for each in matrices(c)}
    pairs = ([f"{c.names.layer.format(i=i)}.{name}" for name in c.names.gate_up] for i in range(c.layers))
    return all(stored.get(gate) == stored.get(up) and not _apart(stored.get(gate)) for gate, up in pairs)


def _apart(scheme: Scheme | None) -> bool:
    """Return whether the weight has a kernel of its own, which cannot make two products at once."""
    return scheme is not None and isinstance(scheme.weight, Lookup | Progressive)


def _logits(c: ModelConfig, rows: int, logit_rows: int) -> list[int]:
    """Return the results after the last block: stream and delta, both of the sampled rows, their norm, their logits."""
    copies = 1 if c.logit_soft_cap is None else 3
    return [4 * rows * c.hidden] * 2 + [4 * logit_rows * c.hidden] * 4 + [4 * logit_rows * c.vocab_size] * copies


def _taken(size: int) -> int:
    return size if size < LARGE else -(-size // UNIT) * UNIT


def _idle(phases: Iterable[list[int]]) -> int:
    """Return the bytes of free pages that steps of growing numbers of rows leave.

    For each kind of result there is every size up to its largest, as often as a step holds such results at once. This
    is the most that can accumulate.
    """
    alive: Counter[int] = Counter()
    for phase in phases:
        alive |= Counter(size for size in phase if size >= LARGE)
    units = {size: -(-size // UNIT) for size in alive}
    return sum(count * UNIT * units[size] * (units[size] + 1) // 2 for size, count in alive.items())


def _buffers(c: ModelConfig, storage: Storage, limits: StepLimits, context: int) -> int:
    """Return the bytes of buffers: rows rounded to int8 with scales and sums, a panel of weights a thread, attention's
    tiles."""
    stored = [(each, storage.of(each)) for each in matrices(c)]
    widest = -(-max(each.columns for each, _ in stored) // 64) * 64
    tiles = -(-limits.rows // 16) * 16
    rounded = tiles * widest + limits.rows * widest // 4  # one scale and one sum for 32 columns, at the finest
    native = [each for each, scheme in stored if scheme is None and each.part == "linears" and each.compressible]
    gate = 8 * limits.rows * max((each.rows for each in native), default=0) if c.gated else 0
    panels = limits.threads * (64 * widest + THREAD)
    record = 4 * TILE * (2 + -(-c.head_dim // LANES) * LANES)
    splits = 4 * limits.threads * (-(-context // SPLIT) + 1) * record
    return rounded + gate + panels + splits


def _angles(c: ModelConfig, context: int) -> int:
    """Return the bytes of cosines and sines of every position, for each rope."""
    blocks = -(-context // ANGLES)
    positions = (1 << (blocks - 1).bit_length()) * ANGLES
    ropes = {rope for rope in c.ropes if rope is not None}
    return sum(4 * positions * rope.dims * (TABLES if rope.grows else 1) for rope in ropes)


def recorded_step(config: ModelConfig, storage: Storage, rows: int) -> int:
    """Return the bytes that a recorded decode step of `rows` sequences keeps: all of its results, because none may
    move. 0 for models whose steps cannot be recorded."""
    c = config
    if c.experts is not None or references(c, storage):
        return 0
    query, key = c.heads * c.head_dim, c.kv_heads * c.head_dim
    posts = sum(name is not None for name in (c.names.attention_post_norm, c.names.feed_forward_post_norm))
    layer = [c.hidden] * (6 + posts) + [query + 2 * key, query, query]
    layer += _wide(c, c.intermediate, _gated_at_once(c, storage))
    ends = [c.hidden] * 3 + [c.vocab_size]
    return sum(_taken(4 * rows * size) for size in layer * c.layers + ends)


def references(config: ModelConfig, storage: Storage) -> dict[str, str]:
    """Return the linears that no kernel multiplies by, with the reason. A server is slow on them, and holds them
    twice."""
    if all(against(storage.of(each)) is None for each, _ in counted(config, storage)):
        return {}
    found = ((each.name, against(storage.of(each))) for each in matrices(config))
    return {name: reason for name, reason in found if reason is not None}
