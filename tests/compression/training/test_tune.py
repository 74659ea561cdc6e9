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

from attar import machine
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.receipts.verify import verify
from attar.checkpoints.sources import hf, opening
from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.calibration import gradients, hidden_states, texts
from attar.compression.calibration.amount import Amount
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.recipe.methods import Distill, Tune
from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.runs.pipeline import compress
from attar.compression.training import trainable_model, tune
from attar.formats.codecs import ggml_blocks
from attar.formats.packed import PackedTensor
from attar.metrics.divergence import compare
from attar.model.cache import ForwardBatch
from tests.conftest import token_ids
from tests.errors import user_error

SAME = 1e-5  # relative, of a KL in float32 sums against one in float64
NEAR, LEAST = 1e-3, 1e-6  # of a small one, where rounded activations may fall to the other side
SLOPE = 0.02  # relative, of a derivative by differences in float32
OPTIONS = Tune(epochs=2, rate=5e-3, batch=64)
BY_HEART = Tune(epochs=4, rate=1e-3, batch=32)


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
        return tune.run(Checkpoint.open(tiny), small, state, (ids, drawn), options)


def divergence(base: Path, model: Path, ids: Tensor) -> float:
    one, other = (opening.load(each, torch.float32) for each in (base, model))
    step = ForwardBatch((ids.shape[1],) * len(ids), ids.shape[1])
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
    amount = Amount(5, 32, tune.DRAWN)
    assert np.array_equal(drawn, texts.sample_from(hf.load(tiny, torch.float32), amount).numpy())
    shutil.rmtree(tmp_path / "state" / tune.FOUND)
    monkeypatch.setattr(texts, "sample_from", lambda *_, **__: pytest.fail("it draws again"))
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
    monkeypatch.setattr(trainable_model, "LOGITS_AT_ONCE", 256 * 24)  # runs of rows that end within a sequence
    source = Checkpoint.open(tiny)
    student = tune._Student(Checkpoint.open(small))
    student.recompute = recompute
    knobs = student.all_knobs()
    for knob in knobs:
        knob.base = knob.base.float()  # without the steps of bfloat16
    states = HiddenStates(tmp_path / "teacher", (*ids.shape, source.config.hidden), 0)
    hidden_states.embed(source, ids, states)
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


TRAINED = {
    "rtn+tune-fp8-block": "scale",
    "rtn+tune-llm-int8": "absmax",
    "rtn+tune-nf4-single": "absmax",
    "rtn+tune-nf4": "nested_absmax",
    "rtn+tune-nvfp4-weight": "global",
    "prune+tune-2:4-sparse24": "values",
    "prune+tune-2:4-sparse24-w4g64": "scale",
}


@pytest.mark.parametrize("recipe", TRAINED)
def test_linears_of_every_form_with_a_number_that_moves_are_trained(
    recipe: str, tiny: Path, ids: Tensor, tmp_path: Path
) -> None:
    """What is stored differs from the untuned in that number alone, and does what the figures say. The text is one
    sequence again and again: what is learned of it by heart is kept."""
    ids = ids[:1].repeat(9, 1)
    compress(tiny, tmp_path / "tuned", recipe=replace(load_recipe(recipe), tune=BY_HEART), calibration=ids.tolist())
    walked = tune.without_judges(ids).tolist()
    compress(tiny, tmp_path / "plain", recipe=recipe.replace("+tune", ""), calibration=walked)
    made = [Checkpoint.open(tmp_path / name) for name in ("tuned", "plain")]
    part, moved = TRAINED[recipe], 0
    for module in modules(3):
        tuned, plain = (each.linear(module).weight for each in made)
        assert isinstance(tuned, PackedTensor)
        assert isinstance(plain, PackedTensor)
        for other in plain.parts.keys() - {part}:
            assert torch.equal(tuned.parts[other], plain.parts[other])
        moved += not torch.equal(tuned.parts[part], plain.parts[part])
    said = json.loads((tmp_path / "tuned" / "receipt.json").read_text())["tune"]
    assert said["untrained"] == []
    assert moved == 21 or (
        recipe == "rtn+tune-fp8-block" and moved > 7
    )  # one or two numbers each, which may round back
    assert said["kl_after"] < said["kl_before"]
    assert said["kl_after"] == pytest.approx(divergence(tiny, tmp_path / "tuned", ids[7:8]), rel=NEAR, abs=LEAST)


def modules(layers: int) -> list[str]:
    each = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    return [f"model.layers.{layer}.{name}" for layer in range(layers) for name in each]


