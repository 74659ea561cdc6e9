"""GPUs: what a model takes of one's memory, and what some are by their data sheets.

On a card weights lie as Triton's kernels read them (`kernels/triton/weights.py`): dense ones in 16 bits, 4-bit ones in
tiles of 64 outputs. Where no kernel knows the codes, they are written out in 16 bits; and where the rows that meet them
are to be rounded, the reference does that, which keeps the codes as they are stored and a copy in 16 bits besides. A
card without float8 in its tensor cores has no kernel for such codes at all. Keys and values lie in plain rows with a
scale a slot in float32. All are sums over shapes, and tests hold them against the real layouts; what only a file's
numbers tell, zero points that no kernel takes, is left out.

A step is bounded as on a CPU, by results in float32, though a card computes in 16 bits; its tokens are chosen of up to
`AT_ONCE` rows together. What a library or the driver takes, and what recorded graphs take, no formula knows: a server
measures those when it starts (`engine/memory_profile.py`), and here the room is what `machine.SHARE` leaves. A card's
memory is its data sheet's figure in units of 10^9 bytes. Some show up to 7 % more, as their makers mean 2^30; of others
error correction takes about that part. A plan is on the safe side: it is `--device` that asks the card itself.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attar.formats.scheme import ITEM_BITS, Grid, Scheme, multiplied_in
from attar.formats.weight_formats import Fp8Blocks, Progressive
from attar.kv.schemes import scheme as kv_scheme
from attar.model.config import ModelConfig
from attar.plan import costs, steps
from attar.plan.costs import BLOCK, Matrix, Storage, WeightBytes
from attar.plan.roofline import Rates
from attar.plan.steps import StepLimits

TILE = 64  # outputs that lie together
AT_ONCE = 64  # rows whose tokens are chosen together (`sampling/device_sampler.py`)
LEAST_GROUP, LEAST_ROUNDED = 32, 64  # columns of 4 bits under one scale: of rows as they are, and rounded to int8
MOST_COLUMNS = 65536  # whose products of 8 by 8 bits one sum of 32 bits holds
USUAL_KV = ("bfloat16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. memory: bytes. bandwidth: bytes a second. operations: products and sums a second by what is multiplied,
    of dense matrices: bf16, int8, fp8. float8: whether its tensor cores know that, from compute capability 8.9 on."""

    name: str
    memory: int
    bandwidth: float
    operations: Mapping[str, float]
    float8: bool

    @property
    def rates(self) -> Rates:
        """For a roofline."""
        return Rates(
            self.bandwidth,
            lambda scheme: self.operations[multiplied_in(scheme)],
            lambda each, scheme: size(each, scheme, self.float8),
        )


def _sheet(name: str, gigabytes: int, gb_s: float, bf16: float, int8: float, fp8: float | None = None) -> Card:
    """`bf16`, `int8`, `fp8`: 10^12 a second without sparsity; without the last such codes are multiplied as bf16."""
    operations = {"bf16": bf16, "int8": int8, "fp8": bf16 if fp8 is None else fp8}
    rates = {kind: rate * 1e12 for kind, rate in operations.items()}
    return Card(name, gigabytes * 10**9, gb_s * 1e9, rates, fp8 is not None)


CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        # A100 and A10 data sheets (2021). The A10G of a cloud has the A10's memory and fewer tensor cores: not listed.
        _sheet("a100-40gb", 40, 1555, 312, 624),
        _sheet("a100-80gb", 80, 2039, 312, 624),  # SXM; the PCIe card reads 1935
        _sheet("a10", 24, 600, 125, 250),
        # H100 and H200 SXM data sheets, whose figures are with sparsity: halved.
        _sheet("h100", 80, 3350, 989.4, 1978.9, 1978.9),
        _sheet("h200", 141, 4800, 989.4, 1978.9, 1978.9),
        # L40S data sheet, and the whitepaper of the Ada architecture, for sums in float32.
        _sheet("l40s", 48, 864, 362.05, 733, 733),
        _sheet("rtx-4090", 24, 1008, 165.2, 660.6, 330.3),
    )
}


def card(name: str) -> Card:
    """A card by its name. Raises ValueError naming those that are known."""
    if name not in CARDS:
        raise ValueError(f"unknown card {name[:80]!r}: known are {', '.join(CARDS)}")
    return CARDS[name]


