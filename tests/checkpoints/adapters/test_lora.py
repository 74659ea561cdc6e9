"""Adapters: unmerged, merged and in transformers they compute the same; what is not understood is refused."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from attar import LLM, SamplingParams
from attar.checkpoints.adapters import lora
from attar.checkpoints.adapters.merge import _Errors, merge
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources import hf, opening
from attar.checkpoints.strict_io import CheckpointError
from attar.compression.runs.pipeline import compress
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels import dispatch, ops
from attar.model.cache import ForwardBatch
from tests.conftest import token_ids
from tests.errors import user_error

SAME = 2e-4  # of logits around 10, float32, sums in another order
MOVES = 0.1  # what an adapter must change, for the rest to mean anything

CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 12, "bias": "none", "lora_dropout": 0.1,
    "target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 2}, "alpha_pattern": {"1.*down_proj": 6},
    "use_dora": False, "use_rslora": False, "modules_to_save": None,
}  # fmt: skip
LAYERS = 2
RANKS = {"self_attn.q_proj": 4, "mlp.down_proj": 2}
IDS = torch.tensor(token_ids(1, 16)[0])


@pytest.fixture(scope="module")
def base(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of the embedded model in float32, in which merging rounds nothing."""
    folder = tmp_path_factory.mktemp("models") / "base"
    folder.mkdir()
    config = json.loads((demo / "config.json").read_text()) | {"num_hidden_layers": LAYERS, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    stored = load_file(demo / "model.safetensors").items()
    kept = {name: tensor.float() for name, tensor in stored if not re.search(r"layers\.[2-9]", name)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    shapes = {"self_attn.q_proj": (256, 256), "mlp.down_proj": (256, 768)}
    found = {}
    for layer in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            found[f"{at}.lora_A.weight"] = torch.randn(RANKS[name], columns, generator=numbers) * 0.05
            found[f"{at}.lora_B.weight"] = torch.randn(rows, RANKS[name], generator=numbers) * 0.2
    return found


def save(folder: Path, config: dict[str, Any] | None = None, weights: dict[str, Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(tensors() if weights is None else weights, folder / "adapter_model.safetensors")
    return folder


def logits(model: hf.Decoder) -> Tensor:
    return model.forward(IDS, ForwardBatch((len(IDS),), len(IDS)))


def expected(base: Path, rslora: bool = False) -> Tensor:
    """By transformers, on weights put together here."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    halves = tensors()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            at = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{at}.lora_A.weight" in halves:
                alpha = 6 if "1.mlp.down" in name else 12
                rank = 2 if "down" in name else 4
                scale = alpha / (rank**0.5 if rslora else rank)
                weight += scale * (halves[f"{at}.lora_B.weight"] @ halves[f"{at}.lora_A.weight"])
        found: Tensor = model(IDS[None]).logits[0]
    return found


@pytest.mark.parametrize("rslora", [False, True])
def test_unmerged_merged_and_transformers_agree(base: Path, tmp_path: Path, rslora: bool) -> None:
    adapter = save(tmp_path / "adapter", {**CONFIG, "use_rslora": rslora})
    wanted = expected(base, rslora)
    model = hf.load(base, torch.float32)
    plain = logits(model)
    assert (plain - wanted).abs().max() > MOVES
    lora.attach(model, adapter)
    assert (logits(model) - wanted).abs().max() <= SAME
    found = merge(base, adapter, tmp_path / "merged")
    assert (len(found.linears), found.dequantized, found.requantized) == (2 * LAYERS, {}, None)
    assert (logits(hf.load(tmp_path / "merged", torch.float32)) - wanted).abs().max() <= SAME


def test_native_models_add_it_too(base: Path, tmp_path: Path) -> None:
    store = dispatch.store()
    if store is None:
        pytest.skip("no native kernels")
    model = hf.load(base, torch.float32, store=store)
    assert model.against_recording() is None
    lora.attach(model, save(tmp_path / "adapter"))
    assert model.against_recording() == "an adapter adds its products"
    assert (logits(model) - expected(base)).abs().max() <= SAME


def test_an_llm_takes_one(demo: Path, tmp_path: Path) -> None:
    adapter, greedy = save(tmp_path / "adapter"), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    llm = LLM(demo)
    (plain,) = llm.generate("It was", greedy)
    stream = llm.stream("It was", greedy)
    next(stream)
    with pytest.raises(RuntimeError):
        llm.attach(adapter)  # an answer is under way
    stream.close()
    llm.attach(adapter)  # steps were recorded and a prefix is cached, both of the weights before
    (changed,) = llm.generate("It was", greedy)
    assert len(changed.token_ids) == 8
    assert changed.token_ids != plain.token_ids
    llm = LLM(demo)
    llm.attach(adapter)
    assert llm.generate("It was", greedy)[0].token_ids == changed.token_ids


def test_a_compressed_base_keeps_its_weights_and_gains_the_product(base: Path, tmp_path: Path) -> None:
    adapter, packed = save(tmp_path / "adapter"), tmp_path / "packed"
    compress(base, packed, recipe="rtn-w4g32")
    model = hf.load(packed, torch.float32)
    lora.attach(model, adapter)
    dense = hf.load(packed, torch.float32)
    found = lora.read(adapter, dense.config.names, {each.name: each.shape for each in lora.linears_of(dense)})
    for linear in lora.linears_of(dense):
        if linear.name in found.adapters:
            change = found.adapters[linear.name]
            assert not isinstance(linear.weight, Tensor)
            linear.weight = linear.weight.dequantize() + change.up @ change.down  # type: ignore[union-attr]
    assert (logits(model) - logits(dense)).abs().max() <= SAME


@pytest.mark.parametrize(
    "recipe, head",
    [("rtn-w8", "int8"), ("rtn-nf4", None), ("rtn-iq4_nl", None), ("quarot-w8", None), ("gptq-w4g32", None)],
)
def test_merged_into_a_compressed_base_it_computes_what_both_did(
    recipe: str, head: str | None, base: Path, tmp_path: Path
) -> None:
    """Dense then, and told how far off the sums would be on the same grid again."""
    adapter, packed = save(tmp_path / "adapter"), tmp_path / "packed"
    given = token_ids(2, 32, vocab=2000) if not recipe.startswith("rtn") else None
    compress(base, packed, recipe=recipe, calibration=given, head=head)
    model = hf.load(packed, torch.float32)
    plain = logits(model)
    lora.attach(model, adapter)
    done = merge(packed, adapter, tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    found = logits(hf.load(tmp_path / "merged", torch.float32))
    assert (found - logits(model)).abs().max() <= SAME < MOVES < (found - plain).abs().max()
    assert list(done.dequantized.values()) == [7 * LAYERS + (head is not None)]  # the base's one table is both ends
    assert done.to_dict()["linears"] == sorted(f"model.layers.{i}.{name}" for i in range(LAYERS) for name in RANKS)


def test_the_error_of_rounding_again_is_that_of_rounding_again(base: Path, tmp_path: Path) -> None:
    """By hand, over all rows of which `merge` samples some."""
    adapter, packed = save(tmp_path / "adapter"), tmp_path / "packed"
    compress(base, packed, recipe="rtn-w4g32")
    done = merge(packed, adapter, tmp_path / "merged")
    sums, change, error = 0.0, 0.0, 0.0
    before, after = (hf.Checkpoint.open(path) for path in (packed, tmp_path / "merged"))
    for name in done.linears:
        old, new = before.linear(name).weight, after.linear(name).weight
        assert isinstance(old, PackedTensor)
        assert isinstance(new, Tensor)
        groups = new.unflatten(1, (-1, 32))
        scale = groups.abs().amax(2, keepdim=True) / 7.5
        rounded = ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)
        sums += float(old.dequantize().square().sum())
        change += float((new - old.dequantize()).square().sum())
        error += float((rounded - new).square().sum())
    assert done.change == pytest.approx((change / sums) ** 0.5, rel=1e-3)
    assert done.requantized == pytest.approx((error / (sums + change)) ** 0.5, rel=0.1)
    assert f"off by {done.requantized:.2%}" in done.sentences()[1]


def test_sums_beyond_a_schemes_scales_are_left_out_of_the_figure() -> None:
    """It is one printed sentence, and no reason not to merge."""
    scheme, errors = Scheme.parse("w4g32").with_scale_dtype("float16"), _Errors()
    small = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    errors.add(small * 1e7, small, scheme)
    assert (errors.requantized, errors.change) == (None, pytest.approx(1e-7))
    errors.add(small, small, scheme)
    assert errors.requantized is not None
    assert 0.02 < errors.requantized < 0.2, "of the small sums alone"


def test_adapters_learn(base: Path, tmp_path: Path) -> None:
    """On frozen weights, as a trainer needs it: the gradient is that of the two factors."""
    model = hf.load(base, torch.float32)
    lora.attach(model, save(tmp_path / "adapter"))
    linear = model.blocks[0].attention.qkv[0]
    assert linear.adapter is not None
    down, up = linear.adapter.down.requires_grad_(), linear.adapter.up.requires_grad_()
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    slopes = torch.autograd.grad(ops.linear(x, (linear, *model.blocks[0].attention.qkv[1:])).sum(), (down, up))
    assert torch.allclose(slopes[0], up.sum(0)[:, None] * x.sum(0), rtol=1e-4, atol=1e-4)
    assert torch.allclose(slopes[1], (x @ down.T).sum(0).expand(256, 4), rtol=1e-4, atol=1e-4)


def test_nothing_is_read_of_what_its_header_rules_out(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it will take is known from there."""
    model, folder = hf.load(base, torch.float32), save(tmp_path / "adapter")
    shapes = lora.shapes_of(model)
    found = lora.outline(folder, model.config.names, shapes)
    assert {name: pair.rank for name, pair in found.pairs.items()} == {
        f"model.layers.{layer}.{name}": rank for layer in range(LAYERS) for name, rank in RANKS.items()
    }
    assert found.weight_bytes(shapes) == LAYERS * 4 * (16 * 256 + 256 * 4 + 16 * 768 + 256 * 2)
    monkeypatch.setattr(lora.TensorFile, "read", lambda *given: pytest.fail("a tensor was read"))
    with user_error("adapter_mismatch"):
        lora.attach(model, save(tmp_path / "adapter", CONFIG | {"r": 8}))


def test_a_tied_output_matrix_is_changed_at_run_time_alone(base: Path, tmp_path: Path) -> None:
    """The embedding stays as it is; a merged matrix would have to be both."""
    weights = {
        "base_model.model.lm_head.lora_A.weight": torch.ones(4, 256) / 16,
        "base_model.model.lm_head.lora_B.weight": torch.ones(rows_of_head(base), 4),
    }
    folder = save(tmp_path / "adapter", CONFIG, weights)
    model = hf.load(base, torch.float32)
    plain = logits(model)
    lora.attach(model, folder)
    assert (logits(model) - plain).abs().max() > MOVES
    with user_error("adapter_mismatch"):
        merge(base, folder, tmp_path / "merged")


def rows_of_head(base: Path) -> int:
    """Rows of the embedding."""
    size: int = json.loads((base / "config.json").read_text())["vocab_size"]
    return size


def test_damaged_files_are_refused_or_read_whole(base: Path, tmp_path: Path) -> None:
    """Flipped bits and cut ends, of the config and of the matrices' file: never anything but CheckpointError."""
    model, folder = hf.load(base, torch.float32), save(tmp_path / "adapter")
    names, shapes = model.config.names, lora.shapes_of(model)
    draw = random.Random(0)
    refused = 0
    for path in (folder / "adapter_config.json", folder / "adapter_model.safetensors"):
        whole = path.read_bytes()
        for _ in range(100):
            broken = bytearray(whole)
            for _ in range(draw.choice((1, 1, 4))):
                broken[draw.randrange(min(len(whole), 1200))] ^= 1 << draw.randrange(8)
            path.write_bytes(broken[: draw.choice((len(whole), draw.randrange(len(whole))))])
            try:
                lora.read(folder, names, shapes)
            except CheckpointError:
                refused += 1
        path.write_bytes(whole)
    assert refused > 150
    lora.read(folder, names, shapes)


def test_pickles_and_files_of_gguf_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "adapter")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with user_error("file_unsafe"):
        lora.attach(hf.load(base, torch.float32), folder)
    (tmp_path / "model.gguf").touch()
    with user_error("source_is_gguf"):
        merge(tmp_path / "model.gguf", folder, tmp_path / "merged")


def test_a_link_out_of_the_base_is_refused_before_anything_is_written(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "base" / "LICENSE").symlink_to("../secret")
    with user_error("file_unsafe"):
        merge(tmp_path / "base", save(tmp_path / "adapter"), tmp_path / "merged")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter", "base", "secret"]


@pytest.mark.parametrize("recipe", ["f32", "q8_0"])
def test_a_file_of_gguf_takes_what_was_trained_on_the_folder(recipe: str, base: Path, tmp_path: Path) -> None:
    """Whose queries and keys lie in another order there."""
    adapter = save(tmp_path / "adapter")
    compress(base, tmp_path / "out.gguf", recipe=recipe)
    plain, changed = (opening.load(tmp_path / "out.gguf", torch.float32) for _ in range(2))
    lora.attach(changed, adapter)
    assert (logits(changed) - logits(plain)).abs().max() > MOVES
    same = SAME if recipe == "f32" else 0.5
    assert (logits(changed) - expected(base)).abs().max() <= same


@pytest.mark.parametrize(
    "recipe, fits",
    [("gptq-w8", True), ("clip-w8", True), ("awq-w8", False), ("clip+awq-w8", False), ("rotate-w8", False)],
)
def test_bases_whose_linears_read_other_numbers_are_doubted(
    recipe: str, fits: bool, base: Path, tmp_path: Path
) -> None:
    """And rightly so: 8 bits leave the model as it is, but not what an adapter of the original makes of it."""
    adapter, out = save(tmp_path / "adapter"), tmp_path / "out"
    compress(base, out, recipe=recipe, calibration=token_ids(4, 32, vocab=2000))
    assert (lora.doubt(adapter, out) is None) == fits
    model = hf.load(out, torch.float32)
    plain, wanted = logits(model), expected(base)
    assert (plain - logits(hf.load(base, torch.float32))).abs().mean() < 0.1
    lora.attach(model, adapter)
    off = float((logits(model) - wanted).abs().mean() / (plain - wanted).abs().mean())  # 1: as far as without it
    assert (off < 0.2) == fits, off
    (adapter / lora.BASE).write_text(json.dumps({"receipts": receipt.known(out)}))
    assert lora.doubt(adapter, out) is None
    assert lora.doubt(adapter, base) is None
    assert receipt.known(base) == []
    for damage in ({"receipt": "of old"}, {"receipts": 7}, {"receipts": [None]}):
        (adapter / lora.BASE).write_text(json.dumps(damage))
        assert (lora.doubt(adapter, out) is None) == fits


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.pop(name)  # type: ignore[return-value]


def having(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda weights: weights.update({name: tensor})


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "config, change, message",
    [
        ({"peft_type": "IA3"}, None, "feature_unsupported"),
        ({"use_dora": True}, None, "feature_unsupported"),
        (
            {"modules_to_save": ["norm"]},
            having("base_model.model.model.norm.weight", torch.ones(256)),
            "adapter_invalid",
        ),
        ({"bias": "lora_only"}, None, "feature_unsupported"),
        ({"something_new": 3}, None, "feature_unsupported"),
        ({"lora_alpha": -1}, None, "adapter_invalid"),
        ({"r": 8}, None, "adapter_mismatch"),
        ({"r": 513}, None, "adapter_invalid"),
        ({"r": 1.5}, None, "adapter_invalid"),
        ({"lora_alpha": 1e300}, None, "adapter_invalid"),
        ({"alpha_pattern": {"(a+)+": 3}}, None, "quantization_unsupported"),
        (
            {"alpha_pattern": {f"{i}.up_proj": 3 for i in range(1001)}},
            None,
            "checkpoint_too_large",
        ),
        ({}, without(f"{FIRST}.lora_B.weight"), "adapter_invalid"),
        ({}, having(f"{FIRST}.lora_magnitude_vector", torch.ones(256)), "adapter_invalid"),
        (
            {},
            having("base_model.model.model.layers.0.self_attn.q_porj.lora_A.weight", torch.ones(4, 256)),
            "adapter_mismatch",
        ),
        ({}, having("base_model.model.model.embed_tokens.lora_A.weight", torch.ones(4, 256)), "adapter_mismatch"),
        ({}, having("base_model.model.lm_head.base_layer.weight", torch.ones(4, 256)), "adapter_invalid"),
        ({}, having(f"{FIRST}.lora_A.weight", torch.ones(4, 64)), "adapter_mismatch"),
        ({}, having(f"{FIRST}.lora_A.weight", torch.full((4, 256), torch.nan)), "not_finite"),
        ({}, having(f"{FIRST}.lora_A.weight", torch.ones(4, 256).int()), "adapter_invalid"),
        ({}, dict.clear, "adapter_invalid"),
    ],
)
def test_what_is_not_understood_is_refused(
    base: Path, tmp_path: Path, config: dict[str, Any], change: Callable[[dict[str, Tensor]], None] | None, message: str
) -> None:
    weights = tensors()
    if change is not None:
        change(weights)
    model = hf.load(base, torch.float32)
    with user_error(message):
        lora.attach(model, save(tmp_path / "adapter", CONFIG | config, weights))
    assert all(linear.adapter is None for linear in lora.linears_of(model))


@pytest.mark.parametrize(
    "name", ["lm_head", "model.embed_tokens", "model.norm", "lm_head.base_layer", "lm_head.modules_to_save"]
)
@pytest.mark.parametrize("same", [True, False])
def test_a_tensor_of_the_base_must_equal_it(name: str, same: bool, base: Path, tmp_path: Path) -> None:
    """PEFT saves copies where the LM head is a target, and of `modules_to_save`, which training may have changed."""
    model, checkpoint = hf.load(base, torch.float32), hf.Checkpoint.open(base)
    module = name.removesuffix(".base_layer").removesuffix(".modules_to_save")
    stored = "model.embed_tokens" if checkpoint.config.tied and module == "lm_head" else module
    copy = checkpoint.tensor(f"{stored}.weight").bfloat16() + (0.0 if same else 0.5)
    adapter = save(tmp_path / "adapter", None, tensors() | {f"base_model.model.{name}.weight": copy})
    if same:
        lora.attach(model, adapter, base)
        assert (logits(model) - expected(base)).abs().max() <= SAME
        merge(base, adapter, tmp_path / "merged")
    for of in (None, *([] if same else [base])):
        with user_error("adapter_invalid", name):
            lora.attach(model, adapter, of)


def test_modules_to_save_that_were_not_saved_change_nothing(base: Path, tmp_path: Path) -> None:
    model = hf.load(base, torch.float32)
    lora.attach(model, save(tmp_path / "adapter", {**CONFIG, "modules_to_save": ["lm_head"]}))
    assert (logits(model) - expected(base)).abs().max() <= SAME
