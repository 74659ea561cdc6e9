"""Operands of the operations of `ops.py`, described by data: a `Linear`, a `Norm`, the form of an attention.

Shapes: N rows (tokens), I input columns, O output columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from attar.formats.packed import PackedTensor

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]


@runtime_checkable
class Prepared(Protocol):
    """A weight in the layout of a backend, which alone can read it."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def read_bytes(self) -> int:
        """Bytes that one product reads."""
        ...


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank change of a linear layer, which adds (x A^T) B^T to its product; x are the unrounded rows."""

    down: Tensor  # A [r, I], float32
    up: Tensor  # B [O, r], float32, times the adapter's scale

    def to(self, device: torch.device) -> Adapter:
        return Adapter(self.down.to(device), self.up.to(device))

    def product(self, x: Tensor) -> Tensor:
        """Return the change for rows x [N, I], [N, O], in their dtype."""
        return ((x.to(self.down.dtype) @ self.down.T) @ self.up.T).to(x.dtype)


@dataclass(frozen=True, eq=False)
class PreparedAdapter:
    """An adapter with A and B in the layout of a backend. A row's change then does not depend on other rows."""

    down: Linear
    up: Linear


AnyAdapter = Adapter | PreparedAdapter


class Routes:
    """The adapter of each row of a call: `numbers` [N] on the CPU, 0 for none.

    `send` brings tensors of the CPU to the rows' device, all of them together.
    """

    def __init__(self, numbers: Tensor, send: Callable[..., Sequence[Tensor]] = lambda *parts: parts) -> None:
        self.numbers, self._send = numbers, send

    @cached_property
    def groups(self) -> list[tuple[int, Tensor]]:
        """Each adapter's number with its rows, [n] int64 in order, on the rows' device: sent once, for all layers."""
        found = [n for n in self.numbers.unique().tolist() if n]
        rows = self._send(*((self.numbers == n).nonzero()[:, 0] for n in found))
        return list(zip(found, rows, strict=True))

    def of(self, rows: Tensor | slice) -> Routes | None:
        """Return the routes of some of the rows; None where none of them takes an adapter."""
        found = self.numbers[rows if isinstance(rows, slice) else rows.cpu()]
        return Routes(found, self._send) if found.any() else None


@dataclass(eq=False)
class Linear:
    """A linear layer y = x' W^T + b with W a dense tensor [O, I], or a PackedTensor or a prepared weight of that shape.

    x' is x with, in this order: blocks of `hadamard` columns rotated; columns taken in the order of `permutation` (a
    GPTQ checkpoint with desc_act stores its columns sorted by group); divided by `input_scale`; rounded to the scheme's
    activation grid, by the fixed `activation_scale` where the scheme is static.

    `name` is the module's name in the checkpoint, used by overrides, activation hooks and receipts.
    """

    name: str
    weight: Tensor | PackedTensor | Prepared
    bias: Tensor | None = None  # [O]
    permutation: Tensor | None = None  # [I] int64
    input_scale: Tensor | None = None  # [I]
    activation_scale: Tensor | None = None  # [1], float32
    hadamard: int = 0  # a power of two that divides I; 0: x is not rotated
    adapter: AnyAdapter | None = None  # of every row
    adapters: dict[int, AnyAdapter] = field(default_factory=dict, repr=False)
    """Adapters by number, for the rows that a call's `Routes` give that number."""
    dense: Tensor | None = field(default=None, repr=False)
    """The dequantized weight in the compute dtype, filled by the reference backend on first use."""
    keep_dense: bool = True  # may be filled: no where memory is short and calls are few and large
    product_dtype: torch.dtype | None = None
    """The dtype in which the reference multiplies by W, without gradients; None: that of the rows."""
    on_gradient: Callable[[Tensor, Tensor], None] | None = field(default=None, repr=False)
    """Called in a backward pass with the rows x' [N, I] that W multiplied and the loss's gradient at their products [N,
    O]."""

    @property
    def shape(self) -> tuple[int, int]:
        return (self.weight.shape[0], self.weight.shape[1])

    @property
    def vectors(self) -> tuple[int | None, ...]:
        """Addresses of the vectors by which x' is made: linear layers of equal ones read the same rows."""
        vectors = (self.permutation, self.input_scale, self.activation_scale)
        return tuple(None if vector is None else vector.data_ptr() for vector in vectors)


@dataclass(eq=False)
class Norm:
    """RMSNorm or LayerNorm over the last dimension. `offset` is added to the weight (Gemma stores weight - 1)."""

    kind: Literal["rms", "layer"]
    weight: Tensor  # [I]
    bias: Tensor | None = None  # [I]
    eps: float = 1e-6
    offset: float = 0.0
    name: str = ""  # the module's name in the checkpoint
    prepared: bool = False  # belongs to a native model: weight and bias are then contiguous float32


@dataclass(frozen=True)
class AttentionForm:
    """The parameters that distinguish one attention from another. Default: the feature is off."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query sees the last `window` keys, itself among them
    soft_cap: float | None = None  # scores become cap * tanh(score / cap)


ActivationHook = Callable[[Linear, Tensor], None]
"""An activation hook: called with a linear layer and the rows [N, I] that it is about to read. Calibration uses no
other."""
