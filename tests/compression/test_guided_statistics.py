"""What the loss-aware walk hands its solvers, against the same computed by transformers.

For the two linears of a block that add to the residual stream, where everything comes together: the Hessian of what
they read behind compressed layers, how the loss couples their outputs, how far their inputs and the stream have
drifted, and the target that follows. The oracle runs the model as it was and as it was written; what `o` and `down`
read depends only on what was rounded before them, so that the finished output shows what the walk saw on its way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from attar.checkpoints.sources import hf
from attar.compression.calibration import gradients
from attar.compression.recipe.recipe_file import recipe_from_dict
from attar.compression.runs.pipeline import compress
from attar.compression.solvers.rounding import gptq, qronos, two_sided
from attar.formats.packed import PackedTensor

Ids = list[list[int]]

LAYER, LINEARS = 1, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADDING = {"o_proj": "self_attn.o_proj", "down_proj": "mlp.down_proj"}
DAMPING, RESIDUAL = 0.01, 0.5

HESSIAN = 1e-5  # of the norm of a matrix, as all here: float32, two implementations
COUPLING = 1e-5  # gradients through a whole model
DRIFT = 1e-5  # of differences, which are smaller than what they are taken of
TARGET = 2e-4  # what is left of the drift's error behind a factor of H


@dataclass
class Call:
    """What the solvers were given for one linear."""

    weight: Tensor  # as it was
    drift: qronos.Drift
    share: float
    target: Tensor
    inputs: Tensor  # E[x~ x~^T]
    outputs: Tensor  # E[|x|^2 g g^T]


@dataclass
class Seen:
    """Of one linear, over all tokens: its inputs [N, I], the residual stream that it adds to and the gradient of the
    loss at its output [N, O]."""

    x: Tensor
    stream: Tensor
    gradient: Tensor


@pytest.fixture(scope="module")
def walked(tiny: Path, calibration: Ids, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Call]]:
    """A guided output, and what was asked for the linears of `LAYER` on the way."""
    corrections: list[tuple[Tensor, qronos.Drift, float, Tensor]] = []
    solved: list[tuple[Tensor, gptq.Prepared, gptq.Prepared]] = []

    def correcting(weight: Tensor, drift: qronos.Drift, prepared: gptq.Prepared, share: float, rows: slice) -> Tensor:
        found = true_corrected(weight, drift, prepared, share, rows)
        corrections.append((weight.clone(), drift, share, found.clone()))
        return found

    def solving(weight: Tensor, inputs: gptq.Prepared, outputs: gptq.Prepared, *args: Any, **options: Any) -> Any:
        solved.append((weight.clone(), inputs, outputs))
        return true_solve(weight, inputs, outputs, *args, **options)

    true_corrected, true_solve = qronos.corrected, two_sided.solve
    out = tmp_path_factory.mktemp("guided") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qronos, "corrected", correcting)
        patch.setattr(two_sided, "solve", solving)
        recipe = recipe_from_dict({"recipe": "guided-w3g32", "damping": DAMPING, "residual": RESIDUAL})
        compress(tiny, out, recipe=recipe, calibration=calibration)
    assert len(corrections) == len(solved) == 3 * len(LINEARS), "every linear is corrected and coupled"
    calls = {}
    for at, name in enumerate(LINEARS, LAYER * len(LINEARS)):
        weight, drift, share, target = corrections[at]
        assert torch.equal(solved[at][0], target), "what is solved for is the corrected weight"
        calls[name] = Call(weight, drift, share, target, solved[at][1].hessian, solved[at][2].hessian)
    return out, calls


@pytest.fixture(scope="module")
def original(tiny: Path, calibration: Ids) -> dict[str, Seen]:
    return seen(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), calibration)


@pytest.fixture(scope="module")
def behind(tiny: Path, calibration: Ids, walked: tuple[Path, dict[str, Call]]) -> dict[str, Seen]:
    """The same of the model as it was written."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    checkpoint = hf.Checkpoint.open(walked[0])
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in LINEARS:
            weight = checkpoint.linear(name).weight
            assert isinstance(weight, PackedTensor)
            module.weight.data = weight.dequantize()
    return seen(model, calibration)


