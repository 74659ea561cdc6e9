"""GPUs: the memory that a model takes on one, and the data sheets of some.

On a GPU, weights lie as the Triton kernels read them (`kernels/triton/weights.py`): dense ones in 16 bits, 4-bit ones
in tiles of 64 outputs. Where no kernel knows the codes, they are expanded to 16 bits. Where activations are to be
rounded and no kernel does so, the reference does; it keeps the codes as stored and a 16-bit copy besides. A GPU without
float8 in its tensor cores has no kernel for float8 codes. The KV cache has plain rows with a float32 scale per slot.
All figures are sums over shapes, and tests hold them against the real layouts. Not counted is what only a file's values
reveal: zero points that no kernel takes.

A step is bounded as on a CPU, by results in float32, though a GPU computes in 16 bits; tokens are sampled for up to
`AT_ONCE` rows together. No formula gives the memory of libraries, the driver and recorded graphs. A server measures it
when it starts (`engine/memory_profile.py`); here the margin is what `machine.SHARE` leaves. A GPU's memory is its data
sheet's figure in units of 10^9 bytes. Some GPUs report up to 7 % more, because their makers mean 2^30; on others error
correction takes about that part. A plan is on the safe side; `--device` asks the GPU itself. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attar.errors import UserError
from attar.formats.scheme import ITEM_BITS, Grid, Scheme, multiplied_in
from attar.formats.weight_formats import Fp8Blocks, Progressive
from attar.kv.schemes import SCHEMES, KvScheme
from attar.model.config import ModelConfig
from attar.model.fields import nearest
from attar.plan import costs, steps
from attar.plan.costs import BLOCK, Matrix, Storage, WeightBytes
from attar.plan.roofline import Rates
from attar.plan.steps import StepLimits

TILE = 64  # outputs that lie together
AT_ONCE = 64  # rows whose tokens are sampled together (`sampling/device_sampler.py`)
LEAST_GROUP, LEAST_ROUNDED = 32, 64  # columns of 4 bits under one scale: rows unrounded, and rounded to int8
MOST_COLUMNS = 65536  # most 8-by-8-bit products that one 32-bit sum holds
USUAL_KV = tuple(SCHEMES[name] for name in ("bfloat16", "int8", "int4"))


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Specification of one GPU.

    memory: bytes. bandwidth: bytes a second. operations: multiplications and additions a second by operand type (bf16,
    int8, fp8), of dense matrices. float8: whether its tensor cores support it (compute capability 8.9 and later).
    verified: whether the document was read that the numbers are from; plans print `unverified` otherwise.
    """

    name: str
    memory: int
    bandwidth: float
    operations: Mapping[str, float]
    float8: bool
    verified: bool = True

    @property
    def rates(self) -> Rates:
        """Return the GPU's rates for a roofline."""
        return Rates(
            self.bandwidth,
            lambda scheme: self.operations[multiplied_in(scheme)],
            lambda each, scheme: size(each, scheme, self.float8),
        )


def _sheet(
    name: str, gigabytes: int, gb_s: float, bf16: float, int8: float, fp8: float | None = None, verified: bool = True
) -> GpuSpec:
    """Make a `GpuSpec` from data-sheet figures: `bf16`, `int8`, `fp8` in 10^12 operations a second without sparsity.
    Without `fp8`, such codes are multiplied as bf16."""
    operations = {"bf16": bf16, "int8": int8, "fp8": bf16 if fp8 is None else fp8}
    rates = {kind: rate * 1e12 for kind, rate in operations.items()}
    return GpuSpec(name, gigabytes * 10**9, gb_s * 1e9, rates, fp8 is not None, verified)


GPUS: Mapping[str, GpuSpec] = {
    gpu_spec.name: gpu_spec
    for gpu_spec in (
        # A100 and A10 data sheets (2021). The cloud GPU A10G, with the A10's memory and fewer tensor cores, is not
        # listed.
        _sheet("a100-40gb", 40, 1555, 312, 624),
        _sheet("a100-80gb", 80, 2039, 312, 624),  # SXM; the PCIe card reads 1935
        _sheet("a10", 24, 600, 125, 250),
        # H100 and H200 SXM data sheets, whose figures include sparsity: halved.
        _sheet("h100", 80, 3350, 989.4, 1978.9, 1978.9),
        _sheet("h200", 141, 4800, 989.4, 1978.9, 1978.9),
        # L40S data sheet, and the whitepaper of the Ada architecture, for accumulation in float32.
        _sheet("l40s", 48, 864, 362.05, 733, 733),
        _sheet("rtx-4090", 24, 1008, 165.2, 660.6, 330.3),
        # Figures without a document that was read: plans print `unverified` beside them.
        _sheet("h100-pcie", 80, 2000, 756, 1513, 1513, verified=False),
        _sheet("h100-nvl", 94, 3900, 835, 1670, 1670, verified=False),
        _sheet("b200", 180, 8000, 2250, 4500, 4500, verified=False),
        _sheet("l4", 24, 300, 121, 242, 242, verified=False),
        _sheet("a10g", 24, 600, 70, 140, verified=False),
        _sheet("rtx-5090", 32, 1792, 209.5, 838, 419, verified=False),
        _sheet("m2-ultra", 192, 800, 54, 54, verified=False),
        _sheet("jetson-orin-64gb", 64, 204.8, 42.5, 85, verified=False),
    )
}


