"""Training adapters: the loss falls on a frozen base, the adapter is what PEFT reads, and killed runs resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from attar.checkpoints.adapters import lora
from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.compression.training.finetune import FineTuning, finetune, read_ids
from attar.formats.packed import PackedTensor
from attar.model.cache import ForwardBatch
from tests.conftest import token_ids
from tests.errors import user_error

SAME = 1e-4  # relative, of a loss
LOGITS = 1e-3  # of logits around 10, float32, sums in another order
OPTIONS = FineTuning(rank=4, alpha=8, rate=1e-2, epochs=4, batch=64, save_every=3)
SAVED = FineTuning(rank=2, rate=1e-2, epochs=4, batch=64, save_every=2)


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
    logits = model.forward(ids[0], ForwardBatch((32,), 32))
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
    logits = model.run(ids[0], ForwardBatch((32,), 32))
    torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).backward()
    assert weight.grad is not None
    slope = weight.grad @ moved[f"{name}.lora_A.weight"].T
    clear = slope.abs() > 1e-3 * slope.abs().max()
    up = moved[f"{name}.lora_B.weight"]
    assert len(moved) == 2
    assert torch.equal(up.sign()[clear], -slope.sign()[clear])
    assert up.abs().max() <= 1e-3 * 1.01


class Killed(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_bytes(base: Path, ids: Tensor, tmp_path: Path) -> None:
    whole = finetune(base, tmp_path / "whole", ids, OPTIONS)

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("training", 7):
            raise Killed

    with pytest.raises(Killed):
        finetune(base, tmp_path / "killed", ids, OPTIONS, progress=kill)
    with user_error("resume_mismatch"):
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


@pytest.fixture
def killed(tiny: Path, ids: Tensor, tmp_path: Path) -> Path:
    """Where a run killed in its seventh step of eight was to go; it saved after every second one."""

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("training", 7):
            raise Killed

    with pytest.raises(Killed):
        finetune(tiny, tmp_path / "killed", ids, SAVED, progress=kill)
    return tmp_path / "killed"


def save_of(out: Path, step: int) -> Path:
    return out.parent / f".{out.name}.attar-partial" / "state" / f"step-{step}"


def test_two_saves_are_kept(killed: Path) -> None:
    state = save_of(killed, 0).parent
    assert sorted(path.name for path in state.iterdir()) == ["step-4", "step-6"]


def flip(file: Path) -> None:
    found = bytearray(file.read_bytes())
    found[-3] ^= 0x40
    file.write_bytes(found)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda save: flip(save / "model.safetensors"),
    "a bit of the losses": lambda save: flip(save / "figures.json"),
    "a bit of the hashes": lambda save: flip(save / "sums.json"),
    "an end that is missing": lambda save: os.truncate(save / "model.safetensors", 1000),
    "no hashes": lambda save: (save / "sums.json").unlink(),
    "no weights": lambda save: (save / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_save_is_passed_over_for_the_one_before(
    damage: str, killed: Path, tiny: Path, ids: Tensor, tmp_path: Path
) -> None:
    """It says so, ends at the same bytes, and saves again where the damaged one lay."""
    DAMAGES[damage](save_of(killed, 6))
    steps: list[int] = []
    found = finetune(
        tiny, killed, ids, SAVED, progress=lambda stage, done, total: steps.append(done)
        if stage == "training" else None,
    )  # fmt: skip
    assert steps == [5, 6, 7, 8]
    assert len(found.notes) == 1
    assert found.notes[0].startswith("The run went on after step 4, not 6: ")
    assert found.to_dict()["notes"] == [*found.notes]
    whole = finetune(tiny, tmp_path / "whole", ids, SAVED)
    assert (found.losses, whole.notes) == (whole.losses, ())
    name = "adapter_model.safetensors"
    assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_where_no_save_is_whole_the_run_is_not_resumed(killed: Path, tiny: Path, ids: Tensor) -> None:
    for step in (4, 6):
        flip(save_of(killed, step) / "model.safetensors")
    with user_error("state_damaged", "model.safetensors"):
        finetune(tiny, killed, ids, SAVED)
    assert save_of(killed, 6).is_dir()
    assert finetune(tiny, killed, ids, SAVED, resume=False).notes == ()


def test_a_run_is_resumed_by_as_many_threads_and_the_same_torch(
    killed: Path, tiny: Path, ids: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in another order have other last bits."""
    threads = torch.get_num_threads()
    for name, value, words in (
        ("get_num_threads", lambda: threads + 1, f"threads ({threads + 1} now, {threads} then)"),
        ("__version__", "9.9", "torch"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch, name, value)
            with user_error("resume_mismatch", words):
                finetune(tiny, killed, ids, SAVED)
    assert len(finetune(tiny, killed, ids, SAVED).losses) == 8


def test_an_adapter_is_replaced_and_nothing_else(tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    out, options = tmp_path / "adapter", FineTuning(rank=2, batch=64)
    finetune(tiny, out, ids, options)
    with user_error("output_exists"):
        finetune(tiny, out, ids, options)
    finetune(tiny, out, ids, FineTuning(rank=3, batch=64), overwrite=True)
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 3
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    with user_error("output_invalid", "adapter_config.json"):
        finetune(tiny, model, ids, options, overwrite=True)
    (model / "adapter_config.json").write_text("{}")  # some models have one beside them
    with user_error("output_is_source"):
        finetune(model, model, ids, options, overwrite=True)
    assert (model / "model.safetensors").exists()


@pytest.mark.parametrize("family", ["Llama", "GPT2", "OPT"])
def test_sequences_beyond_the_context_are_refused_before_anything_is_done(family: str, tmp_path: Path) -> None:
    """Those with a table of positions would run past its end, those with rotary ones into what nobody trained."""
    model = random_model(family, tmp_path / "model")
    long = token_ids(2, CONTEXT + 1, VOCABULARY)
    words = rf"of {CONTEXT + 1} tokens exceed the model's context of {CONTEXT}$"
    options = FineTuning(rank=2, batch=CONTEXT)
    with pytest.raises(ValueError, match=words):
        finetune(model, tmp_path / "adapter", torch.tensor(long), options)
    with pytest.raises(ValueError, match=words):
        compress(model, tmp_path / "out", recipe="gptq-w4", calibration=long)
    with user_error("token_out_of_vocabulary"):
        finetune(model, tmp_path / "adapter", torch.full((1, 4), VOCABULARY), options)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    finetune(model, tmp_path / "adapter", torch.tensor(long)[:, :-1], options)


VOCABULARY, CONTEXT = 96, 48
SIZES = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
FAMILIES = {
    "Llama": {**SIZES, "intermediate_size": 64, "max_position_embeddings": CONTEXT},
    "GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": CONTEXT},
    "OPT": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": CONTEXT},
}


def random_model(family: str, folder: Path) -> Path:
    config = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, **FAMILIES[family])
    torch.manual_seed(0)
    name = f"{family}ForCausalLM" if family != "GPT2" else "GPT2LMHeadModel"
    getattr(transformers, name)(config).save_pretrained(folder)
    return folder


