"""attar's own pruning: its weights are the best for their places, its places are better than SparseGPT's; and whole
models pruned, which are read back, by transformers too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoints.sources import hf
from attar.compression.recipe.methods import Magnitude, Prune, SparseGpt, Wanda
from attar.compression.recipe.pattern import Pattern
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.compression.runs.pipeline import compress
from attar.compression.solvers.pruning import prune, sparsegpt, zeros
from attar.compression.solvers.rounding import gptq
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.model.cache import ForwardBatch
from tests.errors import user_error

DAMPING = 0.01
NEAR_BEST = 1e-3  # excess of the loss over that of an exact solution
SAME_LOGITS = 2e-2  # of bfloat16 weights, computed in float32 by two programs

Ids = list[list[int]]


Problem = Callable[..., tuple[Tensor, Tensor]]


def hessian(x: Tensor) -> gptq.Hessian:
    found = gptq.Hessian(x.shape[1], x.dtype)
    found.add(x)
    return found


def exact(weight: Tensor, h: Tensor, gone: Tensor) -> Tensor:
    """The best weights with these zeros: a system of equations a row."""
    found = torch.zeros_like(weight)
    for row, lost, out in zip(weight, gone, found, strict=True):
        kept = (~lost).nonzero()[:, 0]
        out[kept] = torch.linalg.solve(h[kept][:, kept], h[kept] @ row)
    return found


@pytest.mark.parametrize("name", ["s50", "2:4", "4:8"])
def test_weights_are_the_best_for_their_places_and_places_beat_sparsegpt(problem: Problem, name: str) -> None:
    pattern = Pattern.parse(name)
    for seed in range(5):
        weight, x = problem(seed, rows=24, columns=64)
        h = hessian(x)
        ready = prune.prepare(h, DAMPING)
        found = prune.solve(weight, ready, pattern)
        assert isinstance(found.packed, Tensor)
        gone = found.packed == 0
        assert int(gone.sum()) == weight.numel() // 2
        if pattern.grouped:
            assert (gone.view(24, -1, pattern.of).sum(-1) == pattern.zeros).all()
        best = zeros.damage(weight - exact(weight, ready.damped, gone), ready.damped)
        assert zeros.damage(weight - found.packed, ready.damped) <= (1 + NEAR_BEST) * best
        theirs = sparsegpt.solve(weight, ready, pattern)
        assert isinstance(theirs.packed, Tensor)
        again = exact(weight, ready.damped, theirs.packed == 0)  # SparseGPT's places at their best
        assert best < zeros.damage(weight - again, ready.damped)
        assert found.error < theirs.error < theirs.rtn_error


def test_refitting_never_loses_and_a_row_that_is_there_stays(problem: Problem) -> None:
    weight, x = problem(7, rows=8, columns=32)
    h = prune.prepare(hessian(x), DAMPING).damped
    gone = zeros.mask(weight.abs(), Pattern.parse("2:4"))
    gone[0] = False  # nothing to find: the start is the answer
    start = weight.masked_fill(gone, 0)
    found = prune.refit(start, weight, h, gone)
    assert torch.equal(found[0], weight[0])
    assert not found[gone].any()
    for row in range(1, 8):
        assert zeros.damage((weight - found)[row, None], h) < zeros.damage((weight - start)[row, None], h)


@pytest.mark.parametrize("scheme", ["w4g16", "w3g16-asym"])
def test_joint_rounding_keeps_zeros_and_beats_sparsegpts(problem: Problem, scheme: str) -> None:
    pattern, form = Pattern.parse("2:4"), Scheme.parse(scheme).with_scale_dtype("float32")
    weight, x = problem(8, rows=24, columns=64)
    ready = prune.prepare(hessian(x), DAMPING)
    dense, found = prune.solve(weight, ready, pattern), prune.solve(weight, ready, pattern, form)
    assert isinstance(found.packed, PackedTensor)
    assert isinstance(dense.packed, Tensor)
    assert not found.packed.dequantize()[dense.packed == 0].any()
    theirs = sparsegpt.solve(weight, ready, pattern, form)
    assert dense.error < found.error < theirs.error


def test_inputs_that_were_always_zero_have_no_weights(problem: Problem) -> None:
    weight, x = problem(5, columns=16)
    x[:, 3] = 0
    found = prune.solve(weight, prune.prepare(hessian(x), DAMPING), Pattern.parse("2:4")).packed
    assert isinstance(found, Tensor)
    assert not found[:, 3].any()


# --- recipes and models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "scheme"),
    [
        ("magnitude-s50", Magnitude("s50"), None),
        ("wanda-2:4", Wanda("2:4"), None),
        ("sparsegpt-4:8-w4g128", SparseGpt("4:8"), "w4g128"),
        ("prune-2:4-w4g128-asym", Prune("2:4"), "w4g128-asym"),
    ],
)
def test_a_recipe_names_pattern_and_scheme(name: str, options: object, scheme: str | None) -> None:
    recipe = load_recipe(name)
    assert recipe.passes == (options,)
    assert recipe.name == name
    assert recipe.scheme == (None if scheme is None else Scheme.parse(scheme))
    assert recipe_from_dict({"recipe": name, "keep": ["lm_head", "*.o_proj"]}).pattern_for("a.o_proj") is None
    assert recipe.pattern_for("lm_head") is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("prune-w4", "sparsity_invalid"),
        ("prune-3:2", "sparsity_invalid"),
        ("awq+prune-2:4", "recipe_without_effect"),
        ("sparsegpt+gptq-w4", "recipe_malformed"),
        ("prune-2:4-w5x", "scheme_unknown"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(name: str, says: str) -> None:
    with user_error(says):
        load_recipe(name)


def test_a_layer_that_a_pattern_does_not_fit_is_named_before_any_work() -> None:
    for name, says in (("prune-4:8", "divisible by 8, not 12"), ("prune-2:4-q4_0", "rounded to a grid with a zero")):
        with pytest.raises(ValueError, match=f"model.layers.0.a: .*{says}"):
            load_recipe(name).schemes({"model.layers.0.a": (8, 12)})


def logits(folder: Path, ids: list[int]) -> Tensor:
    return hf.load(folder, torch.float32).forward(torch.tensor(ids), ForwardBatch((len(ids),), len(ids)))


@pytest.mark.parametrize("recipe", ["magnitude-s50", "sparsegpt-4:8", "prune-2:4"])
def test_a_pruned_model_is_an_ordinary_one_with_zeros(
    recipe: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    given = None if recipe.startswith("magnitude") else calibration  # which needs none
    done = compress(tiny, tmp_path / "out", recipe=recipe, calibration=given)
    assert len(done.records) == 3 * 7
    assert done.bits_per_weight == 16
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    before, after = load_file(tiny / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    pattern = load_recipe(recipe).pattern_for("a linear")
    assert pattern is not None
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        if name.endswith("_proj.weight"):
            assert int((tensor == 0).sum()) == tensor.numel() // 2
            if pattern.grouped:
                assert ((tensor == 0).view(len(tensor), -1, pattern.of).sum(-1) == pattern.zeros).all()
        else:
            assert torch.equal(tensor, before[name])
    reader = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        theirs = reader(torch.tensor([calibration[0]])).logits[0]
    assert torch.allclose(logits(tmp_path / "out", calibration[0]), theirs, atol=SAME_LOGITS)


def test_a_pruned_and_rounded_model_keeps_its_zeros(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: prune-2:4-w4g128\nsteps: 10\noverrides:\n  - {match: '*.down_proj', scheme: keep}\n")
    done = compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration)
    assert {record.scheme for record in done.records} == {"2:4-w4g128"}
    checkpoint = hf.Checkpoint.open(tmp_path / "out")
    packed = checkpoint.linear("model.layers.1.mlp.up_proj").weight
    assert isinstance(packed, PackedTensor)
    assert ((packed.dequantize() == 0).view(-1, 4).sum(-1) >= 2).all()
    kept = checkpoint.linear("model.layers.1.mlp.down_proj").weight
    assert isinstance(kept, Tensor)
    assert torch.equal(kept, hf.Checkpoint.open(tiny).tensor("model.layers.1.mlp.down_proj.weight"))


@pytest.mark.parametrize(("dense", "stored"), [("magnitude-2:4", "sparse24"), ("wanda-2:4-w4g128", "sparse24-w4g64")])
def test_two_of_four_are_stored_with_their_places(
    dense: str, stored: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    recipe = f"{dense.split('-')[0]}-2:4-{stored}"
    compress(tiny, tmp_path / "dense", recipe=dense, calibration=calibration)
    done = compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration)
    assert {record.scheme for record in done.records} == {f"2:4-{stored}"}
    bits = 9 if stored == "sparse24" else (4 + 16 / 64) / 2 + 1
    assert done.bits_per_weight == pytest.approx(bits, abs=0.01)  # packed codes store their shape too
    checkpoints = [hf.Checkpoint.open(tmp_path / name) for name in ("dense", "out")]
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"):
        expected, found = (checkpoint.linear(name).weight for checkpoint in checkpoints)
        assert isinstance(found, PackedTensor)
        wide = expected.dequantize() if isinstance(expected, PackedTensor) else expected
        assert torch.equal(found.dequantize(), wide.float())


def test_two_of_four_are_not_four_of_eight(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    with user_error("sparsity_invalid"):
        compress(tiny, tmp_path / "out", recipe="wanda-4:8-sparse24", calibration=calibration)


def test_tuning_moves_what_is_kept_and_no_zero(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: magnitude+tune-2:4\nepochs: 1\nrate: 0.01\nbatch: 32\n")
    assert compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration).recipe == "magnitude+tune-2:4"
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny, tmp_path / "out"))
    for name, tensor in before.items():
        if name.endswith("_proj.weight"):
            gone = zeros.mask(tensor.float().abs(), Pattern.parse("2:4"))
            assert torch.equal(after[name] == 0, gone)
            assert not torch.equal(after[name][~gone], tensor[~gone])
    figures = json.loads((tmp_path / "out" / "receipt.json").read_text())["tune"]
    assert figures["kl_after"] < figures["kl_before"]


def test_zeros_are_not_for_gguf_files(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    with user_error("gguf_inexpressible"):
        compress(tiny, tmp_path / "out.gguf", recipe="prune-2:4", calibration=calibration)


def test_a_hessian_that_cannot_be_used_is_refused() -> None:
    with user_error("linear_without_tokens"):
        prune.prepare(gptq.Hessian(8), DAMPING)
