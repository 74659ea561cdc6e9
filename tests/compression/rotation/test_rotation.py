"""Rotations change nothing: every family against itself in float64, and against transformers once it is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoints.convert.run import convert
from attar.checkpoints.sources import hf
from attar.checkpoints.sources.shards import cut_linear
from attar.compression.groups import folds
from attar.compression.recipe.methods import SpinQuant
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.compression.rotation import rotation, spinquant_training
from attar.compression.runs.pipeline import compress
from attar.compression.solvers.transforms import rotations
from attar.kernels import dispatch, hadamard
from attar.model import assembly, decoder
from attar.model.cache import ForwardBatch
from attar.model.split import Cut
from tests.errors import user_error

EXACT = 1e-9  # max |difference| of logits in float64
SAME_LOGITS = 1e-4  # the same in float32, by two programs
SAME = 1e-12

Ids = list[list[int]]

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, **IDS}
LLAMA = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 32}
GPT2 = {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 32, **IDS}
OPT = {
    "vocab_size": 96, "hidden_size": 48, "ffn_dim": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, **IDS,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**LLAMA, "tie_word_embeddings": True, "head_dim": 24}),
    "llama-biases": ("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "hidden_size": 64}),
    "mistral": ("Mistral", {**LLAMA, "sliding_window": 8}),
    "qwen2": ("Qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", LLAMA),
    "phi3": ("Phi3", {k: v for k, v in LLAMA.items() if k != "head_dim"}),
    "opt": ("OPT", OPT),
    "opt-galactica": ("OPT", {**OPT, "enable_bias": False}),
    "gpt2": ("GPT2", GPT2),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("Qwen3Moe", {**LLAMA, **EXPERTS, "tie_word_embeddings": True}),
}


def model_of(family: str, settings: dict[str, Any]) -> Any:
    """A model of random weights, norms and biases, none of them special."""
    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config"))(**settings)
    model = getattr(transformers, family + ("LMHeadModel" if family == "GPT2" else "ForCausalLM"))(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.data = noise * 0.3 + (0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.data = noise * (0.5 if parameter.shape[0] in (96, 32, 34) else parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype], tuple[Path, Any]]:
    """Writes the model of a case in a dtype; returns its folder, and the model in float32."""

    def save(case: str, dtype: torch.dtype) -> tuple[Path, Any]:
        model = model_of(*CASES[case])
        folder = tmp_path_factory.mktemp(case)
        model.to(dtype).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))  # no config says float64
        return folder, model.to(torch.float32)

    return save


def ids() -> Tensor:
    return torch.randint(3, 96, (24,), generator=torch.Generator().manual_seed(2))


@torch.inference_mode()
def logits(checkpoint: hf.Checkpoint) -> Tensor:
    built = assembly.build(checkpoint.config, checkpoint)
    stream, delta = built.states(ids(), ForwardBatch((24,), 24))
    return decoder.soft_capped(built.config, decoder.products(built.final_norm, built.head, stream, delta))


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference computes what it can in the dtype of the rows; where it asks for float32, float64 stays."""
    narrow = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("in_float64")
