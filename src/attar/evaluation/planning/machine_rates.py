"""Measure a machine profile: bandwidth, rates of operations, products by rows, attention, and what a step takes beside.

`attar bench --rates` and a plan that finds no kept profile do so. Products and steps are those of a small model with
random weights, whose speed is that of any model of its shape. All numbers of rows are measured in turn, again and
again, so other work on the machine favours none. Medians count, and half the range over the median is the spread.

Weights of one scheme together are larger than a core's own cache, as those of a served model are. What a larger cache
shared by all cores keeps from step to step is measured with them.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from attar.errors import UserError
from attar.evaluation.decode_speed import RandomWeights
from attar.execution.recorded_step import Decoding
from attar.kernels import dispatch, ops, tiles
from attar.kernels.dispatch import BackendWeights
from attar.kernels.native import extension, limits
from attar.kernels.operands import AttentionForm, Linear, Prepared
from attar.kv.schemes import SCHEMES, KvScheme
from attar.model import assembly
from attar.model.cache import ForwardBatch, KVCache
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.families import read_config
from attar.model.vision.tiles import TILE
from attar.plan.rates import store
from attar.plan.rates.profile import (
    DENSE,
    MEASURED_KV,
    MEASURED_SCHEMES,
    NO_OVERHEADS,
    AttentionCost,
    MachineProfile,
    Overheads,
    ProductCurve,
    Rate,
)

SECONDS = 60.0  # for a whole profile, and 3 for each further scheme
SCHEME_SECONDS = 3.0
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
LARGE = 64  # rows from which a layer's products are enough to time
LAYERS, CACHES = 2, 24  # different layers of weights, and layers of caches that a decode row reads
READ = 256 << 20  # bytes of weights: more than caches keep from step to step
ROUNDS, MOST_ROUNDS = 7, 25
CONTEXT, PROMPT = 4096, 256  # positions of a decode row, rows of a prompt
HEAD_DIM, KV_HEADS, HEADS = 64, 4, 16
GROUPS = (1, 4, 8)  # query heads that share a KV head
STEP_ROWS = (1, 4, 16)
VOCABULARY = 32768

Told = Callable[[str], None]


def _shape(hidden: int, width: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return read_config({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 2048, "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    })  # fmt: skip


WIDE = _shape(1024, 4096, LAYERS, 16, 4)
DEEP = _shape(512, 1536, 28, 8, 4)
WIDE_WEIGHTS = 16 << 20  # weights of enough blocks to time products of many rows


def measure(schemes: Iterable[str] = (), tell: Told = lambda _: None, usual: bool = True) -> MachineProfile:
    """Measure this machine at the present number of threads.

    `schemes` are measured beside the usual three, of which without `usual` only dense weights are. Raises UserError
    (`device_unsupported`) where no kernels load.
    """
    since = time.perf_counter()
    if not extension.loaded():
        reason = dispatch.candidates("linear")[0][1]
        raise UserError("device_unsupported", f"there are no rates to measure: {reason}")
    extension.fit_threads()
    tell("bandwidth and operations")
    found = [limits.measure() for _ in range(ROUNDS)]
    products = {}
    for name in dict.fromkeys((*(MEASURED_SCHEMES if usual else (DENSE,)), *schemes)):
        tell(f"products with {name} weights")
        products[name] = product_curve(name)
    attention = {}
    for name in MEASURED_KV:
        tell(f"attention on {name}")
        attention[name] = attention_cost(SCHEMES[name])
    key = replace(store.key(), threads=torch.get_num_threads())
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    dense = products[DENSE]
    made = MachineProfile(
        key, extension.cpu_level(), now.isoformat().replace("+00:00", "Z"),
        rate([each.read_gb_s * 1e9 for each in found]), rate([each.int8_gops * 1e9 for each in found]),
        None if found[0].tile_gops is None else rate([1e9 * (each.tile_gops or 0.0) for each in found]),
        Rate(max(2.0 * n / s for n, s in zip(dense.rows, dense.seconds, strict=True)), dense.spread),
        products, attention, NO_OVERHEADS, bf16_tiles=bf16_tiles(),
    )  # fmt: skip
    tell("what a step takes beside products and attention")
    made = replace(made, overheads=overheads())
    return replace(made, seconds=round(time.perf_counter() - since, 1))


def extended(profile: MachineProfile, schemes: Iterable[str]) -> MachineProfile:
    """Return a profile with the curves of further schemes, measured now."""
    more = {name: product_curve(name, SCHEME_SECONDS) for name in schemes if name not in profile.products}
    return replace(profile, products={**profile.products, **more})


def with_tiles(profile: MachineProfile) -> MachineProfile:
    """Return a profile with the rate of products in bfloat16, measured now where it has none."""
    return profile if profile.bf16_tiles is not None else replace(profile, bf16_tiles=bf16_tiles())


@torch.inference_mode()
def bf16_tiles() -> Rate | None:
    """Measure products in bfloat16 as vision towers compute them: `TILE` rows with the weights of a block. None where
    the processor has no tiles for them."""
    if not tiles.faster():
        return None
    hidden, width = WIDE.hidden, WIDE.intermediate
    shapes = ((3 * hidden, hidden), (hidden, hidden), (width, hidden), (hidden, width))
    weights = [torch.randn(shape).bfloat16() for shape in shapes]
    rows = {columns: torch.randn(TILE, columns).bfloat16() for columns in (hidden, width)}
    operations = 2.0 * TILE * sum(weight.numel() for weight in weights)

    def block() -> None:
        for weight in weights:
            torch.nn.functional.linear(rows[weight.shape[1]], weight)

    block()
    return rate([operations / _timed(block) for _ in range(MOST_ROUNDS)])


def rate(values: Sequence[float]) -> Rate:
    """Return the median of repeated measurements, and half their range over it."""
    middle = statistics.median(values)
    return Rate(middle, (max(values) - min(values)) / 2 / middle)


@torch.inference_mode()
def product_curve(name: str, seconds: float = SECONDS / 10) -> ProductCurve:
    """Measure products with weights of one scheme, by its short name or `bf16`, for about so many seconds. Raises
    UserError for an unknown scheme, and where no kernel multiplies by it."""
    since = time.perf_counter()
    wide, narrow = _linears(name, WIDE, READ), _linears(name, DEEP, READ // 4)
    steps = [_Products(layers, rows) for layers in (wide, narrow) for rows in ROWS]
    for number in range(MOST_ROUNDS):
        begun = time.perf_counter()
        for step in steps:
            step.time(number > 0)  # the first is a warm-up
        now = time.perf_counter()
        if number >= ROUNDS and now + (now - begun) > since + seconds:
            break
    rates = [rate(step.seconds) for step in steps]
    found = tuple(each.value for each in rates)
    read = _read_bytes(wide[0]) / _weights(wide[0])
    outputs = tuple(_weights(block) / sum(each.shape[1] for each in block) for block in (wide[0], narrow[0]))
    spread = statistics.median(each.spread for each in rates)
    return ProductCurve(read, ROWS, found[: len(ROWS)], spread, found[len(ROWS) :], (outputs[0], outputs[1]))


class _Products:
    """Products of `rows` rows with some blocks, recorded, and the seconds that they took over their weights."""

    def __init__(self, layers: Sequence[Sequence[Linear]], rows: int) -> None:
        used = layers if rows < LARGE else layers[: max(1, WIDE_WEIGHTS // _weights(layers[0]))]
        self._recording, self._count = _recorded(used, rows), sum(map(_weights, used))
        self.seconds: list[float] = []

    def time(self, kept: bool) -> None:
        """Run them once."""
        spent = _timed(self._recording.replay)
        if kept:
            self.seconds.append(spent / self._count)


def _weights(block: Iterable[Linear]) -> int:
    return sum(each.shape[0] * each.shape[1] for each in block)


def _recorded(layers: Sequence[Sequence[Linear]], rows: int) -> extension.Recording:
    """Return the products of some blocks, recorded as those of a decode step are: without Python between them."""
    inputs = {each.shape[1]: torch.randn(rows, each.shape[1]) for each in layers[0]}
    with extension.record() as recording:
        for query, key, value, output, gate, up, down in layers:
            for together in ((query, key, value), (output,), (gate, up), (down,)):
                ops.linear(inputs[together[0].shape[1]], together)
    recording.tensors += inputs.values()
    return recording


def _linears(name: str, config: ModelConfig, least: int) -> list[list[Linear]]:
    """Return the linear layers of some blocks with random weights, laid out for the kernels: `least` bytes or more, so
    that they are read from where a served model's are."""
    weights, made, store_of = RandomWeights(config, name, "bf16"), list[list[Linear]](), _store()
    names = config.names
    inside = (*names.qkv, names.output, *names.gate_up, names.down)
    sources = [[weights.linear(f"{names.layer.format(i=layer)}.{each}") for each in inside] for layer in range(LAYERS)]
    read = 0
    while read < least:
        block = [Linear(each.name, each.weight, each.bias) for each in sources[len(made) % LAYERS]]
        for each in block:
            store_of.take(each)
        if store_of.refused:
            reason = next(iter(store_of.refused.values()))
            raise UserError("scheme_unsupported", f"no kernel multiplies by {name} weights: {reason}")
        read += _read_bytes(block)
        made.append(block)
    return made


