"""A model in the memory of the native kernels: its parts are laid out on loading, and refused ones are noted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor

from attar.errors import UserError
from attar.formats.packed import PackedTensor
from attar.kernels.native.extension import library
from attar.kernels.native.linear import Activations, against, prepare
from attar.kernels.native.rows import Table
from attar.kernels.operands import Linear, Norm, Prepared

if TYPE_CHECKING:
    from attar.kernels.native.extension import Arena


class CpuWeights:
    """The weights of one model in kernel layout, in one memory; `activations` rounds rows where a scheme does not.

    Raises ValueError on construction for unknown `activations`.
    """

    dtype = torch.float32  # of rows, whatever is stored

    def __init__(self, activations: str = "int8g128") -> None:
        if activations not in get_args(Activations):
            raise UserError("name_unknown", f"activations are {', '.join(get_args(Activations))}, not {activations!r}")
        self.activations = cast(Activations, activations)
        self.arena: Arena = library.Arena()
        self.refused: dict[str, str] = {}
        """Reasons why some linear layers stay with the reference, by name."""

    def take(self, each: Linear) -> None:
        """Prepare the linear layer's weight, or note why it cannot be."""
        reason = against(each)
        if reason is None:
            prepare(each, self.arena, self.activations)
        else:
            self.refused[each.name] = reason
            each.weight = _own(each.weight)

    def take_norm(self, norm: Norm) -> None:
        norm.weight = norm.weight.float().contiguous()
        norm.bias = None if norm.bias is None else norm.bias.float().contiguous()
        norm.prepared = True

    def table(self, table: Tensor | PackedTensor | Prepared) -> Table:
        """Return the rows of an embedding, for reading. Packed rows stay packed where the kernels can read them."""
        own = Linear("embedding", table) if isinstance(table, PackedTensor) else None
        if own is not None and against(own) is None:
            prepare(own, self.arena, self.activations)
            return Table(own.weight)
        return Table(table if isinstance(table, Prepared) else _own(table))


def _own(weight: Any) -> Any:
    """Copy the weight into memory of its own: parts that are not laid out again may still lie on the pages of a
    file."""
    if isinstance(weight, PackedTensor):
        return PackedTensor(weight.scheme, weight.shape, {name: part.clone() for name, part in weight.parts.items()})
    return weight.clone() if isinstance(weight, Tensor) else weight
