"""GPUs: what a model takes of one's memory, and what some are by their data sheets.

On a card weights lie as Triton's kernels read them (`kernels/triton/weights.py`): dense ones in 16 bits, 4-bit ones in
tiles of 64 outputs, and those that no kernel knows written out in 16 bits. Keys and values lie in plain rows with a
scale a slot in float32. Both are sums over shapes, and tests hold them against the real layouts.

A step is bounded as on a CPU, by results in float32, though a card computes in 16 bits; its tokens are chosen of up to
`AT_ONCE` rows together. What a library or the driver takes, and what recorded graphs take, no formula knows: a server
measures those when it starts (`engine/footprint.py`), and here the room is what `machine.SHARE` leaves. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attar.formats.forms import Fp8Blocks, Progressive
from attar.formats.kv import scheme as kv_scheme
from attar.formats.scheme import ITEM_BITS, Grid, Scheme
from attar.model.config import ModelConfig
from attar.plan import costs, steps
from attar.plan.costs import BLOCK, Matrix, Storage, WeightBytes
from attar.plan.roofline import Rates
from attar.plan.steps import StepLimits

TILE = 64  # outputs that lie together
AT_ONCE = 64  # rows whose tokens are chosen together (`engine/device_sampler.py`)
LEAST_GROUP, LEAST_ROUNDED = 32, 64  # columns of 4 bits under one scale: of rows as they are, and rounded to int8
USUAL_KV = ("bfloat16", "int8", "int4")


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU. memory: bytes. bandwidth: bytes a second. operations: products and sums a second by what is multiplied,
    of dense matrices: bf16, int8, fp8."""

    name: str
    memory: int
    bandwidth: float
    operations: Mapping[str, float]

    @property
    def rates(self) -> Rates:
        """For a roofline."""
        return Rates(self.bandwidth, lambda scheme: self.operations[multiplied_in(scheme)], size)


def _sheet(name: str, gigabytes: int, gb_s: float, bf16: float, int8: float, fp8: float | None = None) -> Card:
    """`bf16`, `int8`, `fp8`: 10^12 a second without sparsity; a card without fp8 multiplies such codes as bf16."""
    operations = {"bf16": bf16, "int8": int8, "fp8": bf16 if fp8 is None else fp8}
    return Card(name, gigabytes * 10**9, gb_s * 1e9, {kind: rate * 1e12 for kind, rate in operations.items()})


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


def multiplied_in(scheme: Scheme | None) -> str:
    """What meets in the tensor cores: `bf16`, `int8` or `fp8`."""
    rounding = None if scheme is None else scheme.activation
    if rounding is None:
        return "bf16"
    return "fp8" if isinstance(rounding, Grid) and rounding.kind == "e4m3" else "int8"


def widened(scheme: Scheme, columns: int) -> bool:
    """Whether no kernel of a card knows such codes, so that they are written out."""
    form, rounds = scheme.weight, scheme.activation is not None
    if isinstance(form, Fp8Blocks):
        return columns % Fp8Blocks.size != 0
    if isinstance(form, Progressive):
        return not rounds or form.group % LEAST_ROUNDED != 0
    if not isinstance(form, Grid):
        return True
    if (form.kind, form.bits) == ("int", 4):
        return (form.group_size or columns) % (LEAST_ROUNDED if rounds else LEAST_GROUP) != 0 or columns % 16 != 0
    eight = form.bits == 8 and form.kind in ("int", "e4m3")
    return not eight or not form.symmetric or form.granularity == "group" or columns % 16 != 0


def size(each: Matrix, scheme: Scheme | None) -> int:
    """Bytes of one linear's weight, which is what a product reads."""
    rows, columns = each.rows, each.columns
    if scheme is None or widened(scheme, columns):
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


def weight_bytes(config: ModelConfig, storage: Storage) -> WeightBytes:
    """The weights as they lie on a card. Raises ValueError where a scheme's groups do not divide a linear's columns."""
    parts = {"linears": 0, "head": 0}
    beside = config.hidden * (config.learned_positions + config.position_offset if config.names.positions else 0)
    for each in costs.matrices(config):
        parts[each.part] += size(each, costs.checked(storage, each))
        beside += each.rows if each.bias else 0
    embedding = 0 if config.tied else 2 * config.vocab_size * config.hidden
    return WeightBytes(parts["linears"], parts["head"], embedding, 2 * (beside + costs.norm_weights(config)))


def block_bytes(config: ModelConfig, kv: str, block: int = BLOCK) -> int:
    """Bytes of one block in all layers. Raises ValueError for what no kernel of a card keeps."""
    chosen = kv_scheme(kv)
    if chosen.name not in ("float32", "bfloat16", "int8", "fp8", "int4"):
        raise ValueError(f"a card keeps keys and values as float32, bfloat16, int8, fp8 or int4, not {chosen.name}")
    scaled = 0 if chosen.kind == "float" else 4
    slot = config.head_dim * round(chosen.bits) // 8 + scaled
    return config.layers * 2 * config.kv_heads * block * slot


def step_bytes(config: ModelConfig, storage: Storage, limits: StepLimits, context: int) -> int:
    """A bound of what the largest step takes."""
    found = steps.largest_step(config, storage, limits, context)
    chosen = min(limits.rows, limits.sequences, AT_ONCE)
    return found.results + found.angles + chosen * config.vocab_size * steps.SAMPLING


def written_out(config: ModelConfig, storage: Storage) -> int:
    """Linears whose codes no kernel of a card knows."""
    stored = ((each, storage.of(each)) for each in costs.matrices(config))
    return sum(scheme is not None and widened(scheme, each.columns) for each, scheme in stored)