def has_kernel(scheme: Scheme, columns: int, float8: bool) -> bool:
    """Whether a kernel multiplies by rows of so many codes, on a card that knows `float8` or not."""
    form, rounds = scheme.weight, scheme.activation is not None
    if isinstance(form, Fp8Blocks):
        return float8 and columns % Fp8Blocks.size == 0
    if isinstance(form, Progressive):
        return rounds and form.group % LEAST_ROUNDED == 0 and columns <= MOST_COLUMNS
    if not isinstance(form, Grid) or columns % 16:
        return False
    if (form.kind, form.bits) == ("int", 4):
        fits = (form.group_size or columns) % (LEAST_ROUNDED if rounds else LEAST_GROUP) == 0
        return fits and (not rounds or _takes_rows(scheme, form.kind))
    if form.bits != 8 or form.kind == "e5m2" or not form.symmetric or form.granularity == "group":
        return False
    if form.kind == "e4m3" and not float8:
        return False
    return not rounds or (_takes_rows(scheme, form.kind) and (form.kind == "e4m3" or columns <= MOST_COLUMNS))


def _takes_rows(scheme: Scheme, kind: str) -> bool:
    """Whether there is a kernel for rows that are rounded as the scheme wants, by weights of a kind of numbers."""
    rounding = scheme.activation
    if not isinstance(rounding, Grid) or (rounding.kind, rounding.bits) != (kind, 8) or not rounding.symmetric:
        return False
    return rounding.granularity != "group" and (rounding.granularity != "tensor" or scheme.static)


def size(each: Matrix, scheme: Scheme | None, float8: bool) -> int:
    """Bytes that a product reads of one linear's weight: without a kernel of those in 16 bits."""
    rows, columns = each.rows, each.columns
    if scheme is None or not has_kernel(scheme, columns, float8):
        return 2 * rows * columns
    form, tiles = scheme.weight, -(-rows // TILE) * TILE
    if isinstance(form, Fp8Blocks):
        return rows * columns + 4 * -(-rows // form.size) * -(-columns // form.size)
    if isinstance(form, Progressive):
        return tiles * (columns // 2 + 2 * form.groups(columns)) + 4 * rows
    assert isinstance(form, Grid)
    if form.bits == 8:
        return rows * columns + 4 * rows
    parts = ITEM_BITS[scheme.scale_dtype] // 8 + (not form.symmetric)
    return tiles * (columns // 2 + parts * form.groups(columns))


def held(each: Matrix, scheme: Scheme | None, float8: bool) -> int:
    """Bytes that one linear's weight takes: what a product reads, and where the reference rounds rows because no kernel
    does, the codes besides."""
    referred = scheme is not None and scheme.activation is not None and not has_kernel(scheme, each.columns, float8)
    beside = scheme.bytes((each.rows, each.columns)) if scheme is not None and referred else 0
    return size(each, scheme, float8) + beside


def weight_bytes(config: ModelConfig, storage: Storage, float8: bool) -> WeightBytes:
    """The weights as they lie on a card. Raises ValueError where a scheme's groups do not divide a linear's columns."""
    parts = {"linears": 0, "head": 0}
    beside = config.hidden * (config.learned_positions + config.position_offset if config.names.positions else 0)
    for each in costs.matrices(config):
        parts[each.part] += held(each, costs.checked(storage, each), float8)
        beside += each.rows if each.bias else 0
    embedding = 0 if config.tied else 2 * config.vocab_size * config.hidden
    return WeightBytes(parts["linears"], parts["head"], embedding, 2 * (beside + costs.norm_weights(config)))


def block_bytes(config: ModelConfig, kv: str, float8: bool, block: int = BLOCK) -> int:
    """Bytes of one block in all layers. Raises ValueError for what no kernel of a card keeps."""
    chosen = kv_scheme(kv)
    if chosen.name == "fp8" and not float8:
        raise ValueError("this card knows no float8, so keys and values cannot be kept in it: --kv int8 takes as much")
    if chosen.name not in ("float32", "bfloat16", "int8", "fp8", "int4"):
        raise ValueError(f"a card keeps keys and values as float32, bfloat16, int8, fp8 or int4, not {chosen.name}")
    scaled = 0 if chosen.unscaled else 4
    slot = config.head_dim * round(chosen.bits) // 8 + scaled
    return config.layers * 2 * config.kv_heads * block * slot


def step_bytes(config: ModelConfig, storage: Storage, limits: StepLimits, context: int) -> int:
    """A bound of what the largest step takes."""
    found = steps.largest_step(config, storage, limits, context)
    chosen = min(limits.rows, limits.sequences, AT_ONCE)
    return found.results + found.angles + chosen * config.vocab_size * steps.SAMPLING


def without_kernel(config: ModelConfig, storage: Storage, float8: bool) -> int:
    """Linears whose codes no kernel of a card knows, or whose rows none rounds."""
    stored = ((each, storage.of(each)) for each in costs.matrices(config))
    return sum(scheme is not None and not has_kernel(scheme, each.columns, float8) for each, scheme in stored)
