"""Early exits against a plain oracle, and ways in which one does not fit its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attar.checkpoints.drafts import early_exit
from attar.checkpoints.drafts.files import kind_of
from attar.kernels import dispatch
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from tests.errors import user_error

HIDDEN, VOCAB, LAYERS = 64, 97, 3
TOKENS = torch.tensor([2, 3, 17, 40, 90])
CLOSE = 3e-5  # of logits around 3, float32


def numbers(name: str, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return torch.randn(shape, generator=generator) / shape[-1] ** 0.5


def tensors(mapped: bool = True) -> dict[str, Tensor]:
    found = {"norm.weight": 1 + numbers("norm", HIDDEN), "linear.weight": numbers("linear", HIDDEN, HIDDEN)}
    if mapped:
        found |= {"lm_head.weight": numbers("head", len(TOKENS), HIDDEN) * 3, "d2t": TOKENS - torch.arange(len(TOKENS))}
    return found


def config(**changed: Any) -> dict[str, Any]:
    return {
        "architectures": ["AttarEarlyExit"], "exit_layer": 2, "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS, "draft_vocab_size": len(TOKENS), **changed,
    }  # fmt: skip


def write(folder: Path, settings: dict[str, Any], parts: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(parts, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def oracle(parts: dict[str, Tensor], states: Tensor, head: Tensor) -> Tensor:
    """Logits for hidden states that enter the layer of the exit."""
    normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6) * parts["norm.weight"]
    return normed @ parts["linear.weight"].T @ head.T


@pytest.mark.parametrize("mapped", [True, False])
def test_logits_are_those_of_the_oracle(target: Decoder, tmp_path: Path, mapped: bool) -> None:
    parts, settings = tensors(mapped), config() if mapped else config(draft_vocab_size=VOCAB)
    folder = write(tmp_path / "exit", settings, parts)
    assert kind_of(folder) == "exit"
    made = early_exit.read(folder, target, None if target.store is None else dispatch.store("exact"))
    assert all(mine is theirs for mine, theirs in zip(made.blocks, target.blocks, strict=False))
    assert made.config.layers == len(made.blocks) == 2
    ids = torch.tensor([5, 9, 9, 30, 2, 7, 8])
    step = ForwardBatch((7,), 64, keep=(2,))
    target.states(ids, step)
    table = target.embedding.forward(torch.arange(VOCAB), torch.zeros(VOCAB, dtype=torch.int64))
    wanted = oracle(parts, step.kept.of(2), parts.get("lm_head.weight", table))
    assert (made.forward(ids, ForwardBatch((7,), 64)) - wanted).abs().max() < CLOSE * (1 if mapped else 10)


FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Tensor], tuple[str, ...]]] = {
    "another vocabulary": ("checkpoint_mismatch", {"vocab_size": 90}, {}, ("90", "97")),
    "another hidden size": ("checkpoint_mismatch", {"hidden_size": 128}, {}, ("128", "64")),
    "a model of other layers": ("checkpoint_mismatch", {"num_hidden_layers": 5}, {}, ("5", "3")),
    "an exit behind the last layer": ("checkpoint_mismatch", {"exit_layer": 3}, {}, ("after 3",)),
    "no exit": ("config_invalid", {"exit_layer": None}, {}, ("exit_layer",)),
    "d2t out of range": ("checkpoint_mismatch", {}, {"d2t": torch.tensor([2, 2, 15, 37, 93])}, ("97", "96")),
    "d2t of another length": ("checkpoint_mismatch", {"draft_vocab_size": 6}, {}, ("d2t", "[5]", "[6]")),
    "another shape": ("checkpoint_mismatch", {}, {"linear.weight": torch.ones(64, 63)}, ("[64, 63]",)),
    "a tensor left over": ("checkpoint_mismatch", {}, {"norm.bias": torch.ones(64)}, ("norm.bias",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_an_exit_that_does_not_fit_is_refused(tiny_decoder: Callable[..., Decoder], tmp_path: Path, fault: str) -> None:
    code, changed, parts, words = FAULTS[fault]
    folder = write(tmp_path / "exit", config(**changed), tensors() | parts)
    with user_error(code, *words):
        early_exit.read(folder, tiny_decoder())


def test_a_truncated_file_is_refused(tiny_decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    folder = write(tmp_path / "exit", config(), tensors())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with user_error("checkpoint_incomplete"):
        early_exit.read(folder, tiny_decoder())
