"""Structured pruning against brute force, by what must not change where only dead weight goes, and by transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attar.checkpoints.inspect import inspect
from attar.checkpoints.sources import hf
from attar.compression.block import structured
from attar.compression.block.structured import Sizes
from attar.compression.recipe.methods import Structured
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.compression.runs.pipeline import compress
from attar.compression.solvers.rounding import gptq
from attar.model.cache import ForwardBatch
from attar.model.config import ModelConfig
from tests.errors import user_error

SAME = 1e-6
SAME_LOGITS = 2e-2  # of bfloat16 weights, computed in float32 by two programs
SAME_FUNCTION = 5e-3  # logits where only dead weight has gone; weights are solved for again, and rounded to bfloat16

Ids = list[list[int]]
Problem = Callable[..., tuple[Tensor, Tensor]]


def hessian(x: Tensor) -> gptq.Hessian:
    found = gptq.Hessian(x.shape[1], x.dtype)
    found.add(x)
    return found


@pytest.mark.parametrize(("width", "keep"), [(1, 7), (3, 2)])
def test_what_goes_is_each_time_what_can_best_be_made_up_for(problem: Problem, width: int, keep: int) -> None:
    weight, x = problem(1, rows=5, columns=12)
    found = structured.shrink(weight, hessian(x), width, keep, damping=0.0)

    def best(runs: list[int]) -> tuple[float, Tensor]:
        columns = structured.columns_of(torch.tensor(runs), width)
        fitted = torch.linalg.lstsq(x[:, columns], x @ weight.T).solution
        return float((x[:, columns] @ fitted - x @ weight.T).square().sum()), fitted.T

    left = list(range(12 // width))
    while len(left) > keep:
        left.remove(min(left, key=lambda run: best([each for each in left if each != run])[0]))
    assert found.runs.tolist() == left
    cost, fitted = best(left)
    assert torch.allclose(found.weight, fitted, atol=SAME)
    assert found.error == pytest.approx(cost / float((x @ weight.T).square().sum()), rel=SAME)
    assert found.error < found.plain_error


@pytest.mark.parametrize(("width", "keep"), [(1, 7), (3, 2)])
def test_of_what_reads_zeros_the_largest_stays_as_it_is(problem: Problem, width: int, keep: int) -> None:
    weight, x = problem(1, rows=5, columns=12)
    found = structured.shrink(weight, hessian(torch.zeros_like(x)), width, keep)
    norms = weight.square().sum(0).view(-1, width).sum(1)
    assert found.runs.tolist() == norms.topk(keep).indices.sort().values.tolist()
    assert torch.allclose(found.weight, weight[:, structured.columns_of(found.runs, width)], atol=SAME)
    assert found.error == pytest.approx(found.plain_error)
    assert found.error == pytest.approx(1 - float(found.weight.square().sum() / weight.square().sum()), abs=SAME)


def model(**changed: int) -> ModelConfig:
    sizes = {"hidden": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "intermediate": 1536} | changed
    return ModelConfig("LlamaForCausalLM", vocab_size=64, context=64, windows=(None,), ropes=(None,), **sizes)


def weights(config: ModelConfig) -> int:
    """Of the linears of one block."""
    heads = 2 * (config.heads + config.kv_heads) * config.head_dim
    return config.hidden * (heads + 3 * config.intermediate)


@pytest.mark.parametrize(
    ("percent", "expected"), [(25, Sizes(8, 4, 1024)), (50, Sizes(4, 2, 768)), (75, Sizes(2, 1, 384))]
)
def test_sizes_lose_the_percentage(percent: int, expected: Sizes) -> None:
    before = model()
    found = structured.sizes(before, percent)
    after = replace(before, heads=found.heads, kv_heads=found.kv_heads, intermediate=found.intermediate)
    assert found == expected
    assert before.hidden % after.heads == 0, "which transformers demands of a Llama"
    assert after.intermediate % structured.STEP == 0
    lost = 1 - weights(after) / weights(before)
    assert abs(lost - percent / 100) <= structured.STEP * 3 * before.hidden / weights(before) / 2


@pytest.mark.parametrize("name", structured.RESIZED)
def test_heads_go_in_any_number_that_transformers_loads(name: str) -> None:
    """Of a quarter of 8 heads 6 are left, of which 512 is no multiple: Llama's keep all, and the columns give more."""
    before = replace(model(), architecture=name)
    found = structured.sizes(before, 25)
    said = structured.account(before, 25, found)
    if name == "LlamaForCausalLM":
        assert found == Sizes(8, 4, 1024)
        assert said.startswith("structured-p25 left out 0 of 4 key-value heads and 512 of 1,536 feed-forward columns")
        assert "1 of the heads would have been their share" in said
        assert "only where the number of heads divides the hidden size, 512" in said
    else:
        assert found == Sizes(6, 3, 1152)
        assert said == (
            "structured-p25 left out 1 of 4 key-value heads and 384 of 1,536 feed-forward columns of each layer."
        )