def _read_bytes(linears: Iterable[Linear]) -> int:
    return sum(each.weight.read_bytes for each in linears if isinstance(each.weight, Prepared))


def _store() -> BackendWeights:
    made = dispatch.store()
    assert made is not None, "the extension is loaded"
    return made


@torch.inference_mode()
def attention_cost(scheme: KvScheme) -> AttentionCost:
    """Measure attention on a cache of one KV scheme, of several layers that no core's cache holds."""
    runs = [_attention(scheme, group * KV_HEADS, 1, CONTEXT) for group in GROUPS]
    runs.append(_attention(scheme, HEADS, PROMPT, CONTEXT // 4))
    found: list[list[float]] = [[] for _ in runs]
    for number in range(2 * ROUNDS + 1):
        for run, seconds in zip(runs, found, strict=True):
            spent = _timed(run.replay) / len(run.calls)
            if number:  # the first is a warm-up
                seconds.append(spent)
    *single, prompt = [rate(seconds) for seconds in found]
    numbers = CONTEXT * HEAD_DIM * 2 * KV_HEADS
    cost = AttentionCost(GROUPS, tuple(each.value / numbers for each in single), 0.0)
    slots = CONTEXT // 4 + PROMPT
    further = PROMPT * (CONTEXT // 4) + PROMPT * (PROMPT + 1) // 2 - slots
    read = slots * HEAD_DIM * 2 * KV_HEADS * cost.stored(HEADS / KV_HEADS)
    score = max(0.0, (prompt.value - read) / (further * HEADS * HEAD_DIM))
    return replace(cost, prefill_score=score, spread=statistics.median(each.spread for each in (*single, prompt)))


def _attention(scheme: KvScheme, heads: int, rows: int, before: int) -> extension.Recording:
    """Return each layer's attention of `rows` rows behind `before` positions, recorded as that of a step is."""
    layers = CACHES if rows == 1 else LAYERS
    config = _shape(heads * HEAD_DIM, 64, layers, heads, KV_HEADS)
    cache = KVCache(config, before + rows, 1, scheme)
    cache.filled = [before]
    _touch(cache)
    place = cache.place((rows,))
    form = AttentionForm(heads, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
    queries = torch.randn(rows, heads, HEAD_DIM)
    with extension.record() as recording:
        for pages in cache.layers:
            ops.paged_attention(queries, pages, place, form)
    kept = (place.row_starts, place.lengths, place.block_tables, place.positions, place.slot_mapping)
    recording.tensors += [queries, *kept, *(part for pages in cache.layers for part in pages.parts())]
    return recording


def _touch(cache: KVCache) -> None:
    """Write a cache's memory: unwritten memory is one page of zeros, read from a core's own cache."""
    for pages in cache.layers:
        for part in pages.parts():
            part.zero_()


def overheads() -> Overheads:
    """Measure what a decode step takes beside products and attention, on two models of different depth and width.

    Calls of a recorded step are timed one by one. Norms, roundings and writes of the cache give the parts of a layer,
    by least squares without negative parts. Time outside of all calls is that of the step itself, and per layer of the
    deeper model that of a step with rows of a prompt.
    """
    rows, beside, outside = list[tuple[float, float]](), list[float](), list[float]()
    decoders = [assembly.build(each, RandomWeights(each, "w4g128", "bf16"), None, _store()) for each in (WIDE, DEEP)]
    for decoder in decoders:
        config = decoder.config
        for count in STEP_ROWS:
            calls, python = _beside(decoder, count)
            rows.append((config.layers, config.layers * count * config.hidden))
            beside.append(calls)
            outside.append(python)
    prompt = _python(decoders[-1], STEP_ROWS[-1]) / DEEP.layers
    layer, element = _non_negative(np.array(rows), np.array(beside))
    logits = torch.randn(1, VOCABULARY)
    chosen = statistics.median(_timed(lambda: ops.argmax(logits)) for _ in range(ROUNDS))
    return Overheads(statistics.median(outside), layer, element, chosen / VOCABULARY, prompt)


@torch.inference_mode()
def _python(decoder: Decoder, rows: int) -> float:
    """Return the median seconds outside of all calls of a step with rows of a prompt."""
    tokens, found = torch.ones(rows, dtype=torch.int64), list[float]()
    for _ in range(2 * ROUNDS):
        cache = decoder.cache(rows, 1, SCHEMES["float32"])
        batch, last, before = ForwardBatch((rows,), rows, cache), torch.tensor([rows - 1]), extension.busy_seconds()
        spent = _timed(lambda: decoder.forward(tokens, batch, last))  # noqa: B023
        found.append(spent - (extension.busy_seconds() - before))
    return statistics.median(found[1:])


@torch.inference_mode()
def _beside(decoder: Decoder, sequences: int) -> tuple[float, float]:
    """Return the median seconds of a decode step's calls that are neither products nor attention, and outside of all
    calls, for so many sequences of `PROMPT` tokens."""
    steps = 4 * ROUNDS
    cache = decoder.cache(PROMPT + steps, sequences, SCHEMES["float32"])
    cache.filled = [PROMPT - steps] * sequences
    _touch(cache)
    decoding = Decoding(decoder, cache, PROMPT + steps)
    tokens, python = [1] * sequences, list[float]()
    for _ in range(2 * ROUNDS):
        before = extension.busy_seconds()
        spent = _timed(lambda: decoding.step(tokens))
        python.append(spent - (extension.busy_seconds() - before))
    calls = [(call, args) for call, args in decoding.calls if call.__name__ not in ("linear", "attention")]
    timed = [sum(_timed(lambda: call(*args)) for call, args in calls) for _ in range(2 * ROUNDS)]  # noqa: B023
    return statistics.median(timed[1:]), statistics.median(python[1:])


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _non_negative(rows: np.ndarray, left: np.ndarray) -> tuple[float, float]:
    """Return the least-squares solution of rows * x = left, of relative errors, without negative parts."""
    weighted = rows / left[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    both = np.linalg.lstsq(weighted / scale, np.ones(len(left)), rcond=None)[0] / scale
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = weighted.sum(0) / (weighted**2).sum(0)
    errors = ((weighted * alone - 1) ** 2).sum(0)
    return (float(alone[0]), 0.0) if errors[0] <= errors[1] else (0.0, float(alone[1]))


def to_text(profile: MachineProfile) -> str:
    """Return a profile as text for a terminal."""

    def shown(found: Rate, unit: str) -> str:
        return f"{found.value / 1e9:.1f} {unit} ± {found.spread:.0%}"

    tile = "" if profile.tile is None else f", tiles {shown(profile.tile, 'GOP/s')}"
    lines = [
        f"{'bandwidth':<12}{shown(profile.bandwidth, 'GB/s')}",
        f"{'operations':<12}int8 {shown(profile.int8, 'GOP/s')}{tile}, bf16 {shown(profile.bf16, 'GOP/s')}",
    ]
    if profile.bf16_tiles is not None:
        lines.append(f"{'bf16 tiles':<12}{shown(profile.bf16_tiles, 'GOP/s')}, of {TILE} rows")
    for name, curve in profile.products.items():
        first = curve.seconds[0]
        costs_of = ", ".join(f"{n}: {s / first:.2f}" for n, s in zip(curve.rows, curve.seconds, strict=True))
        lines.append(
            f"{name:<12}{curve.bytes / first / 1e9:.1f} GB/s at one row ± {curve.spread:.0%}; T(rows)/T(1) {costs_of}"
        )
    for name, cost in profile.attention.items():
        each = ", ".join(
            f"{group}: {2e9 * seconds * HEAD_DIM:.1f}" for group, seconds in zip(cost.groups, cost.seconds, strict=True)
        )
        lines.append(
            f"{name:<12}ns a position and KV head of {HEAD_DIM}, by query heads that share it: {each}; "
            f"{1e9 * cost.prefill_score * HEAD_DIM:.2f} ns a query head in prompts ± {cost.spread:.0%}"
        )
    beside = profile.overheads
    lines.append(
        f"{'beside':<12}{1e6 * beside.step:.0f} us a step, {1e6 * beside.layer:.1f} us a layer, "
        f"{1e12 * beside.element:.1f} ns for 1,000 numbers of a row and layer, "
        f"{1e6 * beside.prompt:.0f} us more a layer with rows of prompts"
    )
    lines.append(f"{profile.key.machine}; {profile.isa}, {profile.key.threads} threads; {profile.seconds:.0f} s")
    return "\n".join(lines)
