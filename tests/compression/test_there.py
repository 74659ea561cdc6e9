"""A model compressed on another device, one that only pretends to be (`tests/pretend.py`): the whole of `compress`.

`test_place.py` has one block of it. Here every tensor that a run moves is one of the device's or it fails: hidden
states that cross with each batch, blocks that go there and come back to be written, what is known of the original
model, the probes that stay behind. What comes of it is what comes of it on a CPU, but for codes on an edge.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attar.checkpoints.receipts.place import receipt_path
from attar.compression.recipe.methods import Awq, Gptq, Pass
from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.kernels import dispatch
from tests.model.random_model import HEADS, LLAMA, SIZES, write
from tests.pretend import there

ERRORS = 0.2  # relative, of what rounding costs: inputs differ in their last bits, and of a few codes some fall over
SAME = 0.75  # of the bytes of codes, at least: each code that falls over moves what others are corrected for

FEW = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}  # every operation there is a call in Python
SMALL = {**LLAMA, **FEW}
FAMILIES = {
    "llama": SMALL,
    "qwen2": {**SMALL, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**SMALL, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "attention_bias": True},
    "opt": {**SIZES, **HEADS, **FEW, "architectures": ["OPTForCausalLM"], "ffn_dim": 64},
}

CASES = (
    ("llama", "rtn-w4g32"),
    ("qwen3", "rtn-fp8"),
    ("qwen2", "gptq-w4g32"),
    ("qwen2", "awq+gptq-w4g32-asym"),
    ("qwen3", "smoothquant+gptq-w8a8-static"),
    ("opt", "qronos-w4g32"),
    ("llama", "guided-w3g32"),
)
IDS = torch.randint(0, 120, (4, 16), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "recipe"), CASES, ids=[recipe for _, recipe in CASES])
def test_a_model_is_compressed_there(family: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = write(tmp_path / "model", FAMILIES[family]), load_recipe(recipe)
    plan = replace(plan, passes=tuple(map(hurried, plan.passes)))
    monkeypatch.setattr(dispatch, "require", lambda device: None)
    here = compress(model, tmp_path / "here", recipe=plan, calibration=IDS, head="int8")
    with there() as device:
        away = compress_request(
            CompressionRequest(model, tmp_path / "away", recipe=plan, calibration=IDS, head="int8", device=str(device))
        )
    assert [record.name for record in away.records] == [record.name for record in here.records]
    for one, other in zip(away.records, here.records, strict=True):
        assert one.error == pytest.approx(other.error, rel=ERRORS)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("away", "here"))
    assert {name: (part.dtype, part.shape) for name, part in ours.items()} == {
        name: (part.dtype, part.shape) for name, part in theirs.items()
    }
    alike = [_alike(ours[name], theirs[name]) for name in ours]
    assert min(alike) == 1 if recipe in ("rtn-w4g32", "rtn-fp8") else sum(alike) / len(alike) > SAME
    told = json.loads(receipt_path(tmp_path / "away").read_text())
    assert told["device"] == str(device)


def hurried(each: Pass) -> Pass:
    """With the least that it can be asked to do: `test_place.py` has the rest."""
    if isinstance(each, Awq):
        return replace(each, points=2)
    return replace(each, polish=0, scale_search="minmax") if isinstance(each, Gptq) else each


def _alike(one: torch.Tensor, other: torch.Tensor) -> float:
    """The share of bytes that are the same."""
    a, b = (part.contiguous().flatten().view(torch.uint8) for part in (one, other))
    return float((a == b).float().mean())