def test_the_function_stays(case: str, saved: Any) -> None:
    folder, _ = saved(case, torch.float64)
    plain = hf.Checkpoint.open(folder, torch.float64)
    base = logits(plain)
    assert base.dtype == torch.float64
    recipes = [load_recipe("rotate-keep"), recipe_from_dict({"recipe": "quarot-w8a8"})]
    recipes.append(recipe_from_dict({"recipe": "quarot-w8a8", "across": True}))
    if plain.config.norm == "rms":
        recipes.append(recipe_from_dict({"recipe": "rotate-keep", "rotation": "orthogonal"}))
    for recipe in recipes:
        view = rotation.rotated(plain, recipe, seed=3)
        if recipe.scheme is not None:
            names = plain.config.names
            outputs = [names.layer.format(i=i) + f".{names.output}" for i in range(plain.config.layers)]
            others = view.online.keys() - set(outputs)
            assert {name.rpartition(".")[2] for name in others} <= {"down_proj", "fc2", "c_proj", "w2"}
            assert len(others) == len(view.online) - (len(outputs) if recipe.rotate.across else 0)  # type: ignore[union-attr]
            assert all(block in (8, 16, 32, 64) for block in view.online.values())
        assert (logits(view) - base).abs().max() < EXACT
        at = plain.stored_name(plain.config.names.layer.format(i=0)) + "."
        changed = [n for n in plain.folder.names() if n.startswith(at) and n.endswith("weight")]
        same = [n for n in changed if torch.equal(plain.folder.read(n), view.folder.read(n))]
        assert all("q_norm" in n or "k_norm" in n for n in same), "all but the norms of heads are rotated"


@pytest.mark.parametrize("case", ["llama", "qwen2", "phi3", "opt", "gpt2", "qwen3-moe"])
def test_transformers_loads_a_rotated_model(case: str, saved: Any, tmp_path: Path) -> None:
    folder, model = saved(case, torch.float32)
    done = compress(folder, tmp_path / "out", recipe="rotate-keep")
    assert done.bits_per_weight == 32
    theirs = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.inference_mode():
        before, after = (each(ids()[None]).logits[0] for each in (model, theirs))
    assert (before - after).abs().max() < SAME_LOGITS * before.abs().max()
    assert (logits(hf.Checkpoint.open(tmp_path / "out")) - before).abs().max() < SAME_LOGITS * before.abs().max()
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["recipe"]["rotate"]["method"] == "rotate"


def test_a_tied_model_without_norm_weights_stays_tied(saved: Any, tmp_path: Path) -> None:
    model = model_of(*CASES["llama"])
    model.model.norm.weight.data.fill_(1)
    model.save_pretrained(tmp_path / "model")
    compress(tmp_path / "model", tmp_path / "out", recipe="rotate-keep")
    source, out = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert source.keys() == out.keys()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("keeps_mean", [False, True])
@pytest.mark.parametrize("size", [16, 24, 28])
def test_rotations_are_orthogonal_and_of_their_seed(size: int, keeps_mean: bool) -> None:
    eye = torch.eye(size, dtype=torch.float64)
    for kind in ("hadamard",) if keeps_mean else ("hadamard", "orthogonal"):
        one = rotations.draw(kind, size, 0, 5, keeps_mean).apply(eye)
        assert torch.allclose(one @ one.T, eye, atol=SAME)
        assert torch.equal(one, rotations.draw(kind, size, 0, 5, keeps_mean).apply(eye))
        for seed, number in ((1, 5), (0, 6)):
            assert not torch.allclose(one, rotations.draw(kind, size, seed, number, keeps_mean).apply(eye))
        ones = torch.ones(size, dtype=torch.float64)
        assert torch.allclose(ones @ one, ones, atol=SAME) == keeps_mean


def test_what_cannot_be_rotated_is_refused_by_name(saved: Any, tmp_path: Path) -> None:
    settings = {**LLAMA, "query_pre_attn_scalar": 16, "sliding_window": 8}
    model_of("Gemma2", settings).save_pretrained(tmp_path / "gemma")
    with user_error("architecture_unsupported"):
        compress(tmp_path / "gemma", tmp_path / "out", recipe="rotate-w8a8")
    model_of("Llama", {**LLAMA, "hidden_size": 52}).save_pretrained(tmp_path / "odd")
    with user_error("architecture_unsupported"):
        compress(tmp_path / "odd", tmp_path / "out", recipe="rotate-w8a8")
    opt, _ = saved("opt", torch.float32)
    recipe = recipe_from_dict({"recipe": "rotate-w8a8", "rotation": "orthogonal"})
    with user_error("method_option_invalid"):
        compress(opt, tmp_path / "out", recipe=recipe)


