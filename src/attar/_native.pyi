import enum
from typing import overload

openmp: bool

def features() -> dict[str, bool]: ...
def levels() -> list[str]: ...
def decode_cpuid(
    leaf1_ecx: int, leaf7_ebx: int, leaf7_ecx: int, leaf7_edx: int, leaf7_1_eax: int, xcr0: int
) -> dict[str, bool]: ...
def quantize_rows_int8_float32(x: int, rows: int, columns: int, codes: int, scales: int, level: str) -> int: ...
def quantize_rows_int8_bfloat16(x: int, rows: int, columns: int, codes: int, scales: int, level: str) -> int: ...

class Arena:
    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...
    def allocate(self, bytes: int) -> int: ...

class Matrix:
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def integer(self) -> bool: ...

class Factors: ...

class LookupMatrix:
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class LookupFactors: ...

def make_lookup(
    arena: Arena, rows: int, columns: int, bits: int, outliers: int, starts: int, places: int, extras: int
) -> LookupMatrix: ...
def fill_lookup(matrix: LookupMatrix, first: int, count: int, codes: int, tables: int) -> None: ...
def lookup_factors(
    weights: list[tuple[LookupMatrix, int]], first: int, width: int, order: int, divisor: int
) -> LookupFactors: ...

class ProgressiveMatrix:
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class ProgressiveFactors: ...

def pack_progressive(
    arena: Arena, codes: int, rows: int, columns: int, group: int, factors: int, offsets: int, scales: int
) -> ProgressiveMatrix: ...
def progressive_factors(weights: list[tuple[ProgressiveMatrix, int]], first: int, width: int) -> ProgressiveFactors: ...
def make_matrix(
    arena: Arena,
    rows: int,
    columns: int,
    number: str,
    bits: int,
    group: int,
    scale_number: str,
    zeros: bool,
    offsets: bool,
    fine: int,
    table: list[float],
) -> Matrix: ...
def pack_sparse(arena: Arena, values: int, places: int, rows: int, columns: int, number: str) -> Matrix: ...
def fill_rows(
    matrix: Matrix,
    first: int,
    rows: int,
    codes: int,
    scales: int,
    zeros: int = 0,
    offsets: int = 0,
    fine_scales: int = 0,
    fine_offsets: int = 0,
) -> None: ...
def fill_ggml(matrix: Matrix, first: int, rows: int, type: str, blocks: int, bytes: int) -> None: ...
def pack_codes(
    arena: Arena,
    codes: int,
    plain: bool,
    rows: int,
    columns: int,
    bits: int,
    group: int,
    scales: int,
    scale_number: str,
    zeros: int,
) -> Matrix: ...
def prefer_huge_pages(start: int, bytes: int) -> None: ...
def pack_dense(arena: Arena, weights: int, rows: int, columns: int, number: str) -> Matrix: ...
def factors(
    weights: list[tuple[Matrix, int]],
    first: int,
    width: int,
    integer: bool,
    activation_group: int,
    fixed_scale: float,
    order: int,
    divisor: int,
    gate: str = "",
    rounding: str = "",
    wide: bool = False,
) -> Factors: ...
def linear(factors: Factors | LookupFactors | ProgressiveFactors, x: int, rows: int, out: int, level: str) -> None: ...
def many_rows(level: str) -> int: ...
def set_many_rows(level: str, rows: int) -> None: ...

class Table:
    @overload
    def __init__(self, dense: int, count: int, columns: int, number: str) -> None: ...
    @overload
    def __init__(self, packed: Matrix) -> None: ...
    @overload
    def __init__(self, tables: LookupMatrix) -> None: ...

def embed(
    table: Table, ids: int, rows: int, scale: float, position_table: Table | None, positions: int, offset: int, out: int
) -> None: ...
def norm(
    kind: str,
    stream: int,
    delta: int,
    rows: int,
    columns: int,
    weight: int,
    bias: int,
    eps: float,
    offset: float,
    sum: int,
    out: int,
    level: str,
) -> None: ...
def gumbel_max(rows: int, count: int, columns: int, seeds: int, indices: int, chosen: int) -> None: ...
def activate(kind: str, gated: bool, x: int, rows: int, columns: int, out: int, level: str) -> None: ...

class KvLayout(enum.Enum):
    float32 = ...
    bfloat16 = ...
    int8 = ...
    fp8 = ...
    bit_planes = ...
    kivi = ...
    kvquant = ...

def attention(
    layout: KvLayout,
    keys: int,
    values: int,
    key_scales: int,
    value_scales: int,
    key_zeros: int,
    value_zeros: int,
    blocks: int,
    block: int,
    kv_heads: int,
    head_dim: int,
    bases: int,
    units: int,
    bits: int,
    recent_keys: int,
    recent_values: int,
    tail_count: int,
    byte_scales: bool,
    outliers: int,
    signs: int,
    q: int,
    rows: int,
    heads: int,
    sequences: int,
    row_starts: int,
    lengths: int,
    tables: int,
    width: int,
    positions: int,
    key_positions: int,
    tree: int,
    tree_size: int,
    window: int,
    scale: float,
    soft_cap: float,
    out: int,
    mass: int,
    tails: int,
    dense_until: int,
    few_until: int,
    sinks: int,
    band: int,
    lost: float,
    whole: int,
    skipped: int,
    level: str,
) -> None: ...
def write_kv(
    layout: KvLayout,
    keys: int,
    values: int,
    key_scales: int,
    value_scales: int,
    key_zeros: int,
    value_zeros: int,
    blocks: int,
    block: int,
    kv_heads: int,
    head_dim: int,
    bases: int,
    units: int,
    bits: int,
    recent_keys: int,
    recent_values: int,
    tail_count: int,
    byte_scales: bool,
    outliers: int,
    signs: int,
    q: int,
    k: int,
    v: int,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    rows: int,
    heads: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    offset: float,
    cos: int,
    sin: int,
    angles: int,
    turned: int,
    angle: int,
    slots: int,
    q_out: int,
    row_starts: int,
    tails: int,
    sequences: int,
    level: str,
) -> None: ...
def busy_ns() -> int: ...
def read_all(arena: Arena, memory: int, bytes: int, level: str) -> int: ...
def multiply_int8(rounds: int, tiles: bool, level: str) -> int: ...
