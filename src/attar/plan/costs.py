"""Costs of a model in bytes and operations, from its configuration alone.

Every figure is a sum over shapes, never an estimate, and follows the code that runs. Weights are counted as the native
kernels lay them out (`csrc/matrix.h`), the KV cache as its pages store it (`kv/pages.py`). Tests compare both with the
real sizes, byte for byte. On disk a weight is smaller by the padding of its last 16 outputs; `Scheme.bytes` gives that
size.

Three habits of published figures are not followed, each wrong by a factor in some model. The KV cache has the key-value
heads of a grouped model, not its query heads. A block's bytes cover all layers, unless one layer is named. The scales
of an int8 KV cache count.

A block's bytes are those of a layer that stores every position. Layers with a sliding window may have fewer blocks
(`sliding.py`).

Not counted are the embedding rows that a step looks up, and the column orders and divisors of some GPTQ and AWQ
checkpoints. The latter take at most 12 bytes an input column, 0.1 % of a linear's weight. Torch-free.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from attar.errors import UserError, code_of
from attar.formats.scheme import ITEM_BITS, Scheme
from attar.formats.weight_formats import Lookup, Progressive
from attar.kernels.native.layouts import layout_of, weight_against
from attar.kv.schemes import LENGTH, RANDOM, SCHEMES, WRITTEN, KvScheme
from attar.kv.sparse import SparseAttention
from attar.model.config import ModelConfig

Part = Literal["linears", "head"]
USUAL_KV = tuple(SCHEMES[name] for name in ("float32", "bfloat16", "int8", "int4"))
"""KV schemes that a plan compares, by falling precision."""
BLOCK = 64  # slots of a block, as `model.cache.BLOCK`
LANES = 16  # outputs stored together in the kernels' layout, and slots in that of pages


@dataclass(frozen=True, slots=True)
class Matrix:
    """One linear layer: y = x W^T with W [rows, columns]. `active` is the fraction of tokens that it multiplies."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    active: float = 1.0
    part: Part = "linears"
    compressible: bool = True


def matrices(config: ModelConfig) -> Iterator[Matrix]:
    """Yield every linear in the order in which a forward pass reads them; the LM head is the last."""
    yield from _matrices(config)


@functools.lru_cache(maxsize=4)
def _matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    """Return what `matrices` yields: a plan sums over it a hundred times."""
    head = Matrix(config.names.head, config.vocab_size, config.hidden, part="head", compressible=False)
    return (*(each for layer in range(config.layers) for each in _block(config, layer)), head)


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
    """Yield one linear per name; one name for several sizes means that they are stored fused."""
    rows = sizes if len(names) == len(sizes) else (sum(sizes),)
    for name, count in zip(names, rows, strict=True):
        yield Matrix(f"{at}.{name}", count, columns, bias, active)


@dataclass(frozen=True)
class Storage:
    """Storage of the weights: a scheme, or dense in `dtype`.

    `schemes` names single modules and overrides `linears`. Scales are stored in `dtype` unless the scheme came from a
    checkpoint. `head` applies to the LM head, and to the embedding where the two are tied; `embedding` to one that is
    not.
    """

    linears: Scheme | None = None
    head: Scheme | None = None
    dtype: str = "bfloat16"
    schemes: Mapping[str, Scheme | None] = field(default_factory=dict)
    name: str = ""  # for tables; default: the name of `linears`
    embedding: Scheme | None = None

    @staticmethod
    def named(name: str, head: Scheme | None = None, dtype: str = "bfloat16") -> Storage:
        """Return a storage by a scheme's short name, or `dense`. Raises ValueError that names the valid forms."""
        if name in ("dense", dtype, SHORT.get(dtype)):
            return Storage(None, head, dtype)
        return Storage(Scheme.parse(name).with_scale_dtype(dtype), head, dtype)

    @property
    def label(self) -> str:
        return self.name or (self.linears.name if self.linears is not None else SHORT[self.dtype])

    def of(self, matrix: Matrix) -> Scheme | None:
        """Return the scheme of a matrix, None where it is dense."""
        if matrix.name in self.schemes:
            return self.schemes[matrix.name]
        if matrix.part == "head":
            return self.head
        return self.linears if matrix.compressible else None


@functools.lru_cache(maxsize=4)
def _alike(config: ModelConfig) -> tuple[tuple[Matrix, int], ...]:
    """Return the first linear of each kind, and how many there are; those of a kind differ by name alone."""
    found: dict[Matrix, tuple[Matrix, int]] = {}
    for each in _matrices(config):
        kind = replace(each, name="")
        first, count = found.get(kind, (each, 0))
        found[kind] = first, count + 1
    return tuple(found.values())


