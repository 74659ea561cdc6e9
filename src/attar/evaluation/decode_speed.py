"""Body of `attar bench`: the speed of a model on this machine, beside the machine's limits.

The model is a checkpoint, or only a shape with random weights, whose speed is the same. Every figure of the model is a
total of this run, or a mean, which is the same: fractions of one step's time agree with tokens a second. The machine's
limits, medians, are measured in the run too, since another program can halve them.

* prefill: prompt tokens of all sequences over the time to their first new tokens;
* decode: the tokens of all sequences after that, over their time;
* bytes per token: weights that one decode step reads, as laid out in memory (the cache is not counted);
* read fraction: bytes per token times steps a second over the read bandwidth;
* compute fraction: operations of the linears in prefill over the int8 peak of four-byte dot products, which AMX tiles
  can exceed; `tile_fraction` is over theirs;
* `peak_rss_mb`: the process's peak memory, less its memory before the model was loaded.

Weights that fit the processor's cache are read from there in each step but the first. The read fraction, which is of
memory, can then exceed 1: the report says where that may be.

On a GPU, steps are replayed from a graph, the bandwidth is that of a copy, which reads and writes, and the peak that of
torch's product of bfloat16 numbers. There `roof_fraction` is the least time of a decode step by `plan/roofline.py` over
the measured time. The least time is that to read weights, keys and values, or to compute products and attention, each
at torch's own rate for its dtypes. `limited_by` names the larger of the two.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.sources import hf, opening
from attar.checkpoints.sources.opening import stored
from attar.engine import bottleneck
from attar.engine.llm.running import PREFILL_ROWS
from attar.errors import UserError
from attar.evaluation import row_costs
from attar.execution import kv_cache as engine_kv
from attar.execution.parallel.executor import ParallelExecutor
from attar.execution.recorded_step import Decoding
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import HEADS, Scheme
from attar.formats.weight_formats import Sparse24
from attar.kernels import dispatch, ops
from attar.kernels.dispatch import BackendWeights
from attar.kernels.native import extension, limits
from attar.kernels.operands import Linear, Prepared
from attar.kernels.triton.store import GpuWeights
from attar.kv.pages import Bases
from attar.kv.schemes import KvScheme
from attar.model import assembly
from attar.model.cache import BLOCK, ForwardBatch
from attar.model.config import ModelConfig
from attar.model.decoder import Decoder
from attar.model.shapes import shape
from attar.model.split import Share
from attar.plan.costs import Storage
from attar.plan.fit import shared
from attar.plan.roofline import Roofline

WARM_UP = 16  # tokens of the warm-up prompt, untimed except its first token
SEED = 20
REPEATED = 64  # rows of a form that is not a grid

Part = tuple[ModelConfig, Storage]
"""A model, or the part of it that one of several processes computes, and the storage of its weights."""


@dataclass(frozen=True)
class Load:
    """Size of the run: prompt tokens, new tokens and sequences; numbers of rows whose costs are wanted too."""

    prompt: int = 512
    gen: int = 128
    batch: int = 1
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Setup:
    """A device and the way to compute on it. kv: a scheme of the KV cache, None as computed. tp, pp: processes."""

    device: str = "cpu"
    activations: str = "int8g128"
    kv: str | None = None
    tp: int = 1
    pp: int = 1


class RandomWeights:
    """Random `Weights` of a configuration, made on request: codes are random bits, scales keep outputs small. Raises
    ValueError for models with experts or without RMSNorm."""

    dtype = torch.float32

    def __init__(self, config: ModelConfig, scheme: str, head: str, device: torch.device | str = "cpu") -> None:
        self.config = config
        self.scheme = None if scheme == "bf16" else Scheme.parse(scheme)
        self.head = head_scheme(head)
        self._device, self._here = device, torch.Generator().manual_seed(SEED)
        if config.experts is not None or config.norm != "rms":
            raise UserError("architecture_unsupported", "random weights are of dense models with RMSNorm")

    @cached_property
    def _numbers(self) -> torch.Generator:
        """Return the generator of the device; `_here` draws in host memory, wherever the result goes."""
        return torch.Generator(self._device).manual_seed(SEED)

    def has(self, name: str) -> bool:
        names = self.config.names
        stored = name != f"{names.head}.weight" and (name != f"{names.embed}.weight" or self.head is None)
        return stored and not name.endswith(".bias")

    def tensor(self, name: str) -> Tensor:
        return torch.ones(self.config.head_dim if "q_norm" in name or "k_norm" in name else self.config.hidden)

    def matrix(self, name: str) -> Tensor:
        return self._dense((self.config.vocab_size, self.config.hidden))

    def linear(self, name: str) -> Linear:
        config, names = self.config, self.config.names
        q, kv, wide = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.intermediate
        if name == names.head:
            return Linear(name, self._weight((config.vocab_size, config.hidden), self.head))
        inside = name.split(".", len(names.layer.split(".")))[-1]
        sizes = {names.output: (config.hidden, q), names.down: (config.hidden, wide)}
        sizes |= dict(zip(names.qkv, ((q, config.hidden), (kv, config.hidden), (kv, config.hidden)), strict=True))
        sizes |= dict.fromkeys(names.gate_up, (wide, config.hidden))
        size = sizes[inside]
        bias = torch.zeros(size[0]) if config.qkv_bias and inside in names.qkv else None
        return Linear(name, self._weight(size, self.scheme), bias)

    def _weight(self, size: tuple[int, int], scheme: Scheme | None) -> Tensor | PackedTensor:
        return self._dense(size) if scheme is None else self._packed(size, scheme.with_scale_dtype("float16"))

    def _dense(self, size: tuple[int, int]) -> Tensor:
        empty = torch.empty(size, dtype=torch.bfloat16, device=self._device)
        return empty.normal_(0, size[1] ** -0.5, generator=self._numbers)

    def _packed(self, size: tuple[int, int], scheme: Scheme) -> PackedTensor:
        if scheme.weight.kind != "int":
            return quantized(size, scheme, self._here)
        parts = {}
        for name, part in scheme.parts(size).items():
            if name == "shape":
                parts[name] = torch.tensor(size)
            elif name == "scale":
                step = 2.0 / (2**scheme.grid.bits * size[1] ** 0.5)
                parts[name] = torch.full(part.shape, step, dtype=torch.float16, device=self._device)
            else:
                raw = torch.empty(part.bytes // 8 + 1, dtype=torch.int64, device=self._device)
                raw.random_(generator=self._numbers)
                flat = raw.view(getattr(torch, part.dtype))
                parts[name] = flat[: part.bytes // flat.element_size()].view(part.shape).clone()
        return PackedTensor(scheme, size, parts)


def head_scheme(head: str) -> Scheme | None:
    """Return the scheme of an LM head by its name, None where it is dense. Raises ValueError that names the known
    ones."""
    if head not in HEADS:
        raise UserError("name_unknown", f"unknown head {head!r}: known are {', '.join(HEADS)}")
    return None if (name := HEADS[head]) is None else Scheme.parse(name)


def quantized(size: tuple[int, int], scheme: Scheme, numbers: torch.Generator) -> PackedTensor:
    """Return normal weights in a form that random bits do not spell, in host memory, because not every codec supports
    others. Where rows can be quantized separately, the first ones are repeated, because some forms take a search."""
    rows = min(size[0], REPEATED) if scheme.weight.by_row else size[0]
    some = torch.empty((rows, size[1])).normal_(0, size[1] ** -0.5, generator=numbers)
    if isinstance(scheme.weight, Sparse24):
        some.unflatten(1, (-1, 4))[..., 2:] = 0
    packed = codec(scheme.weight.kind).quantize(some, scheme)
    times = -(-size[0] // rows)

    def repeated(part: Tensor) -> Tensor:
        return torch.cat([part] * times)[: size[0]] if part.shape[:1] == (rows,) else part

    return PackedTensor(scheme, size, {name: repeated(part) for name, part in packed.parts.items()})


def build(name: str, scheme: str, head: str, store: BackendWeights) -> Decoder:
    """Return a model of a known shape with random weights. A tied embedding is the LM head, in the head's scheme."""
    config, device = shape(name), store.device if isinstance(store, GpuWeights) else "cpu"
    return assembly.build(config, RandomWeights(config, scheme, head, device), None, store)