def seen(model: Any, ids: Ids) -> dict[str, Seen]:
    layer, kept = model.model.layers[LAYER], dict[str, Tensor]()

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, keywords: Any = None) -> None:
            kept[name] = (inputs[0] if inputs else keywords["hidden_states"]).detach().flatten(0, 1)

        return hook

    outputs: dict[str, Tensor] = {}

    def output(name: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, found: Tensor) -> None:
            found.retain_grad()
            outputs[name] = found

        return hook

    layer.register_forward_pre_hook(keep("stream of o_proj"), with_kwargs=True)
    layer.post_attention_layernorm.register_forward_pre_hook(keep("stream of down_proj"))
    for name, path in ADDING.items():
        layer.get_submodule(path).register_forward_pre_hook(keep(name))
        layer.get_submodule(path).register_forward_hook(output(name))
    logits = model(torch.tensor(ids)).logits.float()
    length = len(ids[0])
    noise = torch.stack([torch.from_numpy(gradients.uniforms(0, s, length)) for s in range(len(ids))])
    labels = (logits.double().softmax(-1).cumsum(-1) > noise[..., None]).int().argmax(-1)  # drawn from the model
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    found = {}
    for name in ADDING:
        gradient = outputs[name].grad
        assert gradient is not None
        found[name] = Seen(*(each.double() for each in (kept[name], kept[f"stream of {name}"], gradient.flatten(0, 1))))
    return found


def assert_near(found: Tensor | None, expected: Tensor, tolerance: float) -> None:
    assert found is not None
    assert float((found.double() - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("name", ADDING)
def test_inputs_are_those_behind_compressed_layers(
    name: str, walked: tuple[Path, dict[str, Call]], original: dict[str, Seen], behind: dict[str, Seen]
) -> None:
    x, true = behind[name].x, original[name].x
    assert_near(walked[1][name].inputs, x.T @ x / len(x), HESSIAN)
    assert float((x - true).norm()) > 0.05 * float(true.norm()), "there is something to tell apart"


@pytest.mark.parametrize("name", ADDING)
def test_outputs_are_coupled_by_the_loss_of_sampled_labels(
    name: str, walked: tuple[Path, dict[str, Call]], original: dict[str, Seen]
) -> None:
    """E[|x|^2 g g^T]: each token's gradient counts by the size of what the original linear reads."""
    g, counts = original[name].gradient, original[name].x.square().sum(1)
    assert_near(walked[1][name].outputs, (g * counts[:, None]).T @ g / counts.sum(), COUPLING)


@pytest.mark.parametrize("name", ADDING)
def test_drifts_are_what_the_original_has_more(
    name: str, walked: tuple[Path, dict[str, Call]], original: dict[str, Seen], behind: dict[str, Seen]
) -> None:
    """E[(x - x~) x~^T] of the inputs, and E[(r - r~) x~^T] of the stream that the outputs are added to."""
    call, x = walked[1][name], behind[name].x
    assert_near(call.drift.mean, (original[name].x - x).T @ x / len(x), DRIFT)
    assert_near(call.drift.residual, (original[name].stream - behind[name].stream).T @ x / len(x), DRIFT)
    assert call.share == RESIDUAL


@pytest.mark.parametrize("name", ADDING)
def test_targets_make_up_for_both(
    name: str, walked: tuple[Path, dict[str, Call]], original: dict[str, Seen], behind: dict[str, Seen]
) -> None:
    """W + (W D + share R) (H + l)^-1, as one solve in float64 on the oracle's rows."""
    call, x, weight = walked[1][name], behind[name].x, walked[1][name].weight.double()
    wanted = (original[name].x - x) @ weight.T + RESIDUAL * (original[name].stream - behind[name].stream)
    hessian = x.T @ x / len(x)
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    expected = torch.linalg.solve(hessian, x.T @ wanted / len(x)).T
    assert_near(call.target.double() - weight, expected, TARGET)


@pytest.mark.parametrize("name", sorted(set(LINEARS) - set(ADDING)))
def test_others_take_nothing_on(name: str, walked: tuple[Path, dict[str, Call]]) -> None:
    """Their outputs are not added to the stream."""
    assert walked[1][name].drift.residual is None