def test_it_learns_on_a_base_in_nf4(nf4: Path, ids: Tensor, tmp_path: Path) -> None:
    """QLoRA, as published."""
    before = (nf4 / "model.safetensors").read_bytes()
    found = finetune(nf4, tmp_path / "adapter", ids, OPTIONS)
    assert found.losses[0] == pytest.approx(loss(hf.load(nf4, torch.float32), ids), rel=SAME)
    assert all(later < sooner for sooner, later in pairwise(found.losses[::2]))
    model = hf.load(nf4, torch.float32)
    lora.attach(model, tmp_path / "adapter")
    assert loss(model, ids) < 0.9 * found.losses[0]
    assert (nf4 / "model.safetensors").read_bytes() == before


@pytest.fixture(scope="module")
def nf4(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compressed") / "nf4"
    compress(tiny, folder, recipe="rtn-nf4")
    return folder


def test_peft_opens_what_was_trained_on_nf4(nf4: Path, tiny: Path, ids: Tensor, tmp_path: Path) -> None:
    """On the numbers that the base's codes stand for: bitsandbytes, which would read them, needs a GPU."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed: nobody but attar opens the adapter here")
    finetune(nf4, tmp_path / "adapter", ids, OPTIONS)
    stored = hf.Checkpoint.open(nf4)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                weight = stored.linear(name).weight
                assert isinstance(weight, PackedTensor)
                module.weight.copy_(weight.dequantize())
        theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")(ids[:1]).logits[0]
    ours = hf.load(nf4, torch.float32)
    plain = ours.forward(ids[0], ForwardBatch((32,), 32))
    lora.attach(ours, tmp_path / "adapter")
    changed = ours.forward(ids[0], ForwardBatch((32,), 32))
    assert (changed - plain).abs().max() > 0.1
    assert (changed - theirs).abs().max() <= LOGITS


def test_what_cannot_be_is_refused(base: Path, ids: Tensor, tmp_path: Path) -> None:
    with user_error("name_unknown"):
        finetune(base, tmp_path / "a", ids, FineTuning(targets=("nothing",)))
    with user_error("memory_insufficient"):
        finetune(base, tmp_path / "a", ids, OPTIONS, memory=1000)
    with user_error("text_too_short"):
        finetune(base, tmp_path / "a", ids[:, :1], OPTIONS)
    with user_error("option_out_of_range"):
        FineTuning(rank=0)
    assert not list(tmp_path.iterdir())


def test_a_text_becomes_windows_of_ids(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It was a dark and stormy night. " * 40)
    ids = read_ids(demo, tmp_path / "text.txt", 3, 16)
    assert ids.shape == (3, 16)
    with user_error("file_not_found"):
        read_ids(demo, tmp_path / "none.txt", 3, 16)


def test_a_file_of_gguf_is_refused(ids: Tensor, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "text.txt").write_text("a text")
    with user_error("source_is_gguf"):
        read_ids(tmp_path / "model.gguf", tmp_path / "text.txt", 1, 8)
    with user_error("source_is_gguf"):
        finetune(tmp_path / "model.gguf", tmp_path / "adapter", ids, OPTIONS)
