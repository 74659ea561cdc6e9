"""Models in several processes against themselves in one: every family, schemes that round what is cut, both ways to
share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attar.checkpoints.adapters import lora
from attar.checkpoints.sources import opening
from attar.model import parallel
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from tests.engine.test_adapters import save
from tests.model.random_model import HEADS, LLAMA, SIZES, together, write

SUMMED = 1e-5  # max |difference| / max |logit|, float32: the order of a sum, through the layers behind it
MOVES = 0.01  # of the largest logit: what an adapter must change, for the rest to mean anything
ROUNDED = 0.03  # the same where rows are rounded to eight bits, by numbers that differ in their last bits or more
IDS = torch.randint(0, 120, (21,), generator=torch.Generator().manual_seed(1))

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True, "vocab_size": 101},
    "qwen2": {**LLAMA, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "attention_bias": True},
    "gemma2": {
        **LLAMA, "architectures": ["Gemma2ForCausalLM"], "head_dim": 32, "query_pre_attn_scalar": 50,
        "final_logit_softcapping": 4.0, "sliding_window": 8,
    },
    "phi3": {**LLAMA, "architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 64},
    "opt": {**SIZES, **HEADS, "architectures": ["OPTForCausalLM"], "ffn_dim": 128},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "vocab_size": 120, "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": 64,
    },
    "qwen2-moe": {
        **LLAMA, "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    },
}  # fmt: skip


@torch.inference_mode()
def logits(decoder: Decoder) -> Tensor:
    """A prompt, then a step by the cache; and the prompt without one."""
    ids, cache = IDS % decoder.config.vocab_size, decoder.cache(32)
    first = decoder.forward(ids[:-1], ForwardBatch((20,), 32, cache))
    then = decoder.forward(ids[-1:], ForwardBatch((1,), 32, cache))
    return torch.cat([first, then, decoder.forward(ids, ForwardBatch((21,), 32), torch.tensor([3, 20]))])


def difference(path: Path, tp: int, pp: int) -> float:
    """From one process's logits, as a share of the largest."""
    one, (several, *others) = logits(opening.load(path, torch.float32)), together(path, tp, pp, logits)
    assert all(len(each) == 0 for each in others), "one process tells the logits"
    return float((one - several).abs().max() / one.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_compute_each_layer_of(family: str, tmp_path: Path) -> None:
    assert difference(write(tmp_path / "model", FAMILIES[family]), 2, 1) < SUMMED


@pytest.mark.parametrize("family", ["llama-tied", "opt"])
def test_stages_give_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    assert difference(write(tmp_path / "model", FAMILIES[family]), 1, 2) == 0


def test_stages_of_two_processes_each(tmp_path: Path) -> None:
    assert difference(write(tmp_path / "model", LLAMA), 2, 2) < SUMMED


def test_fewer_key_value_heads_than_processes(tmp_path: Path) -> None:
    assert difference(write(tmp_path / "model", LLAMA), 4, 1) < SUMMED


@pytest.mark.parametrize(
    "scheme, allowed",
    [("w4g32", SUMMED), ("w4g32-asym", SUMMED), ("mxfp4-weight", SUMMED), ("w8a8-static", ROUNDED), ("w8a8", ROUNDED)],
)
def test_quantized_weights_are_cut_between_groups(scheme: str, allowed: float, tmp_path: Path) -> None:
    found = difference(write(tmp_path / "model", LLAMA, scheme), 2, 1)
    assert found < allowed


@pytest.mark.parametrize(
    "family, scheme, tp, pp",
    [
        *((family, None, 2, 1) for family in ("llama", "llama-tied", "phi3", "opt", "gpt2", "qwen2-moe")),
        ("llama", "w4g32", 2, 1),
        ("llama", None, 4, 1),  # a key-value head in two processes
        ("llama-tied", None, 1, 2),
        ("llama", None, 2, 2),
    ],
)
def test_adapters_are_cut_as_their_linears(family: str, scheme: str | None, tp: int, pp: int, tmp_path: Path) -> None:
    """Of all linears, the router of experts and the output matrix among them; for some rows, then for all."""
    path, folder = write(tmp_path / "model", FAMILIES[family], scheme), tmp_path / "adapter"
    one = opening.load(path, torch.float32)
    save(folder, lora.shapes_of(one), 0)

    @torch.inference_mode()
    def adapted(decoder: Decoder) -> tuple[Tensor, Tensor, Tensor]:
        ids = IDS % decoder.config.vocab_size
        plain = decoder.forward(ids, ForwardBatch((12, 9), 32))
        lora.install(decoder, 2, folder)
        cache = decoder.cache(32, 2)
        some = [decoder.forward(ids[:19], ForwardBatch((11, 8), 32, cache, (2, 0)))]
        some.append(decoder.forward(ids[:2], ForwardBatch((1, 1), 32, cache, (2, 0))))
        lora.attach(decoder, folder)
        return plain, torch.cat(some), decoder.forward(ids, ForwardBatch((12, 9), 32))

    alone, (first, *_) = adapted(one), together(path, tp, pp, adapted)
    assert (alone[2] - alone[0]).abs().max() > MOVES * alone[0].abs().max()
    for ours, theirs in zip(first, alone, strict=True):
        assert (ours - theirs).abs().max() < SUMMED * theirs.abs().max()


@pytest.mark.parametrize("pieces", [3, 8])
def test_stages_work_on_pieces_of_a_step(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut anywhere: between sequences and within them, the second of which continues."""

    @torch.inference_mode()
    def several(decoder: Decoder) -> Tensor:
        cache = decoder.cache(32, 3)
        decoder.forward(IDS[:5], ForwardBatch((0, 5, 0), 32, cache))
        return decoder.forward(IDS, ForwardBatch((9, 4, 8), 32, cache))

    monkeypatch.setattr(parallel, "PIECE", len(IDS) // pieces)
    path = write(tmp_path / "model", LLAMA)
    one, (first, _) = several(opening.load(path, torch.float32)), together(path, 1, 2, several)
    assert float((one - first).abs().max() / one.abs().max()) < SUMMED


def test_every_block_of_the_first_stage_and_the_last_of_all_can_be_watched(tmp_path: Path) -> None:
    path = write(tmp_path / "model", LLAMA)

    @torch.inference_mode()
    def watched(decoder: Decoder) -> dict[int, Tensor]:
        seen: dict[int, Tensor] = {}
        decoder.forward(IDS, ForwardBatch((21,), 32), None, seen.__setitem__)
        return seen

    one, (first, second) = watched(opening.load(path, torch.float32)), together(path, 1, 2, watched)
    assert list(first) == [0, 1, 2]
    assert list(second) == [2]
    assert all(torch.equal(first[i], one[i]) for i in first)
