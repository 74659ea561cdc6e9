"""Rotated models in GGUF files: the same function, ordinary tensors, and less lost where channels stand out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from outliers import KINDS, inject
from safetensors.torch import load_file, save_file
from torch import Tensor

from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.receipts.verify import verify
from attar.checkpoints.sources import hf, opening
from attar.compression.calibration import importance
from attar.compression.calibration.amount import Amount
from attar.compression.calibration.texts import sample_from
from attar.compression.recipe.methods import Rotate, SpinQuant
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.formats.codecs.ggml import TYPES
from attar.metrics.bootstrap import paired_bootstrap_ratio
from attar.metrics.measure import measure
from attar.model.cache import ForwardBatch
from tests.compression.outputs.test_gguf import Stop, stop_after
from tests.errors import user_error

SAME_LOGITS = 1e-4  # max |difference| of logits over the largest, in float32
ROUNDED_LOGITS = 0.15  # root mean squares of the same beside q8_0, which random weights amplify to 0.06
Q8_ERROR = 0.02  # of a matrix in q8_0, over its norm
CALIBRATION, HELD_OUT = Amount(12, 256, seed=0), Amount(6, 256, seed=1)
GAINS = {"q4_k_m": 0.1, "gptq-q4_k_m": 0.8}
"""KL with a rotation in front over that without, beside outliers of all kinds; 0.01 and 0.5 were measured."""

Ids = list[list[int]]

COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "head_dim": 24, "rope_scaling": LLAMA3}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 24}),
}


def made(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A model of random weights, norms and biases, none of them special, in a folder."""
    family, settings = MODELS[case]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 0.5 if parameter.shape[0] == config.vocab_size else parameter.shape[-1] ** -0.5
        parameter.data = noise * (0.3 if parameter.ndim == 1 else scale)
        parameter.data += parameter.ndim == 1 and not name.endswith("bias")
    model.to(dtype).save_pretrained(folder)
    return folder


def ids() -> list[int]:
    return torch.randint(3, 96, (24,), generator=torch.Generator().manual_seed(2)).tolist()


def text() -> Ids:
    return torch.randint(3, 96, (6, 32), generator=torch.Generator().manual_seed(4)).tolist()


@torch.inference_mode()
def logits(path: Path) -> Tensor:
    found = ids()
    return opening.load(path, torch.float32).forward(torch.tensor(found), ForwardBatch((len(found),), len(found)))


@pytest.mark.parametrize("case", MODELS)
def test_a_file_of_a_rotated_model_computes_the_same(case: str, tmp_path: Path) -> None:
    """As the original does, and to the bit as the rotated folder does, whose tensors another reader finds in it."""
    source = made(case, tmp_path / "source")
    base = logits(source)
    done = compress(source, tmp_path / "out.gguf", recipe="rotate-f32")
    compress(source, tmp_path / "out", recipe="rotate-keep")
    assert torch.equal(logits(tmp_path / "out.gguf"), logits(tmp_path / "out"))
    assert (logits(tmp_path / "out.gguf") - base).abs().max() < SAME_LOGITS * base.abs().max()
    assert verify(tmp_path / "out.gguf").ok
    tensors = {t.name: np.asarray(t.data) for t in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    rotated, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "source"))
    tied = "lm_head.weight" not in plain
    assert any("is a matrix of its own" in note for note in done.notes) == tied
    assert not np.array_equal(tensors["token_embd.weight"], tensors["output.weight"])
    for name in ("attn_norm", "ffn_norm"):
        assert (tensors[f"blk.1.{name}.weight"] == 1).all()
    assert (tensors["output_norm.weight"] == 1).all()
    at, heads = "model.layers.1.self_attn", 4
    for part in ("weight", "bias"):
        if f"{at}.q_proj.{part}" in rotated:
            rows = rotated[f"{at}.q_proj.{part}"].numpy()
            if "llama" in case or case == "mistral":  # the halves of a head, by turns
                halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
                rows = np.stack([halves[:, 0], halves[:, 1]], 2).reshape(rows.shape)
            assert np.array_equal(tensors[f"blk.1.attn_q.{part}"], rows)
    assert np.array_equal(tensors["blk.2.ffn_down.weight"], rotated["model.layers.2.mlp.down_proj.weight"].numpy())
    if "bias" in case or case == "qwen2":
        assert np.array_equal(tensors["blk.0.attn_v.bias"], rotated["model.layers.0.self_attn.v_proj.bias"].numpy())
        assert not torch.equal(*(each["model.layers.0.self_attn.v_proj.bias"] for each in (rotated, plain)))


@pytest.mark.parametrize("case", ["llama-biases", "qwen2"])
def test_what_16_bits_cannot_hold_of_rotated_numbers_a_file_does(case: str, tmp_path: Path) -> None:
    """Nothing is rounded to the source's dtype on the way to a type that holds more."""
    source = made(case, tmp_path / "source", torch.bfloat16)
    base = logits(source)
    compress(source, tmp_path / "out.gguf", recipe="rotate-f32")
    compress(source, tmp_path / "out", recipe="rotate-keep")
    bound = SAME_LOGITS * base.abs().max()
    assert (logits(tmp_path / "out.gguf") - base).abs().max() < bound < (logits(tmp_path / "out") - base).abs().max()