def counted(config: ModelConfig, storage: Storage) -> Iterable[tuple[Matrix, int]]:
    """Return pairs (linear, count), where one linear stands for all that differ from it by name alone.

    A model of a thousand layers has some ten kinds. Where `storage` names single modules, every linear has a pair.
    """
    return ((each, 1) for each in _matrices(config)) if storage.schemes else _alike(config)


SHORT: Mapping[str, str] = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def against(scheme: Scheme | None) -> str | None:
    """Return the reason why no CPU kernel multiplies by such a weight, None where one does. Dense weights (None) have
    one."""
    return None if scheme is None else weight_against(scheme)


@functools.lru_cache(4096)  # the layers of a model have few shapes
def read_bytes(rows: int, columns: int, scheme: Scheme | None, dtype: str = "bfloat16") -> int:
    """Return the bytes that one product reads of a weight [rows, columns], which is also what it occupies in memory.

    A weight without a kernel counts as its float32 copy, made on first use. Raises ValueError where the scheme's groups
    do not divide the columns.
    """
    if scheme is None:
        return _up(rows, LANES) * columns * ITEM_BITS[dtype] // 8
    if against(scheme) is not None:
        scheme.parts((rows, columns))  # checks the groups
        return 4 * rows * columns
    if isinstance(scheme.weight, Progressive):
        return _up(rows, LANES) * (columns * scheme.weight.bits // 8 + 2 * scheme.weight.groups(columns) + 4)
    if isinstance(form := scheme.weight, Lookup):  # sixteen 32-bit words at a time, a table of sixteen floats a row
        vectors, outliers = -(-columns // (32 // form.bits * LANES)), form.count((rows, columns))
        return rows * 64 * (vectors + 1) + (8 * outliers + 4 * (rows + 1) if outliers else 0)
    layout = layout_of(scheme)
    assert layout is not None, scheme.name
    scheme.check(columns)
    return layout.bytes(rows, columns)


def memory_bytes(rows: int, columns: int, scheme: Scheme | None, dtype: str = "bfloat16") -> int:
    """Return the bytes that a weight occupies in memory: what is read, plus the stored form where it has no kernel."""
    kept = 0 if scheme is None or against(scheme) is None else scheme.bytes((rows, columns))
    return read_bytes(rows, columns, scheme, dtype) + kept


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights in memory, by part. `embedding` is 0 where it is tied to the LM head."""

    linears: int
    head: int
    embedding: int
    norms: int  # and biases, and learned positions: all in float32

    @property
    def total(self) -> int:
        return self.linears + self.head + self.embedding + self.norms


def weight_bytes(config: ModelConfig, storage: Storage) -> WeightBytes:
    """Return the bytes of the weights in memory. Raises ValueError where a scheme's groups do not divide the
    columns."""
    parts = {"linears": 0, "head": 0}
    beside = 4 * config.hidden * (config.learned_positions + config.position_offset if config.names.positions else 0)
    for each, count in counted(config, storage):
        parts[each.part] += count * memory_bytes(each.rows, each.columns, checked(storage, each), storage.dtype)
        beside += count * 4 * each.rows if each.bias else 0
    rows = config.vocab_size * config.hidden
    if config.tied:  # rows of a table without a kernel are looked up in a float32 copy
        embedding = 0 if storage.head is None or against(storage.head) is None else 4 * rows
    elif storage.embedding is not None:
        embedding = read_bytes(config.vocab_size, config.hidden, storage.embedding)
    else:
        embedding = rows * ITEM_BITS[storage.dtype] // 8
    return WeightBytes(parts["linears"], parts["head"], embedding, beside + 4 * norm_weights(config))


def checked(storage: Storage, each: Matrix) -> Scheme | None:
    """Return the scheme of a matrix, None where it is dense. Raises ValueError where its groups do not divide the
    columns."""
    scheme = storage.of(each)
    if scheme is not None:
        try:
            scheme.check(each.columns)
        except ValueError as error:
            raise UserError(code_of(error), f"{each.name}: {error}") from None
    return scheme


def norm_weights(config: ModelConfig) -> int:
    """Return the number of parameters in all norms."""
    names = config.names
    wide = 2 + sum(name is not None for name in (names.attention_post_norm, names.feed_forward_post_norm))
    each = 2 if config.norm == "layer" else 1  # LayerNorm has biases
    return each * config.hidden * (wide * config.layers + 1) + (2 * config.head_dim * config.layers) * config.qk_norm


def step_bytes(config: ModelConfig, storage: Storage, rows: int = 1) -> int:
    """Return the bytes of weights that a step of `rows` tokens reads: each linear once. Experts count by the expected
    number chosen, if tokens choose independently and evenly."""
    total = 0.0
    for each, count in counted(config, storage):
        reached = 1.0 if each.active == 1.0 else 1.0 - (1.0 - each.active) ** rows
        total += count * reached * read_bytes(each.rows, each.columns, checked(storage, each), storage.dtype)
    return round(total)


# KV cache


def page_bytes(config: ModelConfig, kv: KvScheme, block: int = BLOCK) -> int:
    """Return the bytes of one block of one layer: keys and values of `block` slots, and the scheme's side data.

    Raises ValueError for a block that is no multiple of 16 slots, and for a scheme that does not support the head size.
    """
    return kv.bytes(config.kv_heads, config.head_dim, block)


def usual_kv(config: ModelConfig) -> tuple[KvScheme, ...]:
    """Return the schemes of `USUAL_KV` that support the model's head size."""
    return tuple(each for each in USUAL_KV if each.name != "int4" or config.head_dim % LANES == 0)


def block_bytes(config: ModelConfig, kv: KvScheme, block: int = BLOCK) -> int:
    """Return the bytes of one block in all layers."""
    return config.layers * page_bytes(config, kv, block)


def sign_bytes(config: ModelConfig, block: int = BLOCK) -> int:
    """Return the bytes of one block's one-bit keys, in all layers that have no window: which of those stay dense is
    known once the model is loaded."""
    layers = sum(window is None for window in config.windows)
    return layers * SparseAttention.bytes(config.kv_heads, config.head_dim, block)


def kv_bytes(config: ModelConfig, kv: KvScheme) -> int:
    """Return the bytes of one token's keys and values in all layers, in a finished block."""
    return block_bytes(config, kv, BLOCK) // BLOCK


def beside_bytes(config: ModelConfig, kv: KvScheme, sequences: int, block: int = BLOCK) -> int:
    """Return the bytes that a KV scheme needs besides its blocks.

    These are unfinished blocks, where the scheme stores those apart, three for each running sequence. A calibrated
    scheme adds its bases and the memory of calibration.
    """
    unfinished = kv.recent_bytes(config.kv_heads, config.head_dim, block) * 3 * sequences
    layers = config.layers * (unfinished + kv.basis_bytes(config.kv_heads, config.head_dim))
    return layers + calibration_bytes(config, kv)


def calibration_bytes(config: ModelConfig, kv: KvScheme) -> int:
    """Return the bytes that KV calibration needs beyond a step of one text, while a model is loaded (`model.kv_basis`).

    The first phase holds the int8 cache and the logits of the texts that the model writes. The second holds all texts'
    hidden states, one layer's keys and values, and one head's of them in float64, four times. Freed memory is not given
    to the cache.
    """
    if not kv.calibrated:
        return 0
    length = min(LENGTH, config.context)
    texts = (WRITTEN + RANDOM) * length
    writing = WRITTEN * (-(-length // BLOCK) * block_bytes(config, SCHEMES["int8"]) + 16 * config.vocab_size)
    rows = 4 * (config.hidden + 2 * config.kv_heads * config.head_dim) + 4 * 8 * config.head_dim
    return max(writing, texts * rows)


def kv_read_bytes(config: ModelConfig, kv: KvScheme, context: int) -> int:
    """Return the bytes that one sequence's attention reads for its next token, with `context` positions filled."""
    seen = sum(context if window is None else min(context, window) for window in config.windows)
    return seen * (kv_bytes(config, kv) // config.layers)


# Operations


def int8_flops(config: ModelConfig, storage: Storage) -> float:
    """Return the multiplications and additions of one token in linears with integer weights, which multiply rows
    rounded to int8. Only the active experts count."""
    total = 0.0
    for each in matrices(config):
        scheme = storage.of(each)
        if scheme is not None and against(scheme) is None:
            total += 2.0 * each.active * each.rows * each.columns
    return total


def ridge(operations: float, bandwidth: float, bits_per_weight: float) -> float:
    """Return the number of rows from which a product is limited by compute.

    `operations` are a second, `bandwidth` is in bytes a second. Each weight costs 2 operations a row and is read once
    for all rows.
    """
    return operations * bits_per_weight / 8 / (2 * bandwidth)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
