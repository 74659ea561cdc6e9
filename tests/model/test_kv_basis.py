"""Calibrated coordinates: what they promise, on a small model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attar.execution import kv_cache as engine_kv
from attar.kv import bit_planes
from attar.kv.bit_planes import Basis
from attar.kv.kvquant import Channels
from attar.kv.pages import Rotation
from attar.kv.schemes import scheme
from attar.model import kv_basis
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.model.layers import Attention
from tests.errors import user_error

Make = Callable[..., Decoder]
GAIN = 0.5
CLOSE = 0.2  # of logits of random weights, in 4 bits
SAME = 1e-4  # of numbers of about one, once more in float32
INVERSE = 2e-3  # of float32 matrices whose axes differ a thousandfold


@pytest.fixture(scope="module")
def decoder(request: pytest.FixtureRequest) -> Decoder:
    made: Decoder = request.getfixturevalue("tiny_decoder")()
    return made


def test_bases_are_invertible_and_deal_out_all_bits(decoder: Decoder) -> None:
    config = decoder.config
    ids = engine_kv.sample(decoder, 3, 1)
    assert ids.shape == (4, min(engine_kv.LENGTH, config.context))
    assert torch.equal(ids, engine_kv.sample(decoder, 3, 1))
    wanted = scheme("klt4")
    found = kv_basis.calibrate(decoder, ids, wanted)
    assert len(found) == config.layers
    for bases in found:
        for one in (bases.keys, bases.values):
            assert isinstance(one, Basis)
            eye = torch.eye(config.head_dim).expand_as(one.into)
            assert (one.into @ one.back - eye).abs().max() <= INVERSE
            assert all(sum(bits) == wanted.units(config.head_dim) for bits in one.bits)
            assert all(sorted(bits, reverse=True) == list(bits) for bits in one.bits)
    every = [one for bases in found for one in (bases.keys, bases.values)]
    assert len({one.bits for one in every if isinstance(one, Basis)}) > 1


def test_channels_of_kvquant(decoder: Decoder) -> None:
    """Keys are divided by their spread and values by each token's; levels ascend, and a cache of them runs."""
    config, wanted = decoder.config, scheme("nuq4")
    found = kv_basis.calibrate(decoder, engine_kv.sample(decoder, 3, 1), wanted)
    for bases in found:
        for one, scaled in ((bases.keys, False), (bases.values, True)):
            assert isinstance(one, Channels)
            assert one.scaled == scaled
            assert (one.levels.diff() > 0).all()
            assert (one.spread == 1).all() == scaled
    ids = torch.arange(40) % config.vocab_size
    plain = decoder.forward(ids, ForwardBatch((40,), 40), None)
    ours = decoder.forward(ids, ForwardBatch((40,), 40, decoder.cache(40, 1, wanted, found)), None)
    assert 0 < (ours - plain).norm() <= CLOSE * plain.norm()


def test_errors_count_less_than_in_the_plain_rotation() -> None:
    """At equal bits, of numbers that calibration has not seen: axes that vary tenfold, tokens of other lengths."""
    numbers = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn((2, 64, 64), generator=numbers, dtype=torch.float64))[0]
    spread = torch.logspace(0, -1, 64, dtype=torch.float64)
    lengths = torch.rand((3000, 2, 1), generator=numbers, dtype=torch.float64) * 4 + 0.2
    x = (
        torch.einsum("ngd,gde->nge", torch.randn((3000, 2, 64), generator=numbers).double() * spread, axes) * lengths
        + 1
    )
    root = torch.randn((2, 64, 64), generator=numbers, dtype=torch.float64)
    moment = root @ root.transpose(1, 2)
    errors = []
    for one in (kv_basis.basis(x[:2000], moment, 32, x[:2000].mean(0)), bit_planes.rotation(2, 64, 32)):
        rounded = one.turn_back(bit_planes.dequantize(*bit_planes.quantize(one.turn(x[2000:]), one), one))
        wrong = rounded.double() - x[2000:]
        errors.append(float(torch.einsum("ngd,gde,nge->", wrong, moment, wrong)))
    assert errors[0] <= GAIN * errors[1]


@pytest.mark.parametrize(("far", "size"), [(0.0, 1.0), (50.0, 1.0), (0.0, 0.01), (50.0, 0.01)])
def test_a_first_token_apart_is_kept(
    decoder: Decoder, far: float, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained models attend to the first token: its key may be far from all others, and its value near zero."""
    heads, seen = Attention.heads, list[tuple[torch.Tensor, torch.Tensor]]()

    def with_sink(self: Attention, x: torch.Tensor, rotation: Rotation | None) -> tuple[torch.Tensor, ...]:
        q, k, v = heads(self, x, rotation)
        k, v = k.clone(), v.clone()
        k[0] += far
        v[0] *= size
        seen.append((k, v))
        return q, k, v

    monkeypatch.setattr(Attention, "heads", with_sink)
    bases = kv_basis.calibrate(decoder, engine_kv.sample(decoder, 3, 1), scheme("klt4"))[0]
    keys, values = (torch.stack(each) for each in zip(*seen[:4], strict=True))  # [text, token, G, D]
    for one, numbers, kept in ((bases.keys, keys, far > 0), (bases.values, values, far > 0 or size < 1)):
        assert isinstance(one, Basis)
        centre = numbers[:, 0].mean(0) if kept else numbers[:, 1:].mean((0, 1))
        assert (one.mean - centre).abs().max() <= SAME


def test_texts_that_do_not_fit(decoder: Decoder) -> None:
    with user_error("context_exceeded"):
        kv_basis.calibrate(decoder, torch.zeros((2, decoder.config.context + 1), dtype=torch.int64), scheme("klt4"))