def test_a_tied_model_without_norm_weights_stays_tied(tmp_path: Path) -> None:
    source = made("llama", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    done = compress(source, tmp_path / "out.gguf", recipe="rotate-f32")
    assert "output.weight" not in GgufFile(tmp_path / "out.gguf")
    assert not any("of its own" in note for note in done.notes)
    base = logits(source)
    assert (logits(tmp_path / "out.gguf") - base).abs().max() < SAME_LOGITS * base.abs().max()
    assert verify(tmp_path / "out.gguf").ok


@pytest.mark.parametrize("recipe", ["rotate+gptq-q8_0", "rotate+guided-q8_0", "spinquant+gptq-q8_0"])
def test_methods_behind_a_rotation_leave_files_that_verify(recipe: str, tmp_path: Path) -> None:
    source = made("llama", tmp_path / "source")
    compress(source, tmp_path / "out.gguf", recipe=recipe, calibration=text())
    base = logits(source)
    assert (logits(tmp_path / "out.gguf") - base).square().mean().sqrt() < ROUNDED_LOGITS * base.square().mean().sqrt()
    assert verify(tmp_path / "out.gguf").ok
    receipt = json.loads((tmp_path / "out.gguf.receipt.json").read_text())
    assert receipt["recipe"]["recipe"] == recipe
    assert receipt["recipe"]["rotate"]["method"] == recipe.partition("+")[0]
    assert not receipt["recipe"]["rotate"]["online"]
    assert ("rotation" in receipt) == recipe.startswith("spinquant"), "what was learned is said"


def test_an_untied_model_gets_the_types_of_one(demo: Path, tmp_path: Path) -> None:
    """As llama.cpp has it: more bits for the output matrix, the mix's for what only looks tokens up."""
    plain = compress(demo, tmp_path / "plain.gguf", recipe="q4_k_m")
    done = compress(demo, tmp_path / "out.gguf", recipe="rotate-q4_k_m")
    assert done.recipe == "rotate-q4_k_m"
    files = [GgufFile(tmp_path / f"{name}.gguf") for name in ("plain", "out")]
    kinds = [{name: file.info(name).kind.name for name in file.names()} for file in files]
    assert kinds[1].pop("output.weight") == kinds[0]["token_embd.weight"] == "Q6_K"
    assert kinds[1].pop("token_embd.weight") == "Q4_K"
    assert kinds[1] == {name: kind for name, kind in kinds[0].items() if name != "token_embd.weight"}
    table = 4096 * 256 * TYPES["Q4_K"].bits_per_weight / 8
    assert 0 <= done.bytes - plain.bytes - table < 1024, "and a header's words"
    assert verify(tmp_path / "out.gguf").ok


@pytest.mark.parametrize("head, kind", [("int4", "Q4_0"), ("int8", "Q8_0"), ("bf16", "BF16")])
def test_the_head_of_a_rotated_file(head: str, kind: str, tmp_path: Path) -> None:
    source = made("qwen2", tmp_path / "source", torch.bfloat16)
    done = compress(source, tmp_path / "out.gguf", recipe="rotate-q8_0", head=head)
    assert any("of its own" in note for note in done.notes)
    assert not any("--head" in note for note in done.notes), "who chose is not told to"
    file = GgufFile(tmp_path / "out.gguf")
    assert [file.info(f"{name}.weight").kind.name for name in ("output", "token_embd")] == [kind, "Q8_0"]
    assert verify(tmp_path / "out.gguf").ok


def test_importances_are_of_rotated_inputs(tmp_path: Path) -> None:
    source = made("llama", tmp_path / "source")
    compress(source, tmp_path / "out.gguf", recipe="rotate-iq4_nl", calibration=text())
    compress(source, tmp_path / "rotated", recipe="rotate-keep")
    importance.make(tmp_path / "rotated", tmp_path / "m.gguf", calibration=text())
    compress_request(
        CompressionRequest(tmp_path / "rotated", tmp_path / "after.gguf", recipe="iq4_nl", imatrix=tmp_path / "m.gguf")
    )
    compress(source, tmp_path / "without.gguf", recipe="rotate-iq4_nl")
    ours, after, without = (GgufCheckpoint.open(tmp_path / f"{n}.gguf") for n in ("out", "after", "without"))
    names = [name.removesuffix(".weight") for name in load_file(tmp_path / "rotated" / "model.safetensors")]
    for name in names:
        assert torch.equal(*(each.tensor(f"{name}.weight") for each in (ours, after)))
    down = "model.layers.1.mlp.down_proj.weight"
    assert not torch.equal(ours.tensor(down), without.tensor(down)), "without text there are none"


def test_importances_wait_for_a_rotation_that_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they are measured on is what is written."""
    source = made("llama", tmp_path / "source")
    name, collect, seen = "model.layers.1.self_attn.k_proj", importance.collect, dict[str, Tensor]()

    def watched(checkpoint: hf.Checkpoint, *rest: Any) -> dict[str, Tensor]:
        weight = checkpoint.linear(name).weight
        assert isinstance(weight, Tensor)
        seen[name] = weight.clone()
        return collect(checkpoint, *rest)

    monkeypatch.setattr(importance, "collect", watched)
    recipe = recipe_from_dict({"recipe": "spinquant-q8_0", "rotation_steps": 5})
    compress(source, tmp_path / "out.gguf", recipe=recipe, calibration=text())
    written = GgufCheckpoint.open(tmp_path / "out.gguf", torch.float32).tensor(f"{name}.weight")
    assert (written - seen[name]).norm() < Q8_ERROR * written.norm()


@pytest.mark.parametrize("name", ["rotate+gptq-q4_0", "spinquant+guided-q4_0"])
def test_a_stopped_run_resumes_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    source = made("qwen2", tmp_path / "source")
    recipe = recipe_from_dict({"recipe": name, **({"rotation_steps": 5} if "spin" in name else {})})
    compress(source, tmp_path / "whole" / "out.gguf", recipe=recipe, calibration=text())
    out = tmp_path / "out.gguf"
    for blocks in (0, 1, 3):
        with pytest.raises(Stop):
            compress(source, out, recipe=recipe, calibration=text(), progress=stop_after(blocks))
    compress(source, out, recipe=recipe, calibration=text())
    assert out.read_bytes() == (tmp_path / "whole" / "out.gguf").read_bytes()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "what quarot turns": ({"recipe": "quarot-q4_k_m"}, "rotates what down reads at run time, which no program"),
    "of a type": ({"recipe": "quarot+gptq-q8_0"}, "rotates what down reads at run time"),
    "online": ({"recipe": "rotate-q4_k_m", "online": True}, "say online: false"),
    "online, of what is learned": ({"recipe": "spinquant-q4_k_m", "online": True}, "say online: false"),
    "across": (
        {"recipe": "rotate+gptq-q4_k_m", "across": True},
        "rotates what o reads at run time.* say across: false",
    ),
    "a grid": ({"recipe": "rotate-w4g32"}, "has no place in a GGUF file"),
    "nothing rounded": ({"recipe": "rotate-keep"}, "has no place in a GGUF file"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_file_cannot_hold_is_refused(kind: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    told, sentence = REFUSED[kind]
    with pytest.raises(ValueError, match=sentence):
        compress(tiny, tmp_path / "out.gguf", recipe=recipe_from_dict(told), calibration=calibration)
    assert not any(tmp_path.iterdir())


def test_importances_of_other_inputs_are_refused(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    importance.make(tiny, tmp_path / "m.gguf", calibration=calibration)
    for recipe in ("rotate-q4_0", "spinquant+gptq-q4_0"):
        with user_error("option_conflict"):
            compress_request(
                CompressionRequest(
                    tiny, tmp_path / "out.gguf", recipe=recipe, imatrix=tmp_path / "m.gguf", calibration=calibration
                )
            )
    with user_error("calibration_missing"):
        compress(tiny, tmp_path / "out.gguf", recipe="spinquant-q4_0")
    with user_error("output_invalid"):
        compress(tiny, tmp_path / "out", recipe="rotate-q4_k_m")


def test_spinquant_turns_at_run_time_in_folders_alone() -> None:
    plan = load_recipe("spinquant+gptq-q4_k_m")
    assert plan.for_file().rotate == SpinQuant(online=False)
    assert plan.for_file().name == plan.name == "spinquant+gptq-q4_k_m"
    assert load_recipe("spinquant+gptq-w4a4").rotate == SpinQuant()
    other = replace(load_recipe("gptq-q4_0"), rotate=SpinQuant(rotation_steps=3))
    assert other.for_file().rotate == SpinQuant(rotation_steps=3, online=False)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", GAINS)
def test_what_rotation_gains_in_a_file_where_channels_stand_out(recipe: str, demo: Path, tmp_path: Path) -> None:
    base = hf.load(demo, torch.float32)
    text, held_out = (sample_from(base, amount).tolist() for amount in (CALIBRATION, HELD_OUT))
    source = inject(demo, tmp_path / "source", kinds=KINDS)
    found = {}
    for way in ("plain", "rotated"):
        plan = replace(load_recipe(recipe), rotate=Rotate() if way == "rotated" else None)
        out = compress(source, tmp_path / f"{way}.gguf", recipe=plan, calibration=text if "gptq" in recipe else None)
        found[way] = measure(opening.load(out.path, torch.float32), held_out, base=base).measurement.kl_windows
    ratio = paired_bootstrap_ratio(found["rotated"], found["plain"])
    assert ratio.high is not None
    assert ratio.high < GAINS[recipe]
    assert (tmp_path / "plain.gguf").stat().st_size == (tmp_path / "rotated.gguf").stat().st_size
