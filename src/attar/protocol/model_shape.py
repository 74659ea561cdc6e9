"""Shape and sizes of a served model, and measured rates of its machine: what the lab's page computes with."""

from __future__ import annotations

import msgspec


class StoredWeights(msgspec.Struct, frozen=True):
    """Bytes of a model's weights in memory by part, stored as `name` says. `embedding` is 0 where it is tied."""

    name: str
    linears: int
    head: int
    embedding: int
    norms: int


class StoredKv(msgspec.Struct, frozen=True):
    """A KV cache format: bits of a stored number with its side data, and bytes of a token in all layers."""

    name: str
    bits: float
    token: int


class ModelShape(msgspec.Struct, frozen=True):
    """Shape of a model and the bytes that it takes. All counts of weights are numbers, not bytes."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    linears: int  # weights of the blocks' linear layers
    active: int  # of these, and of the head, the ones that a token's products use; experts by their share
    head: int
    embedding: int  # 0 where it is tied to the head
    bytes: StoredWeights  # as loaded
    storages: tuple[StoredWeights, ...]  # other ways to store it that are worth comparing
    kv: str  # the format of the KV cache
    kv_formats: tuple[StoredKv, ...]  # all that the model's heads support
    read: int  # bytes of weights that a step of one row reads
    step: int  # bytes of the largest step
    processes: int  # bytes of the processes besides the model
    block: int  # tokens of a block
    headroom: float  # fraction of all blocks that an admission leaves free


class MachineRates(msgspec.Struct, frozen=True):
    """Rates of a machine, a second: bytes read, int8 operations, and those of other products, where measured.

    rows: seconds of one pass of the model by its rows, rising, where measured. reached: fractions of the bandwidth and
    of the arithmetic that kernels reach. overhead: seconds of a step beside both.
    """

    read: float
    int8: float
    bf16: float | None
    memory: int | None
    memory_source: str
    source: str
    name: str = "this machine"
    rows: tuple[tuple[int, float], ...] = ()
    reached: tuple[float, float] = (1.0, 1.0)
    overhead: float = 0.0