def test_published_llamas_keep_their_heads_and_others_do_not() -> None:
    llama = model(hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336)
    assert structured.sizes(llama, 25) == Sizes(32, 8, 9856)
    assert structured.sizes(llama, 50) == Sizes(16, 4, 7168)
    assert structured.sizes(replace(llama, architecture="MistralForCausalLM"), 25) == Sizes(24, 6, 10752)


def test_sizes_say_what_they_cannot_do() -> None:
    with user_error("sparsity_invalid"):
        structured.sizes(model(intermediate=128), 90)
    with user_error("architecture_unsupported"):
        structured.sizes(replace(model(), architecture="OPTForCausalLM"), 25)
    for name in ("structured-p0", "structured-p96", "structured-s50", "structured-2:4", "awq+structured-p25"):
        with pytest.raises(ValueError, match=r"structured-p25|percent"):
            load_recipe(name)
    assert load_recipe("structured-p30").passes == (Structured(30),)
    recipe = recipe_from_dict({"recipe": "structured-p30", "overrides": [{"match": "a", "scheme": "keep"}]})
    with user_error("recipe_conflict"):
        recipe.schemes({"a": (8, 8)})


def logits(folder: Path, ids: list[int]) -> Tensor:
    return hf.load(folder, torch.float32).forward(torch.tensor(ids), ForwardBatch((len(ids),), len(ids)))


@pytest.fixture(scope="module")
def half_dead(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny`, of whose heads and feed-forward columns o and down read one half, another in every layer."""
    folder = tmp_path_factory.mktemp("half") / "dead"
    folder.mkdir()
    (folder / "config.json").write_bytes((tiny / "config.json").read_bytes())
    tensors = load_file(tiny / "model.safetensors")
    for layer in range(3):
        at = f"model.layers.{layer}"
        group = layer % 2  # two query heads of 32 columns share a key-value head
        tensors[f"{at}.self_attn.o_proj.weight"][:, 64 * group : 64 * (group + 1)] = 0
        gone = torch.randperm(256, generator=torch.Generator().manual_seed(layer))[:128]
        tensors[f"{at}.mlp.down_proj.weight"][:, gone] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_dead_halves_go_and_nothing_changes(half_dead: Path, calibration: Ids, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    done = compress(half_dead, tmp_path / "out", recipe="structured-p50", calibration=calibration)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_attention_heads"] == 2
    assert config["num_key_value_heads"] == 1
    assert config["head_dim"] == 32
    assert config["intermediate_size"] == 128
    before, after = load_file(half_dead / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    count, halved = (
        sum(math.prod(t.shape) for name, t in tensors.items() if "_proj" in name) for tensors in (before, after)
    )
    assert halved * 2 == count
    assert all(record.error < 1e-5 for record in done.records)
    assert inspect(tmp_path / "out").recipe == "structured-p50"
    (note,) = done.notes
    assert note == "structured-p50 left out 1 of 2 key-value heads and 128 of 256 feed-forward columns of each layer."
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"It is dense: attar reads it, and transformers as it does the original. {note}" in card
    ours = logits(tmp_path / "out", calibration[0])
    assert torch.allclose(ours, logits(half_dead, calibration[0]), atol=SAME_FUNCTION)
    reader = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert reader.num_parameters() == sum(math.prod(t.shape) for t in after.values())
    with torch.inference_mode():
        theirs = reader(torch.tensor([calibration[0]])).logits[0]
    assert torch.allclose(ours, theirs, atol=SAME_LOGITS)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3"])
def test_heads_that_do_not_divide_the_hidden_size_load_in_transformers(
    family: str, calibration: Ids, tmp_path: Path
) -> None:
    """24 of 32 heads are left, and the hidden size is 128."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=8, head_dim=8, max_position_embeddings=128, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    source = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in source.named_parameters():
        offset, scale = (1.0, 0.2) if "norm" in name else (0.0, 0.15)
        parameter.data = (offset + scale * torch.randn(parameter.shape, generator=generator)).bfloat16()
    source.save_pretrained(tmp_path / "source")
    done = compress(tmp_path / "source", tmp_path / "out", recipe="structured-p25", calibration=calibration)
    assert "left out 2 of 8 key-value heads" in done.notes[0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_attention_heads"] == 24
    reader, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.inference_mode():
        theirs = reader(torch.tensor([calibration[0]])).logits[0]
    assert theirs.std() > 0.5
    assert torch.allclose(logits(tmp_path / "out", calibration[0]), theirs, atol=SAME_LOGITS)
