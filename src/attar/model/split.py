"""The parts of a model in several processes, as arithmetic. Torch-free, so that `plan` can use it.

**Tensor parallel** (`tp` processes compute one block together; Shoeybi et al. 2019). Each holds some of the heads and
some of the feed-forward's width, so a block needs no exchange within its two halves, and one sum behind each:

    q, k, v, gate, up   cut by outputs: whole heads, and ranges of the width. Biases are cut alike.
    output, down        cut by inputs, the same heads and ranges: each process has a part of every sum, and the parts
                        are added up (`Block.sum`). The bias is in the first process's part; in the others it is zero.
    fused q k v         three ranges of rows, fused gate and up two, in one matrix again.
    experts             every expert is cut as a feed-forward is; the router and the shared expert's gate are whole, so
                        that all processes choose alike, and one sum serves them all.
    embedding, head     cut by vocabulary: a row that another process has is zero here, and rows are added up; logits
                        are gathered by the first process, which alone chooses tokens. Tied, they stay one matrix.
    norms, positions    whole.
    adapters            B by outputs or A by inputs, as their linear; so none of them adds an exchange.

Query heads stay with the key-value head they read. There are as many key-value heads as processes or a multiple, or
each is held by several: then their keys and values are computed and cached more than once.

A quantized weight is cut between groups (`formats/cuts.py`). Cut by inputs elsewhere, a group would need a scale of its
own on each side, which is another weight: such a model is refused before anything is read, with the layer's name and
working alternatives. A model whose columns are stored in another order (GPTQ's act-order, found when the layer is read)
is refused too, because its ranges of inputs are not ranges of heads.

The results differ from one process's by rounding alone. Sums are taken in another order: some 1e-6 of a logit's size in
float32, bfloat16's rounding steps in bfloat16. Where rows are rounded to a grid by their own largest number (w8a8,
fp8), a row that is cut by inputs has one scale in each process. Each is as fine as the whole row's or finer: a
different rounding of the same size. Fixed scales, and scales of groups that are cut whole (int8g128 on CPUs), are the
same; there only a number on the boundary between two codes may round to the other one.

**Pipeline parallel** (`pp` stages, contiguous layers each). Hidden states go from stage to stage and back to the first.
It has embedding, final norm and LM head, so a tied matrix is held once and the process that samples tokens has the
logits. Where layers do not divide evenly, the first stages have more, so the first process, whose memory is counted and
measured for all, holds the most of everything. Numbers are one process's, bit for bit on CPUs. Stages work at the same
time only on a step of many rows, such as a prompt's: it goes through them in pieces of some hundred rows
(`parallel.PIECE`), which takes (m + pp - 1) / (m pp) of the time for m pieces. A step of fewer rows runs through one
stage after another, and decoding is as fast as in one process with all layers: a piece of a decode step would read
every weight again, which bounds its speed. So the gain of stages is first of all memory.

Combined, there are `tp` processes a stage, and each sends to the process of its place in the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from attar.errors import UserError
from attar.formats.cuts import Range, grain
from attar.formats.scheme import Scheme
from attar.model.config import Experts, ModelConfig

LANES = 16  # rows of the vocabulary that stay together: as many as kernels multiply at once


@dataclass(frozen=True, slots=True)
class Share:
    """The part of one process, `rank` of `tp * pp`. Raises ValueError where `tp` or `pp` is below 1."""

    rank: int = 0
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("--tp", self.tp), ("--pp", self.pp)):
            if value < 1:
                raise UserError("option_out_of_range", f"{name} is a number of processes, at least 1, not {value}")
        assert 0 <= self.rank < self.count

    @property
    def count(self) -> int:
        return self.tp * self.pp

    @property
    def place(self) -> int:
        """Number among the processes that compute the same layers."""
        return self.rank % self.tp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    def every(self) -> Iterator[Share]:
        """Return all processes' parts, the first's first."""
        return (replace(self, rank=rank) for rank in range(self.count))


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a linear layer [O, I] that a process keeps: ranges of outputs, or one of inputs; None: all."""

    rows: tuple[Range, ...] | None = None
    columns: Range | None = None
    bias: bool = True  # whether this process adds the bias

    def shape(self, whole: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the kept part of a linear layer of shape (out, in)."""
        rows = whole[0] if self.rows is None else sum(stop - start for start, stop in self.rows)
        return rows, whole[1] if self.columns is None else self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Split:
    """One process's part of a model."""

    config: ModelConfig  # of the whole
    share: Share
    block: ModelConfig  # of its part of every layer
    layers: range
    vocabulary: Range | None  # rows of embedding and LM head; None: it has neither
    cuts: Mapping[str, Cut]  # of linear layers that are not whole, by name

    @property
    def own(self) -> ModelConfig:
        """Configuration of its part: its heads and its layers, but the whole vocabulary, the width of its results."""
        part = slice(self.layers.start, self.layers.stop)
        block = self.block
        return replace(block, windows=block.windows[part], ropes=block.ropes[part], sparse=block.sparse[part])


def split(config: ModelConfig, share: Share, schemes: Mapping[str, Scheme | None]) -> Split:
    """Return the part of `share`. `schemes` maps linear layers to their stored schemes; others are dense.

    Raises ValueError where the model cannot be split in this way, with working alternatives.
    """
    _check_heads(config, share)
    if share.pp > config.layers:
        raise _indivisible(f"--pp {share.pp} is more stages than the model has layers, {config.layers}")
    tp, experts = share.tp, config.experts
    block = replace(
        config,
        heads=config.heads // tp,
        kv_heads=max(1, config.kv_heads // tp),
        intermediate=_width(config.intermediate, share, "the feed-forward"),
        experts=None if experts is None else _experts(experts, share),
    )
    cuts: dict[str, Cut] = {}
    vocabulary = None
    if share.stage == 0:
        vocabulary = _vocabulary(config, share, schemes.get(config.names.head))
        if tp > 1:
            cuts[config.names.head] = Cut(rows=(vocabulary,))
    layers = stage_layers(config.layers, share)
    if tp > 1:
        for layer in layers:
            cuts |= _layer(config, share, layer)
    for name, cut in cuts.items():
        _check_grain(name, cut, schemes.get(name), config, share)
    return Split(config, share, block, layers, vocabulary, cuts)


def stage_layers(count: int, share: Share) -> range:
    """Return the layers of a stage: as even as possible, the longer stages first."""
    first, last = (-(-count * stage // share.pp) for stage in (share.stage, share.stage + 1))
    return range(first, last)


def _check_heads(config: ModelConfig, share: Share) -> None:
    tp = share.tp
    if config.heads % tp:
        raise _indivisible(f"--tp {tp} does not divide the model's {config.heads} query heads: {_would_do(config)}")
    if config.kv_heads % tp and tp % config.kv_heads:
        raise _indivisible(
            f"--tp {tp} neither divides the model's {config.kv_heads} key-value heads nor is a multiple of their "
            f"number: {_would_do(config)}"
        )


def _indivisible(problem: str) -> UserError:
    return UserError("parallel_indivisible", problem)


def _would_do(config: ModelConfig) -> str:
    heads, kv_heads = config.heads, config.kv_heads
    fitting = [n for n in range(2, heads + 1) if not heads % n and (not kv_heads % n or not n % kv_heads)]
    return f"{', '.join(map(str, fitting[:6]))} would do" if fitting else "no other number would"


def _width(width: int, share: Share, what: str) -> int:
    if width % share.tp:
        raise _indivisible(f"--tp {share.tp} does not divide the width of {what}, {width}")
    return width // share.tp


def _experts(experts: Experts, share: Share) -> Experts:
    shared = _width(experts.shared_intermediate, share, "the shared expert")
    return replace(experts, intermediate=_width(experts.intermediate, share, "an expert"), shared_intermediate=shared)


def _vocabulary(config: ModelConfig, share: Share, scheme: Scheme | None) -> Range:
    unit = math.lcm(LANES, grain(scheme)[0]) if share.tp > 1 else 1
    each = -(-config.vocab_size // (share.tp * unit)) * unit
    if each * (share.tp - 1) >= config.vocab_size:
        raise _indivisible(
            f"--tp {share.tp} is too many for a vocabulary of {config.vocab_size}, cut in pieces of {unit}"
        )
    return each * share.place, min(each * (share.place + 1), config.vocab_size)


def _layer(config: ModelConfig, share: Share, layer: int) -> dict[str, Cut]:
    names, at, size = config.names, config.names.layer.format(i=layer), config.head_dim
    queries = _part(config.heads, share)
    keys = _part(config.kv_heads, share)
    if config.kv_heads < share.tp:
        keys = (share.place * config.kv_heads // share.tp, share.place * config.kv_heads // share.tp + 1)
    heads = [(first * size, last * size) for first, last in (queries, keys, keys)]
    of_heads = (config.heads * size, config.kv_heads * size, config.kv_heads * size)
    cuts = dict(_side_by_side(at, names.qkv, heads, of_heads))
    cuts[f"{at}.{names.output}"] = Cut(columns=heads[0], bias=share.place == 0)
    if config.experts is None or not config.is_sparse(layer):
        return cuts | _feed_forward(config, share, at, names.gate_up, names.down, config.intermediate)
    experts = config.experts
    modules = [(names.expert.format(e=e), experts.intermediate) for e in range(experts.count)]
    modules += [(names.shared_expert, experts.shared_intermediate)] if experts.shared else []
    for module, width in modules:
        cuts |= _feed_forward(config, share, f"{at}.{module}", names.expert_gate_up, names.expert_down, width)
    return cuts


def _feed_forward(
    config: ModelConfig, share: Share, at: str, up: tuple[str, ...], down: str, width: int
) -> dict[str, Cut]:
    own, count = _part(width, share), 2 if config.gated else 1
    cuts = dict(_side_by_side(at, up, [own] * count, (width,) * count))
    return cuts | {f"{at}.{down}": Cut(columns=own, bias=share.place == 0)}


def _part(count: int, share: Share) -> Range:
    each = count // share.tp
    return each * share.place, each * (share.place + 1)


def _side_by_side(
    at: str, names: tuple[str, ...], parts: list[Range], sizes: tuple[int, ...]
) -> Iterator[tuple[str, Cut]]:
    """Yield the cut of each linear layer; one name for several parts means fused storage, in that order of rows."""
    if len(names) == len(parts):
        yield from ((f"{at}.{name}", Cut(rows=(part,))) for name, part in zip(names, parts, strict=True))
        return
    (name,), first, fused = names, 0, []
    for (start, stop), size in zip(parts, sizes, strict=True):
        fused.append((first + start, first + stop))
        first += size
    yield f"{at}.{name}", Cut(rows=tuple(fused))


def _check_grain(name: str, cut: Cut, scheme: Scheme | None, config: ModelConfig, share: Share) -> None:
    try:
        rows, columns = grain(scheme)
    except ValueError as error:
        raise UserError("parallel_unsupported", f"{name}: {error}: --tp needs another scheme, and --pp none") from None
    for ranges, unit, what in ((cut.rows, rows, "outputs"), (cut.columns and (cut.columns,), columns, "inputs")):
        for start, stop in ranges or ():
            if start % unit or (stop % unit and stop != config.vocab_size):
                assert scheme is not None, "a dense weight is cut anywhere"
                raise _indivisible(
                    f"{name}: --tp {share.tp} would cut its {what} at {start} and {stop}, but {scheme.name} is cut at "
                    f"multiples of {unit}; {_another(name, unit, what == 'inputs', stop - start, config, share)}"
                )


def _another(name: str, unit: int, inputs: bool, size: int, config: ModelConfig, share: Share) -> str:
    """Return alternatives in words: fewer processes, or groups that divide."""
    whole = size * share.tp
    fewer = [n for n in range(share.tp - 1, 1, -1) if not config.heads % n and not whole % (n * unit)]
    groups = [g for g in (128, 64, 32, 16) if not size % g and g < unit]
    ways = [f"--tp {fewer[0]}"] if fewer else []
    ways += [f"groups of {groups[0]}"] if inputs and groups else []
    return f"{' or '.join([*ways, '--pp'])} would do"
