"""What a recipe gained over plain rounding: on text that it has not read, and told where it lost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from attar.checkpoints.sources import hf, opening
from attar.compression.calibration import texts
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.compression.request.request import CompressionRequest
from attar.compression.runs import pipeline
from attar.compression.search import compare_rtn
from attar.compression.search.compare_rtn import Gain
from attar.formats.packed import PackedTensor
from attar.metrics.measure import Report, measure
from attar.model.decoder import Decoder


@given(st.integers(2, 400), st.integers(1, 12), st.integers(2, 40), st.sampled_from([None, 7]), st.integers(1, 9))
def test_what_lies_between_is_none_of_what_is_read(
    tokens: int, samples: int, length: int, bos: int | None, most: int
) -> None:
    """And nothing is left out while there is room for it."""
    ids = list(range(100, 100 + tokens))
    read = texts.windows(ids, samples, length, bos)
    left = texts.between(ids, samples, length, bos, most)
    body = length - (bos is not None)
    rest = max(0, tokens // body - samples)
    if left is None:
        assert rest == 0
        return
    assert left.shape == (min(rest, most), length)
    own = slice(bos is not None, None)
    assert not {*left[:, own].flatten().tolist()} & {*read[:, own].flatten().tolist()}


@pytest.mark.parametrize(
    "name, expected",
    [
        ("gptq-w4g128", "rtn-w4g128"), ("awq+gptq-w3g64", "rtn-w3g64"), ("smoothquant-w8a8", "rtn-w8a8"),
        ("rotate+guided+tune-w4g128-asym", "rtn-w4g128-asym"), ("gptq-q4_k_m", "rtn-q4_k_m"),
        ("squeezellm-lut4", "rtn-lut4"), ("rtn-w4g128", None), ("q4_k_m", None), ("prune-2:4", None),
        ("structured-p25", None), ("prune-2:4-w4g128", None),
    ],
)  # fmt: skip
def test_plain_rounding_of_a_recipe(name: str, expected: str | None) -> None:
    found = compare_rtn.plain(load_recipe(name))
    assert found == (None if expected is None else load_recipe(expected))


def test_options_and_overrides_of_schemes_stay() -> None:
    kept = {"overrides": [{"match": "*.down_proj", "scheme": "w8"}], "head": "w8"}
    found = compare_rtn.plain(recipe_from_dict({"recipe": "gptq-w4g128", "damping": 0.02} | kept))
    assert found == recipe_from_dict({"recipe": "rtn-w4g128"} | kept)


def test_who_lost_is_told() -> None:
    lost = Gain(2048, 0.041, (0.04, 0.042), 0.036, None)
    (told,) = lost.warnings("smoothquant-w4g128")
    assert "smoothquant-w4g128 is worse than plain rounding (mean KL 0.041, without it 0.036)" in told
    assert told.endswith("or leave out what does not help (ablate-smoothquant-w4g128)")
    assert "ablate" not in lost.warnings("smoothattention-w4g128")[0], "that step stays"
    assert not Gain(2048, 0.036, None, 0.041, None).warnings("gptq-w4g128")
    assert Gain.from_dict(json.loads(json.dumps(asdict(lost)))) == lost


def test_both_are_measured_on_what_neither_read(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are those of the outputs themselves, and of one that was rounded by hand."""
    seen: list[torch.Tensor] = []
    plain = compare_rtn.sequences

    def sequences(*given: object) -> torch.Tensor | None:
        found = plain(*given)  # type: ignore[arg-type]
        assert found is not None
        seen.append(found)
        return found

    monkeypatch.setattr(compare_rtn, "sequences", sequences)
    done = pipeline.compress_request(
        CompressionRequest(tiny, tmp_path / "out", recipe="gptq-w3g32", calibration="self", samples=6, length=32)
    )
    pipeline.compress(tiny, tmp_path / "rounded", recipe="rtn-w3g32")
    (ids,) = seen
    windows = [[*row, 0] for row in ids.tolist()]
    base = opening.load(tiny, torch.float32)
    ours, theirs = (
        measure(opening.load(tmp_path / name, torch.float32), windows, base=base, context=32)
        for name in ("out", "rounded")
    )
    assert done.gain is not None
    assert done.gain["kl"] == ours.figures["kl_mean"].value
    assert done.gain["plain"] == theirs.figures["kl_mean"].value
    assert done.gain["tokens"] == ids.numel() == compare_rtn.SEQUENCES * 32
    assert json.loads((tmp_path / "out" / "receipt.json").read_text())["gain"]["kl"] == done.gain["kl"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rounded"]


def test_weights_stay_as_they_are_stored(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 copies of two models took most of the memory of a whole compression."""
    pipeline.compress(tiny, tmp_path / "out", recipe="rtn-w3g32")
    compared: list[Decoder] = []

    def measured(model: Decoder, windows: list[list[int]], *, base: Decoder, context: int) -> Report:
        found = measure(model, windows, base=base, context=context)
        compared.extend((model, base))
        return found

    monkeypatch.setattr(compare_rtn, "measure", measured)
    ids, original = torch.arange(64).reshape(2, 32), hf.Checkpoint.open(tiny)
    found = compare_rtn.compare(original, tmp_path / "out", tmp_path / "out", ids, lambda *said: None)
    assert found.kl == found.plain > 0
    out, base = compared[:2]
    linears = [linear for block in out.blocks for linear in block.linears()]
    assert any(isinstance(linear.weight, PackedTensor) for linear in linears)
    assert all(linear.dense is None for linear in linears)
    stored = hf.Checkpoint.open(tiny, as_stored=True)
    weight = base.blocks[0].attention.output.weight
    assert isinstance(weight, Tensor)
    assert weight.dtype == stored.matrix(f"{base.blocks[0].attention.output.name}.weight").dtype


def test_where_memory_is_short_nothing_is_compared(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compare_rtn, "fits", lambda checkpoint: False)
    done = pipeline.compress_request(
        CompressionRequest(tiny, tmp_path / "out", recipe="gptq-w3g32", calibration="self", samples=6, length=32),
        lambda stage, at, total: said.append(stage),
    )
    assert done.gain is None
    assert "comparing with plain rounding takes too much memory" in said
