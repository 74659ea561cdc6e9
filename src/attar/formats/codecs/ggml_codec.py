"""Weights as the blocks of a GGML type: one part, `blocks`, uint8 [O, bytes of a row], as GGUF files hold them.

The arithmetic lives in `ggml_blocks.py` (values), `ggml_round.py` (types with one right rounding) and `ggml_search.py`
(types whose scales are searched); this module makes them one codec for `packed.codec`. A type that both of the latter
know is rounded, unless importances are given.

Where each weight is rounded by itself, the weight of its error estimates the loss. llama.cpp's rules for it were found
on large models. They are followed where they did not lose on the bundled demo model (held-out KL, relative to errors
weighted equally or by column; chance in rounding alone moves it by 5 % and more):

* without importances large weights count more in Q4_K and Q5_K (`by_size`): 0.92 and 0.90. In the others it loses: Q2_K
  1.12, Q6_K 1.16, Q3_K 1.21;
* with them, columns count by their importance, in Q3_K to Q5_K times the weights' size (`by_column`): 0.94, 1.00, 0.92.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attar.formats.codecs import ggml_blocks, ggml_round, ggml_search
from attar.formats.codecs.ggml import GgmlType
from attar.formats.packed import ALL, PackedTensor
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import GgmlBlocks

BY_SIZE = ("Q4_K", "Q5_K")
BY_COLUMN_AND_SIZE = ("Q3_K", "Q4_K", "Q5_K")


def quantize(weight: Tensor, scheme: Scheme, importance: Tensor | None = None) -> PackedTensor:
    """Encode a weight [O, I] in blocks. `importance`, [I] or [O, I], weights the squared error of each weight. Raises
    ValueError like `ggml_round.encode` and `ggml_search.encode`."""
    kind = type_of(scheme)
    if kind.name in ggml_round.ROUNDED and (importance is None or kind.name not in ggml_search.FORMS):
        blocks = ggml_round.encode(kind, weight)
    else:
        if importance is None and kind.name in BY_SIZE:
            importance = by_size(weight)
        blocks = ggml_search.encode(kind, weight, importance)
    return PackedTensor(scheme, (weight.shape[0], weight.shape[1]), {"blocks": blocks})


def by_size(weight: Tensor) -> Tensor:
    """Return |w| + r of each weight w [O, I], r being the root mean square of its group of 32."""
    groups = weight.float().view(len(weight), -1, 32)
    return (groups.abs() + groups.square().mean(2, keepdim=True).sqrt()).flatten(1)


def by_column(weight: Tensor, scheme: Scheme, mean: Tensor) -> Tensor:
    """Return the importance of each weight w of [O, I] from the mean squares [I] of the columns' inputs. It is the mean
    square itself, in some types times sqrt(2 s + w^2), s being the mean square of the block of w. The result is [I] or
    [O, I]."""
    kind = type_of(scheme)
    if kind.name not in BY_COLUMN_AND_SIZE:
        return mean
    squares = weight.float().square().view(len(weight), -1, kind.elements)
    return mean * (2 * squares.mean(2, keepdim=True) + squares).sqrt().flatten(1)


def dequantize(
    packed: PackedTensor, dtype: torch.dtype = torch.float32, rows: slice = ALL, out: Tensor | None = None
) -> Tensor:
    """Return the weight [O, I] in `dtype`, or some of its rows: computed in float32, as GGML does, then rounded."""
    return ggml_blocks.decode(type_of(packed.scheme), packed.parts["blocks"][rows], dtype, out)


def type_of(scheme: Scheme) -> GgmlType:
    assert isinstance(scheme.weight, GgmlBlocks)
    return scheme.weight.type