def test_linears_of_which_nothing_is_trained_are_named(tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    for recipe, scheme in (("rtn+tune-mxfp4-weight", "mxfp4-weight"), ("rtn+tune-q4_0", "q4_0")):
        made = compress(tiny, tmp_path / scheme, recipe=recipe, calibration=ids.tolist())
        said = [note for note in made.notes if note.startswith("Norms and biases are all that tune trained here")]
        assert len(said) == 1
        assert f"of what linears in {scheme} store it moves no number" in said[0]
        assert said[0] in (tmp_path / scheme / "README.md").read_text()
        assert made.tuned is not None
        assert made.tuned["untrained"] == [scheme]
        assert json.loads((tmp_path / scheme / "receipt.json").read_text())["tune"]["untrained"] == [scheme]
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text("recipe: rtn+tune-w4g32\noverrides:\n  - match: '*.down_proj'\n    scheme: mxfp4-weight\n")
    made = compress(tiny, tmp_path / "mixed", recipe=mixed, calibration=ids.tolist())
    assert [note for note in made.notes if "all that tune trained beside linears in mxfp4-weight: " in note]
    made = compress(tiny, tmp_path / "plain", recipe="rtn+tune-w4g32", calibration=ids.tolist())
    assert not [note for note in made.notes if "trained" in note]


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["rtn+tune-q4_0", "gptq+tune-q4_k_m", "rotate+gptq+tune-q8_0"])
def test_a_file_is_tuned_within_its_blocks(name: str, tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    """Its codes are those of the file that is not tuned, and a killed run ends in the same bytes. The text is one
    sequence again and again, which is learned by heart."""
    text = ids[:1].repeat(9, 1)
    recipe = replace(load_recipe(name), tune=BY_HEART)

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "tuning" and done == 2:
            raise Stop

    with pytest.raises(Stop):
        compress(tiny, tmp_path / "out.gguf", recipe=recipe, calibration=text.tolist(), progress=stop)
    made = compress(tiny, tmp_path / "out.gguf", recipe=recipe, calibration=text.tolist())
    again = compress(tiny, tmp_path / "again.gguf", recipe=recipe, calibration=text.tolist())
    tensors = [GgufFile(each.path) for each in (made, again)]
    assert all(torch.equal(tensors[0].read(each), tensors[1].read(each)) for each in tensors[0].names())
    assert made.tuned is not None
    assert made.tuned["untrained"] == []
    assert made.tuned["kl_after"] < made.tuned["kl_before"]
    if not name.startswith("rotate"):  # which is measured beside the rotated original
        assert made.tuned["kl_after"] == pytest.approx(divergence(tiny, made.path, text[:1]), rel=NEAR, abs=LEAST)
    assert verify(made.path).ok
    untuned, walked = name.replace("+tune", ""), tune.without_judges(text).tolist()
    plain = compress(tiny, tmp_path / "plain.gguf", recipe=untuned, calibration=walked)
    files = [GgufCheckpoint.open(each.path, torch.float32, blocks=True) for each in (made, plain)]
    for module in modules(3):
        weights = [each.linear(module).weight for each in files]
        kinds = [each.kind_of(module) for each in files]
        assert kinds[0] == kinds[1]
        new, old = (
            ggml_blocks.unpack(kinds[0], each.parts["blocks"].view(-1, kinds[0].block_bytes))
            for each in weights
            if isinstance(each, PackedTensor)
        )
        assert torch.equal(old.codes, new.codes)
        assert not torch.equal(old.d, new.d)
    norms = [each.tensor("model.layers.0.input_layernorm.weight") for each in files]
    assert not torch.equal(*norms)


def test_what_was_found_is_not_taken_where_it_is_damaged(tiny: Path, small: Path, ids: Tensor, tmp_path: Path) -> None:
    """Nor is it sought anew: the model may hold some of it already."""
    run(tiny, small, tmp_path / "state", ids)
    file = tmp_path / "state" / tune.FOUND / "model.safetensors"
    found = bytearray(file.read_bytes())
    found[-3] ^= 0x40
    file.write_bytes(found)
    with user_error("state_damaged", "model.safetensors"):
        run(tiny, small, tmp_path / "state", ids)


def test_what_cannot_be_is_refused(
    tiny: Path, small: Path, ids: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with user_error("calibration_too_short"):
        run(tiny, small, tmp_path, ids[:1])
    monkeypatch.setattr(machine, "examine", lambda: SimpleNamespace(budget=1_000_000))
    with user_error("memory_insufficient"):
        run(tiny, small, tmp_path, ids)
    with user_error("method_option_invalid"):
        Tune(epochs=11)


def test_probes_of_a_finished_folder_are_those_of_the_walk(small: Path) -> None:
    assert json.loads((small / "receipt.json").read_text())["probes"] == tune.probes(small, 0)
