"""Structured pruning: whole heads and whole columns of the feed-forward go, and a smaller dense model is left.

Removed together are (LLM-Pruner's dependency groups; Ma et al. 2023): a key-value head with its rows of k and v, the
rows of q of all query heads that share it, and their columns of o; a column of the feed-forward with its rows of gate
and up and its column of down. Residual width and depth stay. All layers end with the same sizes, since that is all a
config.json can say, so that transformers loads the result like any model (`Sizes`).

Removed are groups whose loss costs their last linear, o or down, the least on the calibration inputs, *after* the
others have made up for it. With H = E[x x^T] of its inputs, removing columns S of W costs, at best,

    tr(W_S [(H^-1)_SS]^-1 W_S^T)

(the optimal brain surgeon for groups; for feed-forwards ZipLM, Kurtic et al. 2023). The cheapest goes, W and H^-1 are
updated, and so on: one of two redundant columns stays. Finally the kept columns are solved for once more, W' = W H_:K
(H_KK)^-1, which is the repair by least squares. W itself is first corrected for what the blocks before have changed
(`qronos`). No gradients are needed.

Tried and left out, as held-out KL was 1.1 to 1.5 times as large (docs/log/2026-11.md): rows of W weighted by the Fisher
matrix of the linear's outputs, Taylor scores from gradients as LLM-Pruner has them, and activation-weighted norms, all
with the same repair. Not done: different sizes by layer, which no config.json can say; biases that take up a removed
column's mean (most models have none); experts of mixtures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attar.compression.solvers.pruning.zeros import damage
from attar.compression.solvers.rounding import gptq, qronos
from attar.compression.solvers.rounding.gptq import Hessian
from attar.compression.solvers.rounding.qronos import Drift
from attar.errors import UserError
from attar.formats.scheme import Part
from attar.model.config import ModelConfig

RESIZED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose config.json, read by transformers, may have fewer heads than hidden_size / head_dim."""

DIVIDED = ("LlamaForCausalLM",)
"""Architectures for which transformers wants a number of heads that divides the hidden size, although it reads
head_dim. Few numbers satisfy this for the published shapes: 32 heads become 16 or stay. Declaring such a model as
Mistral's, which computes the same, would remove the limit, but transformers would then use Mistral's tokenizer too."""

ROUNDS = 512  # number of rounds that removing all columns would take
STEP = 128  # the width stays divisible by this, or by as much of it as it was: for kernels and groups


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a pruned model along the pruned dimensions."""

    heads: int
    kv_heads: int
    intermediate: int


def sizes(config: ModelConfig, percent: int) -> Sizes:
    """Return the sizes at which a block's linears have `percent` fewer weights, as nearly as `STEP` allows. Heads are
    reduced by their share, rounded down to whole key-value heads, and in the families of `DIVIDED` to a number of query
    heads that divides the hidden size. The feed-forward gives the rest; `account` describes the result. Raises
    ValueError where the family is not supported or the feed-forward is too narrow."""
    if config.architecture not in RESIZED:
        raise UserError(
            "architecture_unsupported", f"structured pruning knows {', '.join(RESIZED)}, not {config.architecture}"
        )
    shared = config.heads // config.kv_heads
    gone = next(n for n in range(config.kv_heads * percent // 100, -1, -1) if _loads(config, config.heads - n * shared))
    of_head = 2 * (shared + 1) * config.head_dim * config.hidden
    of_column = (3 if config.gated else 2) * config.hidden
    wanted = (config.kv_heads * of_head + config.intermediate * of_column) * percent / 100 - gone * of_head
    step = STEP
    while config.intermediate % step:
        step //= 2
    left = config.intermediate - round(wanted / of_column / step) * step
    if left < step:
        raise UserError(
            "sparsity_invalid", f"structured-p{percent} would leave nothing of a feed-forward of {config.intermediate}"
        )
    return Sizes((config.kv_heads - gone) * shared, config.kv_heads - gone, left)


def _loads(config: ModelConfig, heads: int) -> bool:
    """Return whether transformers loads the model with so many query heads."""
    return heads == config.heads or config.architecture not in DIVIDED or config.hidden % heads == 0


def account(config: ModelConfig, percent: int, new: Sizes) -> str:
    """Describe what was removed, and whether transformers' rule kept more heads."""
    gone, share = config.kv_heads - new.kv_heads, config.kv_heads * percent // 100
    said = (
        f"structured-p{percent} left out {gone} of {config.kv_heads} key-value heads and "
        f"{config.intermediate - new.intermediate:,} of {config.intermediate:,} feed-forward columns of each layer."
    )
    if gone == share:
        return said
    return (
        f"{said} {share} of the heads would have been their share: transformers loads a {config.architecture} only "
        f"where the number of heads divides the hidden size, {config.hidden}, so columns went in their place."
    )


