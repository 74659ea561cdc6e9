"""GGML's blocks as schemes: their ledger, and that the codec gives what the encoders and the decoder do."""

from __future__ import annotations

import pytest
import torch

from attar.formats.codecs import ggml_blocks, ggml_codec, ggml_round, ggml_search
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme
from attar.formats.weight_formats import WEIGHT_FORMATS, GgmlBlocks
from tests.errors import user_error

NAMES = [name for name, form in WEIGHT_FORMATS.items() if isinstance(form, GgmlBlocks)]


@pytest.mark.parametrize("name", NAMES)
def test_a_type_is_a_scheme(name: str) -> None:
    scheme = Scheme.parse(name)
    kind = ggml_codec.type_of(scheme)
    assert (scheme.name, kind.name) == (name, name.upper())
    weight = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    encoder = ggml_round if name.upper() in ggml_round.ROUNDED else ggml_search
    packed = codec(scheme.weight.kind).quantize(weight, scheme)
    counts = (ggml_codec.by_size(weight),) if kind.name in ggml_codec.BY_SIZE else ()
    blocks = encoder.encode(kind, weight, *counts)
    assert packed.parts["blocks"].equal(blocks)
    assert packed.bits_per_weight == scheme.bits_per_weight((3, 512)) == kind.bits_per_weight
    whole = ggml_blocks.decode(kind, blocks)
    assert packed.dequantize().equal(whole)
    out = torch.empty(1, 512, dtype=torch.bfloat16)
    assert packed.dequantize(torch.bfloat16, slice(1, 2), out) is out
    assert out.equal(whole[1:2].bfloat16())


def test_large_weights_count_more_where_nothing_is_known() -> None:
    weight = torch.cat([torch.full((1, 32), 3.0), torch.tensor([[0.0] * 31 + [32**0.5]])], 1)
    wanted = torch.tensor([[6.0] * 32 + [1.0] * 31 + [1 + 32**0.5]])
    torch.testing.assert_close(ggml_codec.by_size(weight), wanted)


def test_columns_count_by_their_inputs_and_in_some_types_by_size() -> None:
    weight, mean = torch.full((2, 512), 0.5), torch.linspace(0, 1, 512)
    weight[1, 256:] = 0
    weight[1, 256] = 16.0  # the mean square of its block is 1
    found = ggml_codec.by_column(weight, Scheme.parse("q4_k"), mean)
    wanted = torch.full((2, 512), 0.75**0.5)
    wanted[1, 256:] = 2**0.5
    wanted[1, 256] = (2 + 16**2) ** 0.5
    torch.testing.assert_close(found, wanted * mean)
    assert ggml_codec.by_column(weight, Scheme.parse("iq4_xs"), mean) is mean


def test_importances_ask_for_the_search() -> None:
    weight, importance = torch.randn(2, 64), torch.rand(64)
    scheme = Scheme.parse("q4_0")
    found = ggml_codec.quantize(weight, scheme, importance).parts["blocks"]
    assert found.equal(ggml_search.encode(ggml_codec.type_of(scheme), weight, importance))


def test_refusals() -> None:
    scheme = Scheme.parse("q4_k")
    with user_error("group_size_indivisible"):
        scheme.weight.check(288)
    with user_error("scheme_unsupported"):
        _ = scheme.grid
    with user_error("scheme_unsupported"):
        Scheme(scheme.weight)
    with user_error("checkpoint_malformed"):
        PackedTensor(scheme, (1, 256), {"blocks": torch.zeros(1, 143, dtype=torch.uint8)})
