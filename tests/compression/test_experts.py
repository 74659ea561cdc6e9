"""Mixtures of experts, compressed: what transformers, which fuses experts into one tensor, makes of the output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.model.cache import ForwardBatch
from tests.errors import user_error

EXACT = 1e-4  # largest difference of logits between attar and transformers, of their range
TOKENS = 24

EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
FAMILIES: dict[str, dict[str, int]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": EXPERTS | {"shared_expert_intermediate_size": 64},
    "Qwen3Moe": EXPERTS | {"head_dim": 16},
}


def write(family: str, folder: Path) -> Path:
    """Two layers of random weights and norms."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, num_experts_per_tok=2,
        **FAMILIES[family],
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        offset, scale = (1.0, 0.2) if "norm" in name else (0.0, 0.15)
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("recipe", ["rtn-w4g32", "gptq-w3g32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_gives_the_same_logits(family: str, recipe: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.randint(0, 96, (17, TOKENS), generator=torch.Generator().manual_seed(1))
    source = write(family, tmp_path / "source")
    done = compress(source, tmp_path / "out", recipe=recipe, calibration=ids[1:].tolist())
    assert done.notes == ()
    experts = [record for record in done.records if ".experts." in record.name]
    assert len(experts) == 2 * 4 * 3
    ours = hf.load(tmp_path / "out", torch.float32).forward(ids[0], ForwardBatch((TOKENS,), TOKENS))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.inference_mode():
        theirs = model(ids[:1]).logits[0]
    assert theirs.std() > 0.5
    assert (ours - theirs).abs().max() <= EXACT * (theirs.max() - theirs.min())
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("recipe", ["rtn-w8a8", "rtn-fp8", "rtn-w4g32-asym"])
def test_what_transformers_cannot_read_is_said(recipe: str, tmp_path: Path) -> None:
    (note,) = compress(write("Qwen3Moe", tmp_path / "source"), tmp_path / "out", recipe=recipe).notes
    assert "fuses the experts" in note
    assert note in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("recipe", ["guided-w4g32", "qronos-w4g32"])
def test_what_compares_tokens_across_models_is_refused(recipe: str, tmp_path: Path) -> None:
    source = write("Mixtral", tmp_path / "source")
    with user_error("architecture_unsupported"):
        compress(source, tmp_path / "out", recipe=recipe, calibration=[[1, 2, 3]])
    assert not (tmp_path / "out").exists()