def declared(config: ModelConfig, new: Sizes, tensor: str, part: Part) -> Part:
    """Return the declaration of a tensor of the pruned model, given that of the original."""
    module = tensor.rpartition(".")[0]
    names, size = config.names, config.head_dim
    rows = {names.qkv[0]: new.heads * size} | dict.fromkeys(names.qkv[1:], new.kv_heads * size)
    rows |= dict.fromkeys(names.gate_up, new.intermediate)
    columns = {names.output: new.heads * size, names.down: new.intermediate}
    for name, count in rows.items():
        if module.endswith(f".{name}"):
            return replace(part, shape=(count, *part.shape[1:]))
    for name, count in columns.items():
        if module.endswith(f".{name}") and len(part.shape) == 2:
            return replace(part, shape=(part.shape[0], count))
    return part


@dataclass(frozen=True, eq=False)
class Shrunk:
    """Result of `shrink`: the kept runs of columns, ascending [K] int64, and the repaired weight [O, K * width]. The
    error is tr(E H E^T) / tr(W H W^T); `plain_error` is that of keeping the runs of largest norm, unrepaired."""

    runs: Tensor
    weight: Tensor
    error: float
    plain_error: float


def shrink(
    weight: Tensor, hessian: Hessian, width: int, keep: int, damping: float = 0.01, drift: Drift | None = None
) -> Shrunk:
    """Keep `keep` of the runs of `width` columns of a weight [O, I] of any float dtype, given the Hessian of its
    inputs. With the `drift` of the inputs the weight is corrected for it first. Where all inputs were zero, the runs of
    largest norm are kept unchanged. Raises ValueError as `gptq.prepare`."""
    prepared = gptq.prepare(hessian, damping, "natural")
    mean = prepared.hessian
    original = weight.to(mean.dtype) if drift is None else qronos.corrected(weight, drift, prepared)
    damped = mean.clone()
    damped.diagonal().add_(damping * mean.diagonal().mean())
    runs = _survivors(original, damped, width, keep)
    kept = columns_of(runs, width)
    repaired = torch.linalg.solve(damped[kept][:, kept], damped[kept] @ original.T).T
    energy = damage(original, mean)
    norms = original.square().sum(0).view(-1, width).sum(1)
    plain = columns_of(norms.argsort(descending=True, stable=True)[:keep].sort().values, width)
    stored = repaired.to(weight.dtype)
    errors = []
    for columns, left in ((kept, stored.to(original.dtype)), (plain, original[:, plain])):
        difference = original.clone()
        difference[:, columns] -= left
        errors.append(damage(difference, mean) / energy if energy else 0.0)
    return Shrunk(runs, stored.contiguous(), *errors)


def _survivors(weight: Tensor, hessian: Tensor, width: int, keep: int) -> Tensor:
    """Return the runs of columns, ascending [keep], that are left after removing the cheapest again and again. When
    there are very many, several of the cheapest are removed together."""
    work, inverse = weight.clone(), torch.linalg.inv(hessian)
    groups = len(hessian) // width
    assert 0 < keep <= groups
    alive, left = torch.ones(groups, dtype=torch.bool, device=weight.device), groups
    while left > keep:
        if width == 1:
            cost = work.square().sum(0) / inverse.diagonal()  # removed columns: 0 / 0
        else:
            # A copy of the blocks along the diagonal, [G, w, w].
            own = inverse.view(groups, width, groups, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone()
            own[~alive] = torch.eye(width, dtype=own.dtype, device=own.device)
            runs = work.view(len(work), groups, width).permute(1, 2, 0)  # [G, w, O]
            cost = (runs * torch.linalg.solve(own, runs)).sum((1, 2))
        count = min(max(1, groups // ROUNDS), left - keep)
        least = torch.where(alive, cost, torch.inf).topk(count, largest=False).indices
        gone = columns_of(least, width)
        pull = torch.linalg.solve(inverse[gone][:, gone], inverse[gone])  # [w, I]
        work -= work[:, gone] @ pull
        inverse -= inverse[:, gone] @ pull
        alive[least] = False
        left -= count
    return alive.nonzero()[:, 0]


def columns_of(groups: Tensor, width: int) -> Tensor:
    """Return the columns, int64 [K * width], of runs of `width`, given their indices [K]."""
    return (groups[:, None] * width + torch.arange(width, device=groups.device)).reshape(-1)