def part(name: str, scheme: str, head: str) -> Part:
    """Return the configuration and storage of the model that `build` makes from the same names."""
    packed = head_scheme(head)
    return shape(name), Storage.named(scheme, None if packed is None else packed.with_scale_dtype("float16"))


def load(path: Path, store: BackendWeights) -> Decoder:
    return opening.load(path, store.dtype if isinstance(store, GpuWeights) else torch.float32, None, store)


def measure_model(path: Path, options: Load, setup: Setup) -> dict[str, Any]:
    """Measure a checkpoint as `run` does; of several processes, bytes and linears are the first one's."""
    config, storage = stored(path)
    if setup.tp * setup.pp == 1:
        part = config, storage
        return run(lambda store: load(path, store), options, setup, part)
    executors: list[ParallelExecutor] = []

    def make(store: BackendWeights) -> Decoder:
        dtype = hf.compute_dtype(None, setup.device)
        executors.append(
            ParallelExecutor(path, setup.tp, setup.pp, device=setup.device, dtype=dtype, activations=setup.activations)
        )
        return executors[0].decoder

    part = shared(config, storage, Share(0, setup.tp))[1], storage  # stages run one after another
    try:
        return run(make, options, setup, part) | {"tp": setup.tp, "pp": setup.pp}
    finally:
        for executor in executors:
            executor.close()