@pytest.mark.parametrize(
    "told, sentence",
    [
        ({"recipe": "rotate-keep", "online": True}, "recipe_without_effect"),
        ({"recipe": "quarot-w4a4", "keep": ["*.down_proj", "lm_head"]}, "recipe_without_effect"),
        ({"recipe": "rotate-w4a4", "across": True, "keep": ["*.o_proj"]}, "recipe_without_effect"),
    ],
)
def test_a_rotation_at_run_time_that_nothing_asks_for_is_refused(
    told: dict[str, Any], sentence: str, tiny: Path
) -> None:
    """Inputs are rotated to be rounded; those of a weight that stays are not."""
    with user_error(sentence):
        rotation.rotated(hf.Checkpoint.open(tiny), recipe_from_dict(told), seed=0)


def test_outputs_without_a_place_for_rotations_are_refused(tiny: Path, tmp_path: Path) -> None:
    with user_error("recipe_conflict"):
        compress(tiny, tmp_path / "out", recipe="quarot-nf4")


@pytest.mark.usefixtures("in_float64")
def test_a_learned_rotation_changes_nothing_either(saved: Any, tmp_path: Path) -> None:
    for case in ("llama", "qwen3-moe"):
        plain = hf.Checkpoint.open(saved(case, torch.float64)[0], torch.float64)
        options = SpinQuant(rotation_steps=20, rotation_batch=64, across=case == "llama")
        view = rotation.rotated(plain, replace(load_recipe("spinquant-w4a4"), rotate=options), seed=0)
        text = torch.randint(0, 96, (4, 16), generator=torch.Generator().manual_seed(4))
        found = spinquant_training.learn(view, text, options, tmp_path, case, seed=0)
        assert found.after < found.before
        base = logits(plain)
        assert (logits(view) - base).abs().max() < EXACT
        again = rotation.rotated(plain, replace(load_recipe("spinquant-w4a4"), rotate=options), seed=0)
        spinquant_training.learn(again, text[:1], options, tmp_path, case, seed=0)  # what a killed run left is taken
        assert torch.equal(logits(again), logits(view))


def test_a_learned_rotation_is_in_the_receipt(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    recipe = recipe_from_dict({"recipe": "spinquant-w4a4", "rotation_steps": 5})
    with user_error("calibration_missing"):
        compress(tiny, tmp_path / "out", recipe=recipe)
    compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration)
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert receipt["rotation"]["after"] < receipt["rotation"]["before"]


class Stop(Exception):
    pass


def test_a_stopped_run_resumes_to_the_same_bytes(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    recipe = "quarot+gptq-w4a4"

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "blocks" and done == 2:
            raise Stop

    compress(tiny, tmp_path / "whole", recipe=recipe, calibration=calibration)
    with pytest.raises(Stop):
        compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration, progress=stop)
    compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_table_that_is_stored_twice_is_told_of(tmp_path: Path, demo: Path, tiny: Path) -> None:
    assert any("is stored apart" in note for note in compress(demo, tmp_path / "out", recipe="rotate-w8").notes)
    assert compress(tiny, tmp_path / "other", recipe="rotate-w8").notes == (), "it was never tied"


def test_what_heads_give_is_mixed_at_run_time(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """As QuaRot does it before o: an outlier of one head is everybody's."""
    recipe = recipe_from_dict({"recipe": "quarot+gptq-w8a8", "across": True})
    compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration)
    found = hf.Checkpoint.open(tmp_path / "out").linear("model.layers.1.self_attn.o_proj")
    assert found.hadamard == 128
    view = rotation.rotated(hf.Checkpoint.open(tiny), recipe, seed=0)
    assert view.heads == [None] * 3, "in heads and over all of them, the same matrix would undo itself"
    ids = torch.tensor(calibration[0])
    step = ForwardBatch((len(ids),), len(ids))
    base, out = (hf.load(folder, torch.float32).forward(ids, step) for folder in (tiny, tmp_path / "out"))
    without = hf.load(tmp_path / "out", torch.float32)
    for block in without.blocks:
        block.attention.output.hadamard = 0
    assert (out - base).square().mean() < 0.01 * (without.forward(ids, step) - base).square().mean()


