"""The walk's gradients against plain autograd through the whole model, as transformers computes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.calibration import gradients
from attar.model.layers import Block
from tests.conftest import token_ids
from tests.errors import user_error

RELATIVE = 1e-4  # of the norm of a weight's gradient: float32, two implementations, three blocks
SEQUENCES, LENGTH = 5, 32


def products(tiny: Path, folder: Path, labels: str, seed: int = 0) -> tuple[dict[str, Tensor], float]:
    """The gradient of every weight, summed from what watchers see, and the mean loss."""
    found: dict[str, Tensor] = {}
    order: list[tuple[str, int]] = []

    def watch(layer: int, block: Block) -> gradients.Watchers:
        order.append(("watch", layer))

        def summing(name: str) -> Callable[[Tensor, Tensor], None]:
            def see(x: Tensor, g: Tensor) -> None:
                found[name] = found.get(name, torch.zeros(())) + g.T @ x

            return see

        return {linear.name: summing(linear.name) for linear in block.linears()}

    source = Checkpoint.open(tiny)  # in bfloat16, as it is stored
    ids = torch.tensor(token_ids(SEQUENCES, LENGTH))
    with torch.inference_mode():  # as the walk over the blocks does
        loss = gradients.walk(
            source,
            ids,
            folder,
            watch,
            lambda layer: order.append(("done", layer)),
            seed=None if labels == "text" else seed,
        )
    assert order == [(what, layer) for layer in (2, 1, 0) for what in ("watch", "done")]
    assert not list(folder.iterdir())
    return found, loss


@pytest.mark.parametrize("labels", ["text", "sampled"])
def test_every_linear_sees_the_gradient_of_autograd(
    tiny: Path, tmp_path: Path, labels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "attar.compression.calibration.hidden_states.ROWS_AT_ONCE", 2 * LENGTH
    )  # three calls a block, the last smaller
    monkeypatch.setattr(gradients, "LOGITS_AT_ONCE", 256 * 24)  # runs that end within a sequence
    ours, loss = products(tiny, tmp_path, labels)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    ids = torch.tensor(token_ids(SEQUENCES, LENGTH))
    logits = model(ids).logits.float()
    if labels == "sampled":
        noise = torch.stack([torch.from_numpy(gradients.uniforms(0, s, LENGTH)) for s in range(SEQUENCES)])
        at_least = logits.double().softmax(-1).cumsum(-1) > noise[..., None]
        wanted = at_least.int().argmax(-1).flatten()
    else:
        wanted, logits = ids[:, 1:].flatten(), logits[:, :-1]
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum")
    total.backward()
    assert loss == pytest.approx(float(total.detach()) / len(wanted), rel=1e-5)
    theirs = {name: p.grad for name, p in model.named_parameters() if "proj" in name}
    assert {f"{name}.weight" for name in ours} == theirs.keys()
    for name, gradient in ours.items():
        expected = theirs[f"{name}.weight"]
        assert (gradient - expected).norm() <= RELATIVE * expected.norm(), name


def test_the_same_walk_gives_the_same_bits_and_another_seed_other_labels(tiny: Path, tmp_path: Path) -> None:
    first, loss = products(tiny, tmp_path, "sampled")
    again, same = products(tiny, tmp_path, "sampled")
    assert loss == same
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert products(tiny, tmp_path, "sampled", seed=1)[1] != loss


def test_labels_are_drawn_as_often_as_the_model_says() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]])
    noise = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = torch.bincount(gradients.draw(logits.expand(1000, 4), noise), minlength=4)
    assert (counts / 1000 - logits[0].softmax(-1)).abs().max() <= 1 / 1000
    assert counts[2] == 0


def test_labels_are_not_the_text_that_the_same_seed_samples() -> None:
    assert not set(gradients.uniforms(0, 0, 512, counter=0)) & set(gradients.uniforms(0, 0, 512))


def test_a_gradient_that_is_not_finite_names_the_place(tiny: Path, tmp_path: Path) -> None:
    def watch(layer: int, block: Block) -> gradients.Watchers:
        block.attention_norm.weight = torch.full_like(block.attention_norm.weight, torch.inf)
        return {}

    with user_error("not_finite"):
        gradients.walk(Checkpoint.open(tiny), torch.tensor(token_ids(1, 8)), tmp_path, watch)


def test_one_token_has_no_next_one(tiny: Path, tmp_path: Path) -> None:
    with user_error("calibration_too_short"):
        gradients.walk(Checkpoint.open(tiny), torch.tensor([[1]]), tmp_path, lambda layer, block: {}, seed=None)
