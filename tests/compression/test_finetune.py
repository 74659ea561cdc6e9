"""Training adapters: the loss falls on a frozen base, the adapter is what PEFT reads, and killed runs resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoints import hf, lora
from attar.compression.finetune import FineTuning, finetune, read_ids
from attar.compression.pipeline import compress
from attar.model.cache import Step
from tests.conftest import token_ids

SAME = 1e-4  # relative, of a loss
OPTIONS = FineTuning(rank=4, alpha=8, rate=1e-2, epochs=4, batch=64, save_every=3)


@pytest.fixture(scope="module")
def base(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed") / "base"
    compress(tiny, folder, recipe="rtn-w4g32")
    return folder


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """One text again and again, which can be learned by heart."""
    return torch.tensor(token_ids(1, 32, seed=3)).repeat(4, 1)


def loss(model: hf.Decoder, ids: Tensor) -> float:
    logits = model.forward(ids[0], Step((32,), 32))
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]))


def test_it_learns_on_a_base_that_stays(base: Path, ids: Tensor, tmp_path: Path) -> None:
    before = (base / "model.safetensors").read_bytes()
    found = finetune(base, tmp_path / "adapter", ids, OPTIONS)
    assert len(found.losses) == 8
    assert found.losses[0] == pytest.approx(loss(hf.load(base, torch.float32), ids), rel=SAME)
    model = hf.load(base, torch.float32)
    adapter = lora.attach(model, tmp_path / "adapter")
    assert loss(model, ids) < found.losses[-1] < found.losses[0]
    assert len(adapter.adapters) == 21
    assert found.parameters == sum(a.down.numel() + a.up.numel() for a in adapter.adapters.values())
    assert (base / "model.safetensors").read_bytes() == before
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight" in names


def test_the_gradient_is_that_of_autograd(tiny: Path, base: Path, ids: Tensor, tmp_path: Path) -> None:
    """One step of Adam moves every number by the rate against its gradient's sign; B, zero, is all that has one."""
    options = FineTuning(rank=2, rate=1e-3, batch=32, epochs=1, targets=("*.0.mlp.down_proj",))
    finetune(tiny, tmp_path / "adapter", ids[:1], options)
    moved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.down_proj"
    model = hf.load(tiny, torch.float32)
    linear = next(linear for linear in model.blocks[0].linears() if "down" in linear.name)
    assert isinstance(linear.weight, Tensor)
    weight = linear.weight = linear.weight.clone().requires_grad_()
    logits = model.run(ids[0], Step((32,), 32))
    torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    assert weight.grad is not None
    slope = weight.grad @ moved[f"{name}.lora_A.weight"].T
    clear = slope.abs() > 1e-3 * slope.abs().max()
    up = moved[f"{name}.lora_B.weight"]
    assert len(moved) == 2
    assert torch.equal(up.sign()[clear], -slope.sign()[clear])
    assert up.abs().max() <= 1e-3 * 1.01


def test_a_killed_run_resumes_to_the_same_bytes(base: Path, ids: Tensor, tmp_path: Path) -> None:
    whole = finetune(base, tmp_path / "whole", ids, OPTIONS)

    class Killed(Exception):
        pass

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("training", 7):
            raise Killed

    with pytest.raises(Killed):
        finetune(base, tmp_path / "killed", ids, OPTIONS, progress=kill)
    with pytest.raises(ValueError, match="differs in rate"):
        finetune(base, tmp_path / "killed", ids, FineTuning(4, 8, rate=1e-3, epochs=4, batch=64, save_every=3))
    steps: list[int] = []
    found = finetune(
        base, tmp_path / "killed", ids, OPTIONS, progress=lambda stage, done, total: steps.append(done)
        if stage == "training" else None,
    )  # fmt: skip
    assert steps == [7, 8]
    assert found.losses == whole.losses
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert json.loads((tmp_path / "whole" / "adapter_config.json").read_text())["r"] == 4


def test_what_cannot_be_is_refused(base: Path, ids: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no linear matches nothing"):
        finetune(base, tmp_path / "a", ids, FineTuning(targets=("nothing",)))
    with pytest.raises(ValueError, match="training needs"):
        finetune(base, tmp_path / "a", ids, OPTIONS, memory=1000)
    with pytest.raises(ValueError, match="no next token"):
        finetune(base, tmp_path / "a", ids[:, :1], OPTIONS)
    with pytest.raises(ValueError, match="at least 1"):
        FineTuning(rank=0)
    assert not list(tmp_path.iterdir())


def test_a_text_becomes_windows_of_ids(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It was a dark and stormy night. " * 40)
    ids = read_ids(demo, tmp_path / "text.txt", 3, 16)
    assert ids.shape == (3, 16)
    with pytest.raises(ValueError, match="no such file"):
        read_ids(demo, tmp_path / "none.txt", 3, 16)


def test_a_file_of_gguf_is_refused(ids: Tensor, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "text.txt").write_text("a text")
    with pytest.raises(ValueError, match="is a GGUF file, and adapters are trained on folders"):
        read_ids(tmp_path / "model.gguf", tmp_path / "text.txt", 1, 8)
    with pytest.raises(ValueError, match="is a GGUF file, and adapters are trained on folders"):
        finetune(tmp_path / "model.gguf", tmp_path / "adapter", ids, OPTIONS)