def test_no_scale_passes_what_is_turned_at_run_time(saved: Any) -> None:
    plain = hf.Checkpoint.open(saved("opt", torch.float32)[0])
    recipe = recipe_from_dict({"recipe": "quarot-w8a8", "across": True})
    for source, passes in ((plain, True), (rotation.rotated(plain, recipe, seed=0), False)):
        block = assembly.build_block(source.config, source, 0)
        readers = [linear for fold in folds(block) for linear in fold.linears]
        assert any(linear is block.attention.output for linear in readers) == passes
    both = recipe_from_dict({"recipe": "quarot+smoothattention-w8a8", "across": True})
    with user_error("recipe_conflict"):
        compress(plain.folder.path, "nowhere", recipe=both, calibration=[[5] * 16] * 2)


def test_rotations_at_run_time_are_read_back(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out", recipe="quarot+gptq-w8a8", calibration=calibration)
    assert any("transform_config" in note for note in done.notes)
    found = hf.Checkpoint.open(tmp_path / "out")
    down = found.linear("model.layers.1.mlp.down_proj")
    assert (down.hadamard, found.linear("model.layers.1.mlp.up_proj").hadamard) == (256, 0)
    with user_error("conversion_inexact"):
        convert(tmp_path / "out", tmp_path / "gptq", to="gptq")
    with user_error("parallel_unsupported"):
        cut_linear(down, Cut(columns=(0, 128)))
    # As compressed-tensors writes and reads it.
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["transform_config"]
    from compressed_tensors.transform import TransformConfig, TransformFactory

    theirs = TransformConfig.model_validate(stated)
    assert theirs.model_dump(mode="json") == stated
    ((name, scheme),) = theirs.config_groups.items()
    linear = torch.nn.Linear(256, 4, bias=False)
    transform = TransformFactory.from_scheme(scheme, name=name).create_transform(linear, scheme.apply[0])
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(transform(x), hadamard.rotate(x, down.hadamard), atol=1e-5)
    # The rounded model is close to the original, which it would not be were the rotation left out.
    ids = torch.tensor(calibration[0])
    step = ForwardBatch((len(ids),), len(ids))
    base, out = (hf.load(folder, torch.float32).forward(ids, step) for folder in (tiny, tmp_path / "out"))
    without = hf.load(tmp_path / "out", torch.float32)
    for block in without.blocks:
        block.feed_forward.down.hadamard = 0  # type: ignore[union-attr]
    far = 0.01 * (without.forward(ids, step) - base).square().mean()
    assert (out - base).square().mean() < far
    if (store := dispatch.store("exact")) is not None:  # where int8 may round another way now and then
        native = hf.load(tmp_path / "out", torch.float32, store=store)
        assert not store.refused
        assert "rotated" in (native.against_recording() or "")
        assert (native.forward(ids, step) - base).square().mean() < far


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "random-hadamard"}, "quantization_unsupported"),
        ({"randomize": True}, "quantization_unsupported"),
        ({"head_dim": 48}, "quantization_unsupported"),
        ({"head_dim": "64"}, "quantization_invalid"),
        ({"apply": [{"targets": ["Linear"], "location": "output"}]}, "quantization_unsupported"),
        ({"apply": None}, "quantization_invalid"),
    ],
)
def test_transforms_that_are_not_done_are_refused(
    change: dict[str, Any], message: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    compress(tiny, tmp_path / "out", recipe="quarot-w8a8")
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    (group,) = config["quantization_config"]["transform_config"]["config_groups"].values()
    group.update(change)
    file.write_text(json.dumps(config))
    with user_error(message):
        hf.load(tmp_path / "out", torch.float32)
