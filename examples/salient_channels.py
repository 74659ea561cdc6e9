"""Two observations behind AWQ and SmoothQuant, on the embedded model: what one outlier costs, and which channels count.

The second is the experiment of AWQ's paper: weights are rounded to 3 bits, but one input channel of a hundred stays in
16, chosen by its mean activation, by its weights, or at random. The embedded model has few outliers.
"""

from collections.abc import Callable

import torch
from safetensors.torch import load_file
from torch import Tensor

import attar
from attar import SamplingParams
from attar.checkpoints.sources import hub
from attar.formats import affine
from attar.formats.scheme import Scheme
from attar.kernels.operands import Linear
from attar.model.cache import ForwardBatch


def rounded(weight: Tensor, scheme: str) -> Tensor:
    return affine.quantize(weight, Scheme.parse(scheme)).dequantize()


print("8 bits beside an outlier:  " + "   ".join(
    f"{value:g} -> {rounded(torch.tensor([[70.0, value]]), 'w8')[0, 1]:.3f}" for value in (0.27, 0.28, 1.0, 2.0)
))  # fmt: skip

CHOICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda x, weight: torch.full((x.shape[1],), -1.0),
    "at random": lambda x, weight: torch.rand(x.shape[1], generator=torch.Generator().manual_seed(0)),
    "by weight": lambda x, weight: weight.norm(dim=0),
    "by activation": lambda x, weight: x.abs().mean(0),
}
weights = load_file(hub.resolve("demo") / "model.safetensors")
lost, whole = dict.fromkeys(CHOICES, 0.0), 0.0


def measure(linear: Linear, x: Tensor) -> None:
    global whole
    weight, rows = weights[f"{linear.name}.weight"].float(), x.float()
    whole += (rows @ weight.T).square().sum().item()
    for name, scores in CHOICES.items():
        kept = scores(rows, weight).topk(max(1, x.shape[1] // 100)).indices if name != "none" else []
        error = weight - rounded(weight, "w3g128")
        error[:, kept] = 0
        lost[name] += (rows @ error.T).square().sum().item()


llm = attar.LLM("demo")
ids = torch.tensor(llm.generate("The", SamplingParams(max_tokens=256, seed=0, ignore_eos=True))[0].token_ids)
step = ForwardBatch((len(ids),), len(ids), llm.decoder.cache(len(ids)))
with torch.inference_mode():
    hidden, _ = llm.decoder.enter(ids, step)
    for number, block in enumerate(llm.decoder.blocks):
        step.enter(number, hidden, None)
        hidden = block.run(hidden, step, measure)
for name in CHOICES:
    print(f"3 bits, channels kept {name:<14} error {lost[name] / whole:.4f}")