def gpu_spec(name: str) -> GpuSpec:
    """Return the specification of a GPU by its name. Raises ValueError that names the known ones."""
    if name not in GPUS:
        raise UserError(
            "name_unknown", f"unknown GPU {name[:80]!r}: known are {', '.join(sorted(GPUS))}{nearest(name, GPUS)}"
        )
    return GPUS[name]


def has_kernel(scheme: Scheme, columns: int, float8: bool) -> bool:
    """Return whether a kernel multiplies by weights of this scheme with `columns` columns, on a GPU with or without
    float8."""
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
    """Return whether a kernel takes rows rounded as the scheme wants, with weights of this number type."""
    rounding = scheme.activation
    if not isinstance(rounding, Grid) or (rounding.kind, rounding.bits) != (kind, 8) or not rounding.symmetric:
        return False
    return rounding.granularity != "group" and (rounding.granularity != "tensor" or scheme.static)


def size(each: Matrix, scheme: Scheme | None, float8: bool) -> int:
    """Return the bytes that a product reads of one linear's weight; without a kernel, of its 16-bit copy."""
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
    """Return the bytes that one linear's weight occupies.

    This is what a product reads, and the stored codes besides where the reference rounds rows for lack of a kernel.
    """
    referred = scheme is not None and scheme.activation is not None and not has_kernel(scheme, each.columns, float8)
    beside = scheme.bytes((each.rows, each.columns)) if scheme is not None and referred else 0
    return size(each, scheme, float8) + beside


def weight_bytes(config: ModelConfig, storage: Storage, float8: bool) -> WeightBytes:
    """Return the bytes of the weights on a GPU. Raises ValueError where a scheme's groups do not divide the columns."""
    parts = {"linears": 0, "head": 0}
    beside = config.hidden * (config.learned_positions + config.position_offset if config.names.positions else 0)
    for each in costs.matrices(config):
        parts[each.part] += held(each, costs.checked(storage, each), float8)
        beside += each.rows if each.bias else 0
    embedding = 0 if config.tied else 2 * config.vocab_size * config.hidden
    return WeightBytes(parts["linears"], parts["head"], embedding, 2 * (beside + costs.norm_weights(config)))


def block_bytes(config: ModelConfig, kv: KvScheme, float8: bool, block: int = BLOCK) -> int:
    """Return the bytes of one KV block in all layers. Raises ValueError for a scheme that no GPU kernel supports."""
    if kv.name == "fp8" and not float8:
        message = "this GPU has no float8, so the KV cache cannot be kept in it: --kv int8 takes as much"
        raise UserError("kv_unsupported", message)
    if kv.name not in ("float32", "bfloat16", "int8", "fp8", "int4"):
        message = f"a GPU keeps the KV cache as float32, bfloat16, int8, fp8 or int4, not {kv.name}"
        raise UserError("kv_unsupported", message)
    slot = config.head_dim * round(kv.bits) // 8 + (0 if kv.unscaled else 4)
    return config.layers * 2 * config.kv_heads * block * slot


def step_bytes(config: ModelConfig, storage: Storage, limits: StepLimits, context: int) -> int:
    """Return an upper bound of the bytes that the largest step takes."""
    found = steps.largest_step(config, storage, limits, context)
    chosen = min(limits.rows, limits.sequences, AT_ONCE)
    return found.results + found.angles + chosen * config.vocab_size * steps.SAMPLING


def without_kernel(config: ModelConfig, storage: Storage, float8: bool) -> int:
    """Count the linears whose codes no GPU kernel takes, or whose activation rounding none supports."""
    stored = ((each, storage.of(each)) for each in costs.matrices(config))
    return sum(scheme is not None and not has_kernel(scheme, each.columns, float8) for each, scheme in stored)
