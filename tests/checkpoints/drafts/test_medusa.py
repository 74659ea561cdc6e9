"""Medusa heads in both layouts against a plain-torch oracle, and every way in which one does not fit its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attar.checkpoints.drafts import medusa
from attar.checkpoints.drafts.files import kind_of
from attar.kernels import dispatch
from attar.model.decoder import Decoder
from tests.errors import user_error

HIDDEN, VOCAB, HEADS = 64, 97, 3
CLOSE = 2e-5  # of logits around 10, float32


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def published(layers: int = 1) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """FasterDecoding's layout."""
    tensors: dict[str, Tensor] = {}
    for k in range(HEADS):
        for i in range(layers):
            tensors[f"{k}.{i}.linear.weight"] = numbers(HIDDEN, HIDDEN, seed=10 * k + i)
            tensors[f"{k}.{i}.linear.bias"] = numbers(HIDDEN, seed=10 * k + i + 5)
        tensors[f"{k}.{layers}.weight"] = numbers(VOCAB, HIDDEN, seed=10 * k + 9)
    return {"medusa_num_heads": HEADS, "medusa_num_layers": layers, "base_model_name_or_path": "x"}, tensors


def served(shared: bool = False, tokens: Tensor | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """vLLM's layout."""
    rows = VOCAB if tokens is None else len(tokens)
    tensors = {f"blocks.{k}.layers.0.weight": numbers(HIDDEN, HIDDEN, seed=10 * k) for k in range(HEADS)}
    tensors |= {f"lm_heads.{k}.weight": numbers(rows, HIDDEN, seed=10 * k + 9) for k in range(1 if shared else HEADS)}
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "num_heads": HEADS, "num_hidden_layers": 1, "original_lm_head": shared, "truncated_vocab_size": rows,
    }  # fmt: skip
    return config, tensors if tokens is None else {**tensors, "token_map": tokens}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def oracle(x: Tensor, blocks: list[tuple[Tensor, Tensor | None]], head: Tensor) -> Tensor:
    for weight, bias in blocks:
        x = x + torch.nn.functional.silu(x @ weight.T + (0 if bias is None else bias))
    return x @ head.T


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine - theirs).abs().max() < CLOSE


def read(folder: Path, target: Decoder) -> Any:
    return medusa.read(folder, target, None if target.store is None else dispatch.store("exact"))


@pytest.mark.parametrize("layers", [1, 2])
def test_logits_of_the_published_layout(target: Decoder, tmp_path: Path, layers: int) -> None:
    config, tensors = published(layers)
    folder, x = write(tmp_path / "head", config, tensors), numbers(4, HIDDEN, seed=99) * 8
    wanted = [
        oracle(
            x, [(tensors[f"{k}.{i}.linear.weight"], tensors[f"{k}.{i}.linear.bias"]) for i in range(layers)],
            tensors[f"{k}.{layers}.weight"],
        )
        for k in range(HEADS)
    ]  # fmt: skip
    close(read(folder, target).logits(x, HEADS), wanted)
    assert kind_of(folder) == "medusa"


def test_logits_of_vllms_layout_with_a_draft_vocabulary(target: Decoder, tmp_path: Path) -> None:
    tokens = torch.tensor([90, 3, 17, 5])
    config, tensors = served(tokens=tokens)
    x = numbers(2, HIDDEN, seed=99) * 8
    found = read(write(tmp_path / "head", config, tensors), target).logits(x, 2)
    for k, logits in enumerate(found):
        wanted = oracle(x, [(tensors[f"blocks.{k}.layers.0.weight"], None)], tensors[f"lm_heads.{k}.weight"])
        close([logits[:, tokens]], [wanted])
        assert torch.isinf(logits).sum() == 2 * (VOCAB - 4)
    tensors |= {f"lm_heads.{k}.weight": numbers(VOCAB, HIDDEN, seed=k) for k in range(HEADS)}
    whole = read(write(tmp_path / "whole", config, tensors), target).logits(x, 1)[0]
    wanted = oracle(x, [(tensors["blocks.0.layers.0.weight"], None)], tensors["lm_heads.0.weight"][tokens])
    close([whole[:, tokens]], [wanted])


def test_a_shared_lm_head_is_the_models_own(target: Decoder, tmp_path: Path) -> None:
    config, tensors = served(shared=True)
    heads = read(write(tmp_path / "head", config, tensors), target)
    assert all(head is target.head for head in heads.heads)
    x = numbers(2, HIDDEN, seed=99) * 8
    one, two = heads.logits(x, 2), [heads.logits(x, d)[d - 1] for d in (1, 2)]
    close(one, two)


def test_what_is_written_is_read(target: Decoder, tmp_path: Path) -> None:
    tokens = torch.tensor([90, 3, 17, 5])
    _, tensors = served(shared=True, tokens=tokens)
    del tensors["token_map"]
    tensors |= {f"blocks.{k}.layers.0.bias": numbers(HIDDEN, seed=k) for k in range(HEADS)}
    medusa.write(tmp_path, target.config, 1, tensors, tokens)
    x = numbers(1, HIDDEN, seed=99) * 8
    found = read(tmp_path, target).logits(x, HEADS)
    wanted = [
        oracle(
            x, [(tensors[f"blocks.{k}.layers.0.weight"], tensors[f"blocks.{k}.layers.0.bias"])],
            tensors["lm_heads.0.weight"],
        )
        for k in range(HEADS)
    ]  # fmt: skip
    close([each[:, tokens] for each in found], wanted)


FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "another hidden size": ("checkpoint_mismatch", {"hidden_size": 32}, {}, ("32", "64")),
    "a smaller vocabulary": ("checkpoint_mismatch", {"vocab_size": 90}, {}, ("90", "97")),
    "no number of heads": ("config_invalid", {"num_heads": None}, {}, ("num_heads",)),
    "a head that is missing": ("checkpoint_incomplete", {"num_heads": 4}, {}, ("blocks.3.layers.0.weight",)),
    "a head too many": ("checkpoint_mismatch", {"num_heads": 2}, {}, ("blocks.2.layers.0.weight",)),
    "another shape": ("checkpoint_mismatch", {}, {"blocks.1.layers.0.weight": torch.zeros(64, 63)}, ("[64, 63]",)),
    "integers": (
        "checkpoint_mismatch", {}, {"blocks.1.layers.0.weight": torch.zeros(64, 64, dtype=torch.int32)}, ("int32",),
    ),
    "a token out of range": (
        "checkpoint_mismatch", {"truncated_vocab_size": 2}, {"token_map": torch.tensor([1, 97])}, ("token 97", "96"),
    ),
    "a token twice": (
        "checkpoint_mismatch", {"truncated_vocab_size": 2}, {"token_map": torch.tensor([1, 1])}, ("twice",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_head_that_does_not_fit_is_refused(tiny_decoder: Callable[..., Decoder], tmp_path: Path, fault: str) -> None:
    code, changed, tensors, words = FAULTS[fault]
    config, good = served()
    folder = write(tmp_path / "head", config | changed, good | tensors)
    with user_error(code, *words):
        medusa.read(folder, tiny_decoder())


def test_pickles_are_refused(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    folder = write(tmp_path / "head", *published())
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")
    with user_error("file_unsafe", "medusa_lm_head.pt"):
        medusa.read(folder, tiny_decoder())
