"""What a model costs, in bytes and operations, from its configuration alone.

Everything here is a sum over shapes, never an estimate, and it is the arithmetic of what runs: weights are counted as
the native kernels lay them out (`csrc/matrix.h`), keys and values as pages store them (`kv/pages.py`). Tests hold
both against the real thing, byte for byte. On disk a weight is smaller by the padding of its last 16 outputs;
`Scheme.bytes` is that ledger.

Three habits of published figures are not followed (each is off by a factor in some model): the KV cache has the
key-value heads of a grouped model, not its query heads; a block's bytes are those of all layers, or are said to be of
one; and the scales of int8 keys and values count.

A layer with a sliding window reads only its window, but stores every position: blocks that have slid out of it are not
given back.

Not counted: the column orders and divisors that some GPTQ and AWQ checkpoints keep for a linear (12 bytes an input
column at most, 0.1 % of its weight), and the rows of the embedding that a step looks up. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from attar.formats.scheme import ITEM_BITS, Scheme
from attar.formats.weight_formats import Lookup, Progressive
from attar.kernels.native import capabilities
from attar.kernels.native.layouts import layout_of
from attar.kv.schemes import LENGTH, RANDOM, WRITTEN, scheme
from attar.model.config import ModelConfig

Part = Literal["linears", "head"]
USUAL_KV = ("float32", "bfloat16", "int8", "int4")
"""Ways to keep keys and values that a plan compares, by falling precision."""
BLOCK = 64  # slots of a block, as `model.cache.BLOCK`
LANES = 16  # outputs that lie together in the kernels' layout, and slots in that of pages


@dataclass(frozen=True, slots=True)
class Matrix:
    """One linear: y = x W^T with W [rows, columns]. `active` is the share of tokens that it multiplies."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    active: float = 1.0
    part: Part = "linears"
    compressible: bool = True


def matrices(config: ModelConfig) -> Iterator[Matrix]:
    """Every linear, in the order in which a forward pass reads them; the output matrix is the last."""
    for layer in range(config.layers):
        yield from _block(config, layer)
    yield Matrix(config.names.head, config.vocab_size, config.hidden, part="head", compressible=False)


def _block(c: ModelConfig, layer: int) -> Iterator[Matrix]:
    names, at = c.names, c.names.layer.format(i=layer)
    query, key = c.heads * c.head_dim, c.kv_heads * c.head_dim
    yield from _side_by_side(at, names.qkv, (query, key, key), c.hidden, c.qkv_bias)
    yield Matrix(f"{at}.{names.output}", c.hidden, query, c.output_bias)
    if c.experts is None or not c.is_sparse(layer):
        yield from _side_by_side(at, names.gate_up, _widths(c, c.intermediate), c.hidden, c.feed_forward_bias)
        yield Matrix(f"{at}.{names.down}", c.hidden, c.intermediate, c.feed_forward_bias)
        return
    experts = c.experts
    share = experts.top_k / experts.count
    yield Matrix(f"{at}.{names.router}", experts.count, c.hidden, compressible=False)
    for e in range(experts.count):
        yield from _expert(c, f"{at}.{names.expert.format(e=e)}", experts.intermediate, share)
    if experts.shared:
        yield from _expert(c, f"{at}.{names.shared_expert}", experts.shared_intermediate, 1.0)
        yield Matrix(f"{at}.{names.shared_gate}", 1, c.hidden, compressible=False)


def _expert(c: ModelConfig, at: str, width: int, active: float) -> Iterator[Matrix]:
    yield from _side_by_side(at, c.names.expert_gate_up, _widths(c, width), c.hidden, False, active)
    yield Matrix(f"{at}.{c.names.expert_down}", c.hidden, width, active=active)


def _widths(c: ModelConfig, width: int) -> tuple[int, ...]:
    return (width, width) if c.gated else (width,)


def _side_by_side(
    at: str, names: tuple[str, ...], sizes: tuple[int, ...], columns: int, bias: bool, active: float = 1.0
) -> Iterator[Matrix]:
    """One linear a name; one name for several sizes means that they are stored fused."""
    rows = sizes if len(names) == len(sizes) else (sum(sizes),)
    for name, count in zip(names, rows, strict=True):
        yield Matrix(f"{at}.{name}", count, columns, bias, active)


