"""Frozen-code tuning: what it reports is what the stored model does, its gradient is that of the KL, its codes stay."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attar.checkpoints import hf
from attar.checkpoints.hf import Checkpoint
from attar.compression import calibrate, gradients, hidden, tune, whole
from attar.compression.hidden import HiddenStates
from attar.compression.methods import Distill, Tune
from attar.compression.pipeline import compress
from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels.operands import Linear, Norm
from attar.metrics.divergence import compare
from attar.model.cache import Step
from tests.conftest import token_ids

SAME = 1e-5  # relative, of a KL in float32 sums against one in float64
SLOPE = 0.02  # relative, of a derivative by differences in float32
OPTIONS = Tune(epochs=2, rate=5e-3, batch=64)


@pytest.fixture(scope="module")
def small(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` in three bits, scales of groups in bfloat16."""
    folder = tmp_path_factory.mktemp("compressed") / "small"
    compress(tiny, folder, recipe="rtn-w3g32-asym")
    return folder


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.tensor(token_ids(9, 32, seed=5))


def run(
    tiny: Path, small: Path, state: Path, ids: Tensor, options: Tune = OPTIONS, drawn: Tensor | None = None
) -> tune.Tuned:
    state.mkdir(exist_ok=True)
    with torch.inference_mode():
        return tune.run(Checkpoint.open(tiny), small, state, ids, options, drawn=drawn)


def divergence(base: Path, model: Path, ids: Tensor) -> float:
    one, other = hf.load(base, torch.float32), hf.load(model, torch.float32)
    step = Step((ids.shape[1],) * len(ids), ids.shape[1])
    logits = (each.forward(ids.flatten(), step) for each in (one, other))
    return float(compare(*logits, ids.flatten()).kl.mean())


def test_the_figures_are_those_of_the_stored_model(tiny: Path, small: Path, ids: Tensor, tmp_path: Path) -> None:
    found = run(tiny, small, tmp_path / "state", ids)
    held = ids[7:8]
    assert (found.steps, found.trained_tokens, found.held_out_tokens) == (2 * 4, 8 * 32, 32)
    assert found.kl_after < found.kl_before
    assert found.kl_before == pytest.approx(divergence(tiny, small, held), rel=SAME)
    tuned = tmp_path / "tuned"
    shutil.copytree(small, tuned)
    before = load_file(tuned / "model.safetensors")
    assert {name.rpartition(".")[2] for name in found.tensors} == {"weight_scale", "weight"}
    for name, tensor in found.tensors.items():
        assert (tensor.dtype, tensor.shape) == (before[name].dtype, before[name].shape)
        assert not torch.equal(tensor, before[name])
    save_file({**before, **found.tensors}, tuned / "model.safetensors", metadata={"format": "pt"})
    assert found.kl_after == pytest.approx(divergence(tiny, tuned, held), rel=SAME)


def test_a_killed_run_begins_anew_to_the_same_bytes(tiny: Path, small: Path, ids: Tensor, tmp_path: Path) -> None:
    found = run(tiny, small, tmp_path / "state", ids)
    anew = run(tiny, small, tmp_path / "other", ids)
    kept = run(tiny, small, tmp_path / "state", ids[:1])  # does not even look at the ids
    for other in (anew, kept):
        assert other == found
        assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in found.tensors.items())


