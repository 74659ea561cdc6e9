"""Linears that calibration tokens reach and that say nothing: their inputs are zero, or what the loss minds of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attar.checkpoints.sources import hf
from attar.compression.block import hessians
from attar.compression.calibration.loss_weights import Hints
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.compression.runs.pipeline import Compressed, compress
from attar.compression.solvers.rounding import rtn
from attar.formats.packed import PackedTensor
from attar.model.cache import ForwardBatch
from tests.conftest import token_ids
from tests.model.random_model import LLAMA, write

Change = Callable[[str, Tensor], Tensor]

GROUPS = {"recipe": "guided-w4g32", "couple": False, "guide": 3}
BOTH = {"recipe": "guided-w4g32", "guide": 1}
RECIPES = (
    "gptq-w4g32", "qronos-w4g32", "guided-w4g32", GROUPS, BOTH, "awq+guided-w4g32", "sparsegpt-2:4", "prune-2:4-w4g32",
    "wanda-2:4", "squeezellm-lut4", "structured-p50",
)  # fmt: skip
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


IDS = token_ids(4, 32, vocab=96)
SMALL = {**LLAMA, "num_hidden_layers": 2, "intermediate_size": 256}  # wide enough to lose columns


def model(folder: Path, change: Change) -> Path:
    """A random Llama of two layers with its tensors as `change` leaves them."""
    file = write(folder, SMALL) / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def without(*ends: str) -> Change:
    return lambda name, tensor: torch.zeros_like(tensor) if name.endswith(ends) else tensor


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its block 1 computes nothing, as those that LLaMA-Pro adds before it trains them."""
    ends = "layers.1.self_attn.o_proj.weight", "layers.1.mlp.down_proj.weight"
    return model(tmp_path_factory.mktemp("models") / "identity", without(*ends))


@pytest.fixture(scope="module")
def mute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No attention says anything."""
    return model(tmp_path_factory.mktemp("models") / "mute", without("v_proj.weight"))


@pytest.fixture(scope="module")
def certain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So sure of every token that the loss has no gradient anywhere."""
    sure: Change = lambda name, tensor: tensor * 1e5 if name == "lm_head.weight" else tensor  # noqa: E731
    return model(tmp_path_factory.mktemp("models") / "certain", sure)


def done(source: Path, out: Path, recipe: str | dict[str, object]) -> Compressed:
    """A recipe carried out, whose output computes finite numbers and whose records hold some."""
    plan = load_recipe(recipe) if isinstance(recipe, str) else recipe_from_dict(recipe)
    found = compress(source, out, recipe=plan, calibration=IDS)
    logits = hf.load(out, torch.float32).forward(torch.tensor(IDS[0]), ForwardBatch((32,), 32))
    assert logits.isfinite().all()
    assert all(math.isfinite(record.error) and math.isfinite(record.rtn_error) for record in found.records)
    return found


def measures(found: Compressed, layer: int) -> dict[str, str]:
    return {r.name.rpartition(".")[2]: r.measure for r in found.records if f"layers.{layer}." in r.name}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_block_without_gradients_stops_no_method(
    recipe: str | dict[str, object], identity: Path, tmp_path: Path
) -> None:
    """Rows that the loss does not couple are solved for one by one; down and o, which it minds, are coupled."""
    found = done(identity, tmp_path / "out", recipe)
    if recipe == "guided-w4g32":
        coupled = "coupled corrected output"
        assert measures(found, 0) == dict.fromkeys(LINEARS, coupled)
        apart = dict.fromkeys(LINEARS, "corrected output")
        assert measures(found, 1) == apart | {"o_proj": coupled, "down_proj": coupled}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_inputs_of_zeros_stop_no_method(recipe: str | dict[str, object], mute: Path, tmp_path: Path) -> None:
    """What reads them has its weight alone, and somebody is told."""
    found = done(mute, tmp_path / "out", recipe)
    assert any("input channels were zero at every calibration token" in each for each in found.warnings)
    assert any("self_attn.o_proj (100.0%)" in each for each in found.warnings)
    by_weight = {record.name.rpartition(".")[2] for record in found.records if record.measure == "weight"}
    assert by_weight == ({"o_proj"} if recipe != "squeezellm-lut4" else set())


def test_codes_for_inputs_of_zeros_are_those_of_rounding_to_nearest(mute: Path, tmp_path: Path) -> None:
    done(mute, tmp_path / "out", "gptq-w4g32")
    name = "model.layers.1.self_attn.o_proj"
    stored = hf.Checkpoint.open(tmp_path / "out").linear(name).weight
    weight = load_file(mute / "model.safetensors")[f"{name}.weight"]
    assert isinstance(stored, PackedTensor)
    rounded = rtn.solve(weight, stored.scheme, scale_search="mse")
    assert torch.equal(stored.dequantize(), rounded.dequantize())


def test_where_the_loss_says_nothing_guided_is_qronos(certain: Path, tmp_path: Path) -> None:
    for recipe in ("guided-w4g32", "qronos-w4g32"):
        found = done(certain, tmp_path / recipe, recipe)
        assert {record.measure for record in found.records} == {"corrected output"}
    one, other = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("guided-w4g32", "qronos-w4g32"))
    assert one == other


def test_of_a_weight_some_of_whose_rows_the_loss_minds_the_others_heed_all_tokens_alike() -> None:
    weights = torch.tensor([[0.0, 2.0, 1e-40], [0.0, 0.0, 3e-41]])  # 1e-40: one over it is an infinity
    outputs = torch.diag(torch.tensor([0.0, 1.0]))
    found = hessians.heeded(
        {
            "some": Hints(weights, outputs),
            "none": Hints(torch.zeros(2, 1), torch.zeros(2, 2)),
            "unasked": Hints(None, None),
            "broken": Hints(torch.full((2, 1), torch.nan), torch.full((2, 2), torch.nan)),
        }
    )
    some, none, unasked, broken = found.values()
    assert some.weights is not None
    assert some.weights.tolist() == [[1, 2, 1], [1, 0, 1]]
    assert some.outputs is outputs
    assert (none.weights, none.outputs, unasked.weights, unasked.outputs) == (None,) * 4
    assert broken.weights is not None, "a NaN is to be refused by whoever meets it"
    assert broken.outputs is not None