@dataclass(frozen=True)
class Storage:
    """How the weights are stored: a scheme, or dense in `dtype`.

    `schemes` names single modules and outweighs `linears`. Scales are stored in `dtype` unless the scheme came from a
    checkpoint. `head` is the output matrix, and the embedding where the two are one.
    """

    linears: Scheme | None = None
    head: Scheme | None = None
    dtype: str = "bfloat16"
    schemes: Mapping[str, Scheme | None] = field(default_factory=dict)
    name: str = ""  # for tables; by default that of `linears`

    @staticmethod
    def named(name: str, head: Scheme | None = None, dtype: str = "bfloat16") -> Storage:
        """A storage by a scheme's short name, or `dense`. Raises ValueError naming the forms that exist."""
        if name in ("dense", dtype, SHORT.get(dtype)):
            return Storage(None, head, dtype)
        return Storage(Scheme.parse(name).with_scale_dtype(dtype), head, dtype)

    @property
    def label(self) -> str:
        return self.name or (self.linears.name if self.linears is not None else SHORT[self.dtype])

    def of(self, matrix: Matrix) -> Scheme | None:
        """The scheme of a matrix, None where it is dense."""
        if matrix.name in self.schemes:
            return self.schemes[matrix.name]
        if matrix.part == "head":
            return self.head
        return self.linears if matrix.compressible else None