def test_what_the_original_writes_is_trained_on_and_never_judges(
    tiny: Path, small: Path, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is drawn once: what a killed run drew is there for the next one."""
    options = Distill(epochs=2, rate=5e-3, batch=64, drawn=5)
    found = run(tiny, small, tmp_path / "state", ids, options)
    without = run(tiny, small, tmp_path / "without", ids)
    assert (found.steps, found.trained_tokens, found.held_out_tokens) == (2 * 7, (8 + 5) * 32, 32)
    assert found.kl_before == without.kl_before
    assert found.kl_epochs != without.kl_epochs
    drawn = np.fromfile(tmp_path / "state" / "drawn.i32", dtype="<i4").reshape(5, 32)
    amount = calibrate.Amount(5, 32, tune.DRAWN)
    assert np.array_equal(drawn, calibrate.sample_from(hf.load(tiny, torch.float32), amount).numpy())
    shutil.rmtree(tmp_path / "state" / tune.FOUND)
    monkeypatch.setattr(calibrate, "sample_from", lambda *_, **__: pytest.fail("it draws again"))
    assert run(tiny, small, tmp_path / "state", ids, options) == found


def test_what_was_written_to_calibrate_on_is_trained_on_unless_more_is_drawn(
    tiny: Path, small: Path, ids: Tensor, tmp_path: Path
) -> None:
    drawn = torch.randint(0, 256, (5, 32), generator=torch.Generator().manual_seed(3))
    options = Tune(epochs=1, rate=5e-3, batch=64)
    without = run(tiny, small, tmp_path / "without", ids, options)
    found = run(tiny, small, tmp_path / "with", ids, options, drawn)
    assert (found.trained_tokens - without.trained_tokens, found.held_out_tokens) == (5 * 32, without.held_out_tokens)
    assert found.kl_before == without.kl_before
    other = run(tiny, small, tmp_path / "other", ids, replace(options, drawn=2), drawn)
    assert other.trained_tokens - without.trained_tokens == 2 * 32


def test_where_nothing_is_better_the_model_stays(tiny: Path, small: Path, ids: Tensor, tmp_path: Path) -> None:
    found = run(tiny, small, tmp_path / "state", ids, Tune(epochs=1, rate=0.0, batch=64))
    assert (found.epoch, found.kl_after) == (0, found.kl_before)
    stored = load_file(small / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.tensors.items())


@pytest.mark.parametrize("recompute", [True, False])
def test_the_gradient_is_that_of_the_divergence(
    tiny: Path, small: Path, ids: Tensor, tmp_path: Path, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "LOGITS_AT_ONCE", 256 * 24)  # runs of rows that end within a sequence
    source = Checkpoint.open(tiny)
    student = tune._Student(Checkpoint.open(small))
    student.recompute = recompute
    knobs = student.all_knobs()
    for knob in knobs:
        knob.base = knob.base.float()  # without the steps of bfloat16
    states = HiddenStates(tmp_path / "teacher", (*ids.shape, source.config.hidden), 0)
    hidden.embed(source, ids, states)
    for layer in range(source.config.layers):
        gradients.advance(source, layer, states, states)
    tuning = tune._Tuning(student, tune._Teacher(source, states), ids, len(ids), OPTIONS, 0)
    tuning.held = [1, 4]
    tuning._learn([1, 4])
    slopes = [knob.learned.grad for knob in knobs]
    assert all(slope is not None and slope.any() for slope in slopes)
    expected = sum(float(slope.square().sum()) for slope in slopes if slope is not None)
    h = 1e-2 / expected**0.5
    found = []
    for sign in (h, -h):
        with torch.no_grad():
            for knob, slope in zip(knobs, slopes, strict=True):
                knob.learned.copy_(sign * slope)
        found.append(tuning._held_out(1))
    assert (found[0] - found[1]) / (2 * h) == pytest.approx(expected, rel=SLOPE)
    states.close()


def test_knobs_begin_at_what_is_stored() -> None:
    """Of every kind of number, zero among them; each installs itself where the model reads it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator).bfloat16()

    for name in ("w4g32", "w3g32-asym", "w8", "w8-tensor", "fp8-weight", "w8a8", "lut3", "lut4-s45"):
        scheme = Scheme.parse(name).with_scale_dtype("bfloat16")
        packed = codec(scheme.weight.kind).quantize(weight, scheme)
        linear = Linear("a", packed, torch.randn(32, generator=generator).half())
        method = {"quant_method": "attar" if "lut" in name else "compressed-tensors"}
        stored = SimpleNamespace(
            stored_name=lambda name: name, folder=SimpleNamespace(config={"quantization_config": method})
        )
        norms = (Norm("rms", weight[0] * 0, offset=1.0, name="b"), Norm("layer", weight[0], weight[1] * 0, name="c"))
        for knob in (knobs := list(tune._knobs(stored, [linear], norms))):  # type: ignore[arg-type]
            assert torch.equal(knob.stored(), knob.base)
            knob.install(knob.value())
        assert [k.name for k in knobs[1:]] == ["a.bias", "b.weight", "c.weight", "c.bias"]
        assert knobs[0].base is packed.parts["table" if "lut" in name else "scale"]
        assert linear.dense is not None
        assert torch.equal(linear.dense.detach(), packed.dequantize())
        assert linear.bias is not None
        assert linear.bias.dtype == norms[0].weight.dtype == torch.float32


def test_what_cannot_be_is_refused(tiny: Path, small: Path, ids: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 calibration sequences"):
        run(tiny, small, tmp_path, ids[:1])
    with pytest.raises(ValueError, match=r"needs .* GB of memory and may use 0.001"):
        tune.run(Checkpoint.open(tiny), small, tmp_path, ids, OPTIONS, memory=1_000_000)
    with pytest.raises(ValueError, match="at most 10"):
        Tune(epochs=11)


def test_probes_of_a_finished_folder_are_those_of_the_walk(small: Path) -> None:
    assert json.loads((small / "receipt.json").read_text())["probes"] == tune.probes(small, 0)