def measure_shape(name: str, scheme: str, head: str, options: Load, setup: Setup) -> dict[str, Any]:
    """Measure random weights of a known shape as `run` does. Raises ValueError for several processes."""
    if setup.tp * setup.pp > 1:
        raise UserError("option_conflict", "--tp and --pp need a model: a --shape is measured in one process")
    found = run(lambda store: build(name, scheme, head, store), options, setup, part(name, scheme, head))
    return found | {"shape": name, "scheme": scheme, "head": "bf16" if scheme == "bf16" else head}


def run(
    make: Callable[[BackendWeights], Decoder], load: Load, setup: Setup = Setup(), part: Part | None = None
) -> dict[str, Any]:
    """Measure in one process. `part` is what it computes of the model, for a GPU's roofline, which is left out without
    it. Raises ValueError for an unknown setting, and where nothing can run natively here."""
    since, floor, device, activations = time.perf_counter(), _resident(), setup.device, setup.activations
    computed = hf.compute_dtype(None, device)
    assert computed is not None
    store = dispatch.store(activations, device, computed)
    if store is None:
        raise UserError("device_unsupported", f"there is nothing to measure: {dispatch.candidates('linear')[0][1]}")
    decoder = make(store)
    loaded = time.perf_counter() - since
    numbers = torch.Generator().manual_seed(SEED)
    prompts = torch.randint(0, decoder.config.vocab_size, (load.batch, load.prompt), generator=numbers)
    scheme = engine_kv.resolve(decoder, setup.kv)
    bases = engine_kv.bases(decoder, scheme)
    _generate(decoder, prompts[:1, :WARM_UP], 2, scheme, bases)
    first = time.perf_counter() - since
    prefill, steps, busy, recorded = _generate(decoder, prompts, load.gen, scheme, bases)
    linears = [decoder.head, *(linear for block in decoder.blocks for linear in block.linears())]
    per_token = sum(each.weight.read_bytes for each in linears if isinstance(each.weight, Prepared))
    work = 2 * sum(each.shape[0] * each.shape[1] for each in linears[1:]) * load.prompt * load.batch
    decode = statistics.mean(steps)
    found: dict[str, Any] = {"device": device, "prefill_tok_s": load.prompt * load.batch / prefill}
    found |= {"decode_tok_s": load.batch / decode, "step_ms": 1e3 * decode, "bytes_per_token": per_token}
    if isinstance(store, GpuWeights):
        peak, rates = torch.cuda.max_memory_reserved(decoder.device), bottleneck.card_rates(decoder.device)
        rate, gops = rates.bandwidth / 1e9, rates.operations(None) / 1e9
        if part is not None:
            halfway = [(load.prompt + load.gen // 2, 1, True)] * load.batch
            reading, computing = Roofline(*part, scheme, rates).least(halfway)
            limited_by = "compute" if computing > reading else "bandwidth"
            found |= {"roof_fraction": max(reading, computing) / decode, "limited_by": limited_by}
        found |= {"card": torch.cuda.get_device_name(decoder.device), "read_gb_s": rate}
        found |= {"read_fraction": per_token / decode / 1e9 / rate, "bf16_gops": gops}
        found |= {"compute_fraction": work / prefill / 1e9 / gops, "peak_mb": peak / 1e6}
    else:
        peak = _peak()  # before measuring the limits takes memory
        limit = limits.measure()
        of_tiles = None if limit.tile_gops is None else work / prefill / 1e9 / limit.tile_gops
        found |= {"read_gb_s": limit.read_gb_s, "read_fraction": per_token / decode / 1e9 / limit.read_gb_s}
        found |= {"int8_gops": limit.int8_gops, "compute_fraction": work / prefill / 1e9 / limit.int8_gops}
        found |= {"tile_gops": limit.tile_gops, "tile_fraction": of_tiles}
        found |= {"python_fraction": 1 - busy / sum(steps), "peak_rss_mb": (peak - floor) / 1e6}
        found |= {"cache_mb": _cache() / 1e6, "isa": extension.cpu_level(), "activations": activations}
    if load.rows:
        found["row_ms"] = {
            str(rows): 1e3 * seconds
            for rows, seconds in zip(load.rows, row_costs.measure(decoder, scheme, load.prompt, load.rows), strict=True)
        }
    bits = scheme.bits_per_value(decoder.config.head_dim, BLOCK)
    found |= {"recorded": recorded, "load_s": loaded, "first_token_s": first, "reference_linears": store.refused}
    return found | {"threads": torch.get_num_threads(), "kv": scheme.name, "kv_bits": bits, **vars(load)}


@torch.inference_mode()
def _generate(
    decoder: Decoder, prompts: Tensor, count: int, scheme: KvScheme, bases: Sequence[Bases] | None
) -> tuple[float, list[float], float, bool]:
    """Decode all prompts greedily. Return the seconds of prefill, of each step, and in kernels during the steps, and
    whether steps were recorded."""
    batch, length = prompts.shape
    horizon = length + count
    cache = decoder.cache(horizon, batch, scheme, bases)
    start = time.perf_counter()
    logits = []
    for s in range(batch):  # a sequence at a time: a prompt of some hundred tokens keeps the cores busy
        for at in range(0, length, PREFILL_ROWS):
            piece = prompts[s, at : at + PREFILL_ROWS].to(decoder.device)
            lengths = tuple(len(piece) if s == other else 0 for other in range(batch))
            end = torch.tensor([len(piece) - 1], device=decoder.device)
            last = decoder.forward(piece, ForwardBatch(lengths, horizon, cache), end)
            if at + len(piece) == length:
                logits.append(last)
    tokens = ops.argmax(torch.cat(logits)).tolist()
    prefill = time.perf_counter() - start
    decoding = Decoding(decoder, cache, horizon)
    seconds, before = [], 0.0
    for step in range(count):
        since = time.perf_counter()
        tokens = ops.argmax(decoding.step(tokens)).tolist()
        if step:  # the first is recorded
            seconds.append(time.perf_counter() - since)
        else:
            before = extension.busy_seconds()
    return prefill, seconds, extension.busy_seconds() - before, decoding.recorded


def to_text(report: dict[str, Any]) -> str:
    """Return the report as text for a terminal."""
    rows = {
        "decode": f"{report['decode_tok_s']:.1f} tokens/s, {report['read_fraction']:.0%} of the "
        f"{report['read_gb_s']:.1f} GB/s that memory reads",
        "weights": f"{report['bytes_per_token'] / 1e6:.0f} MB a step",
        "KV cache": f"{report['kv']}, {report['kv_bits']:.3g} bits a number",
        "loaded": f"in {report['load_s']:.2f} s, first token after {report['first_token_s']:.2f} s",
    }
    once = "" if report["recorded"] else " (not recorded)"
    if report["device"] == "cpu":
        peak = report["tile_gops"] or report["int8_gops"]
        fraction = report["compute_fraction"] if report["tile_gops"] is None else report["tile_fraction"]
        of = f"{fraction:.0%} of the {peak:.0f} GOP/s of int8 here"
        rows["Python"] = f"{report['python_fraction']:.1%} of a step{once}"
        rows["memory"] = f"{report['peak_rss_mb']:.0f} MB at most, beside what the process held before it loaded"
        if report["bytes_per_token"] < 1e6 * report["cache_mb"]:
            rows["weights"] += (
                f", which the processor's cache of {report['cache_mb']:.0f} MB may hold from step to step"
            )
        rows["kernels"] = f"{report['isa']}, {report['threads']} threads, activations {report['activations']}"
    else:
        of = f"{report['compute_fraction']:.0%} of the {report['bf16_gops']:.0f} GOP/s of bfloat16 here"
        if "roof_fraction" in report:
            rows["roof"] = f"{report['roof_fraction']:.0%} of what {report['limited_by']} would allow{once}"
        rows["memory"] = f"{report['peak_mb']:.0f} MB of the card at most"
        rows["card"] = report["card"]
    if costs := report.get("row_ms"):
        first = next(iter(costs.values()))
        rows["rows"] = ", ".join(f"{count}: {each / first:.2f}" for count, each in costs.items())
    rows = {"prefill": f"{report['prefill_tok_s']:.0f} tokens/s, {of}"} | rows
    reasons = Counter(report["reference_linears"].values())
    refused = [f"{count} linears run on the reference: {reason}" for reason, count in reasons.items()]
    return "\n".join([f"{name:<10}{text}" for name, text in rows.items()] + refused)


def _resident() -> int:
    """Return the bytes of memory that this process holds now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return _peak()
    return pages * resource.getpagesize()


def _peak() -> int:
    """Return the peak bytes of memory of this process."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes of the processor's largest cache; 0 where the system does not say."""
    sizes = [path.read_text().strip() for path in root.glob("index*/size")]
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=0)
