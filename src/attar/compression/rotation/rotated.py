"""A checkpoint seen in rotated coordinates: each stored tensor is transformed when it is read.

Nothing is stored twice. A tensor is changed on its way from the file, in float64, and rounded to its stored dtype,
unless it is about to be compressed anyway. All readers of the view, from the block pass to gradients and tuning, see an
ordinary model. `rotation` decides the changes; this module has them as data, and the view that makes them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.checkpoints.folder import Folder, FolderView
from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.solvers.transforms.rotations import Rotation
from attar.errors import UserError
from attar.formats.packing import row_slices
from attar.formats.scheme import Part
from attar.kernels.operands import Linear
from attar.model.assembly import Weights


@dataclass(frozen=True, eq=False)
class Balance:
    """Scales [n] that divide the outputs of one linear and multiply the inputs of another, to balance their norms.
    Afterwards the rows of the one, columns multiplied by the weight of `norm`, and the columns of the other have the
    same norms. If rows are all alike random, a channel's share of the error after rotation is that of its size. The
    cost of that error is that of the columns that read it. Their product is least where both are the same
    (Cauchy-Schwarz)."""

    source: str  # the weight whose last n outputs are scaled
    norm: str
    reader: str
    size: int  # n
    head_dim: int  # channels of a head, each read `groups` times
    groups: int
    turned: bool


@dataclass(frozen=True, eq=False)
class Matrix:
    """A linear's weight [O, I], or a table of rows [O, I], of the stored tensor `source`. Its columns are multiplied by
    the weight of `norm` or by `times`, then rotated by `inputs`. Its `last` rows, or all where that is 0, are divided
    by `over`, then rotated by `outputs`."""

    source: str
    norm: str | None = None
    inputs: Rotation | None = None
    outputs: Rotation | None = None
    last: int = 0
    turned: bool = False  # whether the tensor is stored [I, O]
    times: Balance | None = None
    over: Balance | None = None

    @property
    def by_rows(self) -> bool:
        """Return whether each stored row can be computed alone."""
        return self.outputs is None and self.over is None and not self.turned


@dataclass(frozen=True, eq=False)
class Vector:
    """A linear's bias [O], rotated like the outputs of its weight, plus that weight times the bias of `norm`."""

    source: str
    outputs: Rotation | None = None
    last: int = 0
    weight: str = ""
    norm: str | None = None
    turned: bool = False
    over: Balance | None = None


class NormWeight:
    """A norm's weight after the linears behind it have absorbed it: ones."""


@dataclass(frozen=True, eq=False)
class NormBias:
    """A norm's bias after folding: zero where biases of linears absorb it, else (bias / weight) R."""

    norm: str
    inputs: Rotation | None


Change = Matrix | Vector | NormWeight | NormBias


