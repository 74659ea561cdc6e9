"""Levels of GGML blocks, for solvers that go column by column: a block's scales are found first, then the codes.

The encoder (`codecs.ggml_codec`, weighted by how much each column counts) settles a block's fp16 scales and its
groups' small integers. The weights are the importances of the GGUF file: a given matrix, or else the mean squares that
the original model reads on the calibration text; without any, the diagonal of the solver's Hessian. These are worth the
same on the embedded model: KL of 0.996 on average, 0.95 to 1.04 each, over five types and two texts. But a matrix may
have seen more text than the solver is given. After that every value of a group is

    a code of the type, times the group's scale, plus the group's offset

in float32, as `ggml_blocks.decode` computes them, so that a solver can choose codes anew: what the encoder cannot do,
as each of its blocks is alone. `pack` puts them into the encoder's blocks. Scales are not fitted to codes afterwards:
those of a block's groups are whole numbers of one step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attar.formats.codecs import ggml_blocks, ggml_codec
from attar.formats.codecs.ggml_search import FORMS
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import GgmlBlocks


class Ggml:
    """Levels of one weight [O, I] in blocks; groups of `width` columns share a scale and an offset."""

    def __init__(self, weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> None:
        """Encode a weight. `importance` [I] weighs the squared error of each column. Raises ValueError as the codec."""
        assert isinstance(scheme.weight, GgmlBlocks)
        self.scheme, self.kind = scheme, scheme.weight.type
        self.shape = (weight.shape[0], weight.shape[1])
        raw = ggml_codec.quantize(weight.float(), scheme, importance).parts["blocks"]
        self._blocks = ggml_blocks.unpack(self.kind, raw.view(-1, self.kind.block_bytes))
        self.scale, self.offset = (part.view(len(weight), -1) for part in _affine(self._blocks))  # [O, G]
        self._values = torch.tensor(FORMS[self.kind.name].values).float()
        self._between = (self._values[1:] + self._values[:-1]) / 2

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.int8

    @property
    def width(self) -> int:
        return self.shape[1] // self.scale.shape[1]

    def nearest(self, column: int, x: Tensor) -> tuple[Tensor, Tensor]:
        at = column // self.width
        return self._nearest(x, self.scale[:, at], self.offset[:, at])

    def nearest_at(self, rows: Tensor, columns: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and values nearest to single elements x [n] at these rows and columns."""
        groups = columns // self.width
        return self._nearest(x, self.scale[rows, groups], self.offset[rows, groups])

    def values(self, columns: slice, codes: Tensor) -> Tensor:
        at = columns.start // self.width
        return codes * self.scale[:, at].to(codes.dtype) + self.offset[:, at].to(codes.dtype)

    def rounded(self, weight: Tensor, rows: slice) -> Tensor:
        parts = weight.unflatten(1, (self.scale.shape[1], -1))
        return self._nearest(parts, self.scale[rows, :, None], self.offset[rows, :, None])[1].flatten(1)

    def refit(self, columns: slice, codes: Tensor, pull: Tensor, own: Tensor) -> Tensor | None:
        return None

    def part(self, rows: slice) -> Ggml:
        """Return the levels of some rows, which cannot be packed."""
        found = object.__new__(Ggml)
        vars(found).update(vars(self))
        found.scale, found.offset = self.scale[rows], self.offset[rows]
        found.shape = (len(found.scale), self.shape[1])
        return found

    def copy(self) -> tuple[Tensor, Tensor | None]:
        """Return the state that `restore` puts back; here the levels never change."""
        return self.scale, None

    def restore(self, kept: tuple[Tensor, Tensor | None]) -> None:
        pass

    def pack(self, codes: Tensor) -> PackedTensor:
        codes = codes.T.contiguous().to(torch.int16).view(-1, self.kind.elements)
        raw = ggml_blocks.pack(self.kind, replace(self._blocks, codes=codes))
        return PackedTensor(self.scheme, self.shape, {"blocks": raw.view(self.shape[0], -1)})

    def _nearest(self, x: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        scale, offset = scale.to(x.dtype), offset.to(x.dtype)
        scaled = torch.where(scale == 0, 0.0, (x - offset) / scale)
        code = self._values.to(x.dtype)[torch.bucketize(scaled, self._between.to(x.dtype))]
        return code, code * scale + offset


def _affine(blocks: ggml_blocks.Blocks) -> tuple[Tensor, Tensor]:
    """Return scale and offset of each group, float32 [N, G]."""
    scale = blocks.d.float()
    if blocks.scales is not None:
        scale = scale * blocks.scales.float()
    if blocks.m is None:
        return scale, torch.zeros_like(scale)
    if blocks.mins is None:
        return scale, blocks.m.float()
    return scale, -(blocks.m.float() * blocks.mins.float())
