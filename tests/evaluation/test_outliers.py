"""The outlier profiler: planted channels are found, exactly they, and every figure is what torch says of the rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from outliers import CHANNELS, KINDS, inject
from safetensors.torch import load_file

from attar.checkpoints.sources import hf
from attar.evaluation.outliers import Spread, profile
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from tests.errors import user_error

Make = Callable[..., Decoder]

SAME_LOGITS = 1e-4  # of float32
FOURTH_MOMENTS = 1e-9  # relative difference of kurtosis to the textbook's order of operations


def test_planted_channels_are_found_and_no_others(demo: Path, tmp_path: Path) -> None:
    """Six channels of each norm, times 20 to 100: what bench/outliers.py plants."""
    source = inject(demo, tmp_path / "injected")
    before, after = (load_file(folder / "model.safetensors") for folder in (demo, source))
    ids = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(0)).tolist()
    clean = {place.linears[0]: place for place in profile(hf.load(demo, torch.float32), ids)}
    found = profile(hf.load(source, torch.float32), ids)
    assert len(found) == 6 * 4
    norms = {"q_proj, k_proj, v_proj": "input_layernorm", "gate_proj, up_proj": "post_attention_layernorm"}
    for place in found:
        assert place.tokens == 128
        was = clean[place.linears[0]]
        if place.kind not in norms:  # down_proj has some of its own
            assert place.outliers() == was.outliers()
            continue
        assert was.outliers() == []
        name = f"model.layers.{place.layer}.{norms[place.kind]}.weight"
        planted = (after[name] / before[name].float() > 10).nonzero()[:, 0].tolist()
        assert len(planted) == CHANNELS
        assert sorted(place.outliers()) == planted
        assert sorted(channel for channel, _ in place.top(CHANNELS)) == planted
        assert place.peak > 10 > was.peak
        assert place.input_kurtosis > 3 * was.input_kurtosis


def test_figures_are_those_of_the_rows(tiny_decoder: Make) -> None:
    decoder = tiny_decoder(layers=2)
    place, *_ = profile(decoder, [[1, 2, 3], [4, 5]])
    ids, block = torch.tensor([1, 2, 3, 4, 5]), decoder.blocks[0]
    table = decoder.embedding.table
    assert isinstance(table, torch.Tensor)
    rows = table[ids]
    x = rows / (rows.square().mean(-1, keepdim=True) + decoder.config.norm_eps).sqrt() * block.attention_norm.weight
    assert place.linears == ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
                             "model.layers.0.self_attn.v_proj")  # fmt: skip
    torch.testing.assert_close(place.inputs, x.abs().amax(0))
    weights = torch.cat([linear.weight for linear in block.attention.qkv])  # type: ignore[misc]
    torch.testing.assert_close(place.weights, weights.abs().amax(0))
    w = weights.double().flatten()
    kurtosis = float(((w - w.mean()) ** 4).mean() / w.var(correction=0) ** 2)
    assert place.weight_kurtosis == pytest.approx(kurtosis, rel=FOURTH_MOMENTS)


def test_packed_weights_are_profiled_as_what_they_stand_for(tiny_decoder: Make) -> None:
    packed, dense = (profile(tiny_decoder(scheme=scheme), [[1, 2, 3]]) for scheme in ("w8", None))
    for a, b in zip(packed, dense, strict=True):
        assert (a.weights - b.weights).abs().max() <= b.weights.max() / 127


def test_kurtosis_of_a_gaussian_is_three_and_of_equal_numbers_none() -> None:
    numbers = torch.Generator().manual_seed(0)
    spread = Spread(4)
    for _ in range(4):
        spread.add(7 + torch.randn(5000, 4, generator=numbers))
    assert spread.kurtosis == pytest.approx(3, abs=0.15)
    assert spread.rows == 20000
    same = Spread(2)
    assert same.kurtosis == 0
    same.add(torch.ones(3, 2))
    assert same.kurtosis == 0


def test_what_is_refused(tiny_decoder: Make) -> None:
    with user_error("text_empty"):
        profile(tiny_decoder(), [])
    broken = tiny_decoder(tensors={"model.layers.1.input_layernorm.weight": torch.full((64,), torch.nan)})
    with user_error("not_finite", "model.layers.1.self_attn.q_proj"):
        profile(broken, [[1, 2]])


@pytest.mark.parametrize("kinds", ["b", "c", "d", KINDS])
def test_planting_changes_no_logits(kinds: str, demo: Path, tmp_path: Path) -> None:
    ids = torch.randint(0, 4096, (48,), generator=torch.Generator().manual_seed(1))
    planted = inject(demo, tmp_path / "injected", kinds=kinds)
    base, out = (hf.load(folder, torch.float32).forward(ids, ForwardBatch((48,), 48)) for folder in (demo, planted))
    assert (out - base).abs().max() < SAME_LOGITS * base.abs().max()
    with pytest.raises(ValueError, match="letters of abcd"):
        inject(demo, tmp_path / "other", kinds="e")