class RotatedFolder(FolderView):
    """A folder whose tensors are read with their changes, in the dtypes and shapes that `info` says. `added` maps
    additional tensors to those they are made of. Tables that are `wide` are read at least in float32: their readers
    round them to another dtype."""

    def __init__(
        self, folder: Folder, changes: Mapping[str, Change], added: Mapping[str, str], config: Mapping[str, object]
    ) -> None:
        super().__init__(folder, (*folder.names(), *added), config)
        self._changes, self._added = changes, added
        self._balances: dict[Balance, Tensor] = {}
        self.wide: Collection[str] = ()

    def info(self, name: str) -> Part:
        return self.of.info(self._added.get(name, name))

    def read(self, name: str, out: Tensor | None = None) -> Tensor:
        change = self._changes.get(name)
        if change is None:
            return self.of.read(self._added.get(name, name), out)
        dtype: torch.dtype = getattr(torch, self.info(name).dtype)
        if isinstance(change, NormWeight):
            found = torch.ones(self.info(name).shape, dtype=dtype)
        elif isinstance(change, NormBias):
            found = self._norm_bias(change).to(dtype)
        elif isinstance(change, Vector):
            found = self._vector(change).to(dtype)
        elif change.by_rows:  # some rows at a time, for tables larger than a block
            rows, columns = self.info(name).shape
            found = torch.empty(rows, columns, dtype=_at_least_float32(dtype) if name in self.wide else dtype)
            for some in row_slices(rows, columns):
                found[some] = self.read_rows(name, some.start, some.stop)
        else:
            found = self._matrix(change).to(dtype)
        return found if out is None else out.copy_(found)

    def exact(self, name: str) -> Tensor:
        """Return the matrix or bias `name` before rounding to its stored dtype, at least in float32."""
        change = self._changes[name]
        assert isinstance(change, Matrix | Vector)
        found = self._matrix(change) if isinstance(change, Matrix) else self._vector(change)
        return found.to(_at_least_float32(getattr(torch, self.info(name).dtype)))

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        change = self._changes.get(name)
        if change is None:
            return self.of.read_rows(self._added.get(name, name), start, stop)
        if isinstance(change, Matrix) and change.by_rows:
            rows = self.of.read_rows(change.source, start, stop)
            dtype = _at_least_float32(rows.dtype) if name in self.wide else rows.dtype
            return self._columns(change, rows.double()).to(dtype)
        return self.read(name)[start:stop]

    def _columns(self, change: Matrix, weight: Tensor) -> Tensor:
        """Apply the column changes of a matrix to some of its rows."""
        if change.norm is not None:
            weight = weight * self._weight_of(change.norm)
        if (balance := change.times) is not None:
            scales = self._scales(balance).view(-1, 1, balance.head_dim).expand(-1, balance.groups, -1)
            weight = weight * scales.reshape(-1)
        return weight if change.inputs is None else change.inputs.apply(weight)

    def _matrix(self, change: Matrix) -> Tensor:
        stored = self.of.read(change.source).double()
        weight = self._columns(change, stored.T if change.turned else stored)
        if change.over is not None:
            weight[-change.last :] /= self._scales(change.over)[:, None]
        if change.outputs is not None:
            weight[-change.last :] = change.outputs.apply(weight[-change.last :].T).T
        return weight.T.contiguous() if change.turned else weight

    def _vector(self, change: Vector) -> Tensor:
        bias = self.of.read(change.source).double()
        if change.norm is not None:
            weight = self.of.read(change.weight).double()
            bias = bias + (weight.T if change.turned else weight) @ self.of.read(f"{change.norm}.bias").double()
        if change.over is not None:
            bias[-change.last :] /= self._scales(change.over)
        if change.outputs is not None:
            bias[-change.last :] = change.outputs.apply(bias[-change.last :])
        return bias

    def _norm_bias(self, change: NormBias) -> Tensor:
        bias = self.of.read(f"{change.norm}.bias").double()
        if change.inputs is None:
            return torch.zeros_like(bias)
        weight = self._weight_of(change.norm)
        if bool(((weight == 0) & (bias != 0)).any()):
            raise UserError(
                "feature_unsupported",
                f"{change.norm}: a channel has weight 0 and a bias, which no linear behind it takes in",
            )
        return change.inputs.apply(torch.where(bias == 0, 0.0, bias / weight))

    def _scales(self, balance: Balance) -> Tensor:
        """Return the scales [n], 1 where a row or its columns are zero."""
        if balance not in self._balances:
            weight, reader = self.of.read(balance.source).double(), self.of.read(balance.reader).double()
            weight, reader = (weight.T, reader.T) if balance.turned else (weight, reader)
            rows = (weight[-balance.size :] * self._weight_of(balance.norm)).norm(dim=1)
            columns = reader.norm(dim=0).view(-1, balance.groups, balance.head_dim).norm(dim=1).flatten()
            self._balances[balance] = torch.where((rows == 0) | (columns == 0), 1.0, (rows / columns).sqrt())
        return self._balances[balance]

    def _weight_of(self, norm: str) -> Tensor:
        """Return the weight of a norm, by the stored name of its module."""
        return self.of.read(f"{norm}.weight").double()


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.float32, dtype)


class RotatedCheckpoint(Checkpoint):
    """The rotated checkpoint. Inputs of the linears `online`, by name, are rotated at run time."""

    online: Mapping[str, int]
    rounded: Collection[str]  # linears with a scheme, whose weights are not rounded to the stored dtype first
    stream: Rotation  # rotation of the residual stream
    heads: Sequence[Rotation | None]  # rotations of the values of each layer's heads
    untied: bool  # whether a tied LM head became a tensor of its own

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes for users who load the result elsewhere."""
        said = []
        if self.online:
            said.append(
                "Inputs of some linears are rotated at run time, as `transform_config` says: what loads it without "
                "reading that, such as transformers 5.23, answers nonsense."
            )
        if self.untied:
            said.append(
                "The LM head, which was the embedding's before, is stored apart, because rotation folds the last "
                "norm into it: `--head int8` or `int4` makes it smaller."
            )
        return tuple(said)

    def rows(self, ids: Tensor) -> Weights:
        wide = copy.copy(self)
        if isinstance(self.folder, RotatedFolder) and self.folder.wide:
            wide.dtype = _at_least_float32(self.dtype)
        return Checkpoint.rows(wide, ids)

    def linear(self, name: str) -> Linear:
        if name in self.rounded and isinstance(self.folder, RotatedFolder):
            weight = self.folder.exact(self.stored_name(f"{name}.weight"))
            found = Linear(name, weight.T.contiguous() if self.config.names.is_transposed(name) else weight)
            bias = f"{name}.bias"
            if self.has(bias):
                exact = self.stored_name(bias) in self.folder.wide
                found.bias = self.folder.exact(self.stored_name(bias)) if exact else self.tensor(bias)
        else:
            found = super().linear(name)
        found.hadamard = self.online.get(name, 0)
        return found
