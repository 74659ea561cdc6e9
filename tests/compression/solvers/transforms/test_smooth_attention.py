"""SmoothAttention: the scores it must not change, the pairs it must keep together, and what it gains."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attar.compression.solvers.transforms import smooth_attention
from attar.kv import bit_planes, schemes

SAME = 1e-12  # relative, float64
RIDGED = 2e-2  # what the ridge makes of the least cost
FLOAT = 1e-6  # of sums of float32, over the largest
HEADS, KV_HEADS, DIM, TURNING = 6, 2, 32, 24  # partial rotary: eight channels pass
NUMBERS = torch.Generator().manual_seed(0)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding [N, heads, D] in float64, half-split pairs, written a second time."""
    half = TURNING // 2
    angles = positions[:, None] / 100.0 ** (torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.complex(x[..., :half], x[..., half:TURNING]) * turn
    return torch.cat((pairs.real, pairs.imag, x[..., TURNING:]), -1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    positions = torch.arange(len(q), dtype=torch.float64)
    keys = turned(k, positions).repeat_interleave(HEADS // KV_HEADS, 1)
    return torch.einsum("nhd,mhd->hnm", turned(q, positions), keys)


def random_heads(heads: int, tokens: int = 16) -> Tensor:
    return torch.randn(tokens, heads, DIM, generator=NUMBERS, dtype=torch.float64)


def test_scores_stay_and_only_where_pairs_are_tied() -> None:
    q, k = random_heads(HEADS), random_heads(KV_HEADS)
    k[..., 5] *= 40
    scales = smooth_attention.scales(k.abs().amax(0), TURNING, 0.5).double()
    before = scores(q, k)

    def after(scales: Tensor) -> float:
        found = scores(q * scales.repeat_interleave(HEADS // KV_HEADS, 0), k / scales)
        return float((found - before).abs().max() / before.abs().max())

    assert after(scales) < SAME
    scales[:, 5] *= 2  # and not its partner
    assert after(scales) > 1e-3


def test_the_published_scale_is_the_root_of_the_larger_of_a_pair() -> None:
    largest = torch.rand(KV_HEADS, DIM, generator=NUMBERS) + 0.5
    found = smooth_attention.scales(largest, TURNING, 0.5)
    half = TURNING // 2
    pair = torch.maximum(largest[:, :half], largest[:, half:TURNING])
    want = torch.cat((pair, pair, largest[:, TURNING:]), 1).sqrt()
    torch.testing.assert_close(found / found[:, :1], want / want[:, :1])
    assert found.log().mean().abs() < 1e-6
    assert smooth_attention.scales(largest, TURNING, 0.0).eq(1).all()
    assert smooth_attention.scales(largest, 0, 1.0).gt(0).all()  # no channel turns


def test_the_statistic_does_not_depend_on_how_rows_come() -> None:
    q, k, v = (random_heads(many, 64).float() for many in (HEADS, KV_HEADS, KV_HEADS))
    whole, pieces = (smooth_attention.Channels(KV_HEADS, DIM) for _ in range(2))
    whole.add(q, k, v)
    for part in zip(q.split(20), k.split(20), v.split(20), strict=True):
        pieces.add(*part)
    assert whole.key_max.equal(k.abs().amax(0))
    assert whole.rows == pieces.rows == 64
    assert torch.cat(pieces.kept).equal(k)
    torch.testing.assert_close(whole.moment, pieces.moment, rtol=FLOAT, atol=FLOAT * float(whole.moment.max()))
    each = q.unflatten(1, (KV_HEADS, -1))[:, 1]
    torch.testing.assert_close(whole.moment[1].float(), torch.einsum("nhd,nhe->de", each, each))


def test_what_is_searched_leaves_scores_nearer_than_nothing_and_than_what_is_published() -> None:
    q, k = random_heads(HEADS, 256).float(), random_heads(KV_HEADS, 256).float()
    k[..., 3] *= 30
    k[..., 3 + TURNING // 2] *= 20
    q[..., 3] /= 20
    seen = smooth_attention.Channels(KV_HEADS, DIM)
    seen.add(q, k, k)
    scheme = schemes.scheme("int4")
    basis = bit_planes.rotation(KV_HEADS, DIM, scheme.units(DIM))

    def wrong(scales: Tensor) -> float:
        y = basis.turn(k / scales)
        kept = (
            torch.einsum("nge,ged->ngd", bit_planes.dequantize(*bit_planes.quantize(y, basis), basis), basis.back)
            * scales
        )
        return math.fsum(float((q[:, h] @ (kept - k)[:, h * KV_HEADS // HEADS].T).square().sum()) for h in range(HEADS))

    found = smooth_attention.search(seen, TURNING, scheme)
    assert found[:, : TURNING // 2].equal(found[:, TURNING // 2 : TURNING])
    published = smooth_attention.scales(seen.key_max, TURNING, 0.5)
    assert wrong(found) < 0.5 * wrong(torch.ones(KV_HEADS, DIM))
    assert wrong(found) <= wrong(published)


def test_values_are_turned_so_that_the_same_error_costs_least() -> None:
    mixing = random_heads(KV_HEADS, DIM).movedim(1, 0)  # [G, D, D]
    values = torch.einsum(
        "ngd,gde->nge", random_heads(KV_HEADS, 256), mixing * torch.rand(DIM, generator=NUMBERS).exp()
    )
    output = torch.randn(48, HEADS * DIM, generator=NUMBERS, dtype=torch.float64)
    output *= torch.rand(HEADS * DIM, generator=NUMBERS).mul(3).exp()
    seen = torch.einsum("ngd,nge->gde", values, values)
    turn, back = smooth_attention.between(seen, output)
    heads = output.view(48, KV_HEADS, -1, DIM)
    metric = torch.einsum("ogrd,ogre->gde", heads, heads)

    def cost(turn: Tensor) -> Tensor:
        back = torch.linalg.inv(turn)
        size = torch.einsum("gde,gdf,gfe->g", turn, seen, turn)
        return size * torch.einsum("ged,gdf,gef->g", back, metric, back)

    torch.testing.assert_close(turn @ back, torch.eye(DIM, dtype=torch.float64).expand_as(turn))
    eigenvalues = torch.linalg.eigvals(seen @ metric).real.clamp(min=0)
    least = eigenvalues.sqrt().sum(-1).square()  # what no matrix is below
    torch.testing.assert_close(cost(turn), least, rtol=RIDGED, atol=0)
    diagonal = (metric.diagonal(dim1=1, dim2=2) / seen.diagonal(dim1=1, dim2=2)) ** 0.25
    assert (cost(turn) < 0.9 * cost(torch.diag_embed(diagonal))).all()
    seen[1] = 0
    assert smooth_attention.between(seen, output)[0][1].equal(torch.eye(DIM, dtype=torch.float64))