SHORT: Mapping[str, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def against(scheme: Scheme | None) -> str | None:
    """Why no CPU kernel multiplies by such a weight, or None where one does; dense ones (None) have one."""
    return None if scheme is None else capabilities.weight_against(scheme)


def read_bytes(rows: int, columns: int, scheme: Scheme | None, dtype: str = "bfloat16") -> int:
    """What one product reads of a weight [rows, columns], which is also what it holds in memory.

    Of a weight without a kernel that is its float32 copy, made on first use. Raises ValueError where the scheme's
    groups do not divide the columns.
    """
    if scheme is None:
        return _up(rows, LANES) * columns * ITEM_BITS[dtype] // 8
    if against(scheme) is not None:
        scheme.parts((rows, columns))  # which checks the groups
        return 4 * rows * columns
    if isinstance(scheme.weight, Progressive):
        return _up(rows, LANES) * (columns * scheme.weight.bits // 8 + 2 * scheme.weight.groups(columns) + 4)
    if isinstance(form := scheme.weight, Lookup):  # sixteen words of 32 bits at a time, a table of sixteen floats a row
        vectors, outliers = -(-columns // (32 // form.bits * LANES)), form.count((rows, columns))
        return rows * 64 * (vectors + 1) + (8 * outliers + 4 * (rows + 1) if outliers else 0)
    layout = layout_of(scheme)
    assert layout is not None, scheme.name
    scheme.check(columns)
    return layout.bytes(rows, columns)


def memory_bytes(rows: int, columns: int, scheme: Scheme | None, dtype: str = "bfloat16") -> int:
    """What a weight holds in memory: what is read, and of one without a kernel the stored form as well."""
    kept = 0 if scheme is None or against(scheme) is None else scheme.bytes((rows, columns))
    return read_bytes(rows, columns, scheme, dtype) + kept


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights in memory, by part. `embedding` is 0 where it is the output matrix."""

    linears: int
    head: int
    embedding: int
    norms: int  # and biases, and learned positions: what is kept in float32

    @property
    def total(self) -> int:
        return self.linears + self.head + self.embedding + self.norms


def weight_bytes(config: ModelConfig, storage: Storage) -> WeightBytes:
    """The weights as they lie in memory. Raises ValueError where a scheme's groups do not divide a linear's columns."""
    parts = {"linears": 0, "head": 0}
    beside = 4 * config.hidden * (config.learned_positions + config.position_offset if config.names.positions else 0)
    for each in matrices(config):
        parts[each.part] += memory_bytes(each.rows, each.columns, checked(storage, each), storage.dtype)
        beside += 4 * each.rows if each.bias else 0
    rows = config.vocab_size * config.hidden
    if config.tied:  # rows of a table without a kernel are looked up in a float32 copy
        embedding = 0 if storage.head is None or against(storage.head) is None else 4 * rows
    else:
        embedding = rows * ITEM_BITS[storage.dtype] // 8
    return WeightBytes(parts["linears"], parts["head"], embedding, beside + 4 * norm_weights(config))


def checked(storage: Storage, each: Matrix) -> Scheme | None:
    """The scheme of a matrix, None where it is dense. Raises ValueError where its groups do not divide the columns."""
    scheme = storage.of(each)
    if scheme is not None:
        try:
            scheme.check(each.columns)
        except ValueError as error:
            raise ValueError(f"{each.name}: {error}") from None
    return scheme


def norm_weights(config: ModelConfig) -> int:
    """Numbers in all norms."""
    names = config.names
    wide = 2 + sum(name is not None for name in (names.attention_post_norm, names.feed_forward_post_norm))
    each = 2 if config.norm == "layer" else 1  # LayerNorm has biases
    return each * config.hidden * (wide * config.layers + 1) + (2 * config.head_dim * config.layers) * config.qk_norm


def step_bytes(config: ModelConfig, storage: Storage, rows: int = 1) -> int:
    """Bytes of weights that a step of `rows` tokens reads: each linear once, of experts those that are expected to be
    chosen, were the choices of tokens independent and even."""
    total = 0.0
    for each in matrices(config):
        reached = 1.0 if each.active == 1.0 else 1.0 - (1.0 - each.active) ** rows
        total += reached * read_bytes(each.rows, each.columns, checked(storage, each), storage.dtype)
    return round(total)


# Keys and values


def page_bytes(config: ModelConfig, kv: str, block: int = BLOCK) -> int:
    """Bytes of one block of one layer: keys and values of `block` slots, and what the scheme keeps beside them.

    Raises ValueError where a block is no multiple of 16 slots, or for a scheme that there is not, or that does not keep
    such heads.
    """
    return scheme(kv).bytes(config.kv_heads, config.head_dim, block)


def usual_kv(config: ModelConfig) -> tuple[str, ...]:
    """Those of `USUAL_KV` that keep heads of the model's size."""
    return tuple(name for name in USUAL_KV if name != "int4" or config.head_dim % LANES == 0)


def block_bytes(config: ModelConfig, kv: str, block: int = BLOCK) -> int:
    """Bytes of one block in all layers."""
    return config.layers * page_bytes(config, kv, block)


def kv_bytes(config: ModelConfig, kv: str) -> int:
    """Bytes of one token's keys and values in all layers, in a finished block."""
    return block_bytes(config, kv, BLOCK) // BLOCK


def beside_bytes(config: ModelConfig, kv: str, sequences: int, block: int = BLOCK) -> int:
    """Bytes that a scheme wants beside the blocks: unfinished ones, where it keeps those apart, three for each
    sequence that runs; and, where it is calibrated, its bases and what finding them takes."""
    chosen = scheme(kv)
    unfinished = chosen.recent_bytes(config.kv_heads, config.head_dim, block) * 3 * sequences
    layers = config.layers * (unfinished + chosen.basis_bytes(config.kv_heads, config.head_dim))
    return layers + calibration_bytes(config, kv)


def calibration_bytes(config: ModelConfig, kv: str) -> int:
    """Bytes that calibration holds beyond a step of one text, while a model is loaded (`model.kv_basis`): first the
    int8 cache and the logits of the texts that the model writes; then all texts' hidden states, one layer's keys and
    values, and one head's of them in float64, four times. What is freed is not given to the cache."""
    if not scheme(kv).calibrated:
        return 0
    length = min(LENGTH, config.context)
    texts = (WRITTEN + RANDOM) * length
    writing = WRITTEN * (-(-length // BLOCK) * block_bytes(config, "int8") + 16 * config.vocab_size)
    rows = 4 * (config.hidden + 2 * config.kv_heads * config.head_dim) + 4 * 8 * config.head_dim
    return max(writing, texts * rows)


def kv_read_bytes(config: ModelConfig, kv: str, context: int) -> int:
    """Bytes that one sequence's attention reads for its next token, with `context` positions filled."""
    seen = sum(context if window is None else min(context, window) for window in config.windows)
    return seen * (kv_bytes(config, kv) // config.layers)


# Operations


def int8_flops(config: ModelConfig, storage: Storage) -> float:
    """Multiplications and additions of one token in linears whose weights are integers, which multiply rows rounded to
    int8; of experts, in those that run for it."""
    total = 0.0
    for each in matrices(config):
        scheme = storage.of(each)
        if scheme is not None and against(scheme) is None:
            total += 2.0 * each.active * each.rows * each.columns
    return total


def ridge(operations: float, bandwidth: float, bits_per_weight: float) -> float:
    """Rows from which a product is limited by `operations` a second rather than by reading its weight at `bandwidth`
    bytes a second: each weight is 2 operations a row and is read once for all rows."""
    return operations * bits_per_weight / 8 / (2 * bandwidth)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
