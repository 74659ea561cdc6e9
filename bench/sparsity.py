"""What sparsity at run time costs a trained model, and which weights it need not read: TEAL, CATS, DejaVu, SpAtten.

    PYTHONPATH=src:bench python bench/sparsity.py MODEL [--windows 2] [--only NAME ...] [--json FILE]

The figure is KL(model || model with zeros) over windows of 512 tokens of prose and code, in float32. `saved` is the
share of the bytes of the blocks' linears that one row need not read: an upper bound of what a kernel gains, because
columns are skipped one by one, and predictors and thresholds cost nothing here. Batches skip only what all rows skip.

    teal        inputs of linears below a threshold are zero (Liu et al. 2025). The threshold of each linear is a
                quantile of its inputs on a calibration text.
    cats        neurons whose gate act(gate(x)) is below such a threshold are skipped, in up and down (Lee et al. 2024)
    dejavu      a predictor chooses the neurons of each row (Liu et al. 2023): here the best linear map from the input
                of the feed-forward to the sizes of its neurons, of some rank, by regression on the calibration text
    oracle      neurons are chosen by their own sizes: what no predictor surpasses by this criterion
    heads       of each layer the heads with the greatest outputs are kept (an oracle, as DejaVu's predictor imitates)
    spatten     cascade pruning (Wang et al. 2021): importance is summed over heads and layers, and a token or head
                that is pruned in one layer is gone from all later ones. The share that is kept falls from layer to
                layer to the one given. Tokens are those of a prompt of 384, read by the 128 behind it; the prompt
                itself is computed whole.

Legend: T rows, I hidden size, F neurons, H heads, D head size.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from reals import texts
from torch import Tensor
from torch.nn import functional

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hub, opening
from attar.kernels import ops
from attar.kernels.operands import Activation, AttentionForm, Linear
from attar.metrics.divergence import compare
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder
from attar.model.layers import Block, FeedForward

LENGTH, PROMPT = texts.LENGTH, 384
CALIBRATION = 8  # sequences
EACH = 16  # rows of the calibration text of which one gives thresholds
RIDGE = 1e-3  # of the mean of the diagonal


@dataclass
class Nothing:
    """The model as it is; other methods change one of its functions."""

    name: str = "nothing"
    first: int = 0  # row that is compared

    def saved(self, sizes: dict[str, float]) -> float:
        return 0.0

    def linear_input(self, each: Linear, kind: str, x: Tensor) -> None:
        pass

    def neurons(self, layer: int, gate: Tensor, wide: Tensor, x: Tensor) -> Tensor:
        return wide

    def attention(self, layer: int, weights: Tensor, values: Tensor) -> Tensor:
        """Mix values [H, S, D] by weights [H, T, S]: [H, T, D]."""
        return weights @ values


@dataclass
class Statistics(Nothing):
    """What methods are calibrated by: a sample of inputs and gates, and moments of neurons."""

    inputs: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    gates: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    moments: dict[int, list[Tensor]] = field(default_factory=dict)  # by layer: x^T x, x^T sizes

    def linear_input(self, each: Linear, kind: str, x: Tensor) -> None:
        self.inputs[each.name].append(x[::EACH].abs().flatten().clone())

    def neurons(self, layer: int, gate: Tensor, wide: Tensor, x: Tensor) -> Tensor:
        self.gates[layer].append(gate[::EACH].abs().flatten().clone())
        both = functional.pad(x, (0, 1), value=1.0).double()
        new = both.T @ both, both.T @ wide.abs().double()
        old = self.moments.get(layer)
        self.moments[layer] = [*new] if old is None else [a + b for a, b in zip(old, new, strict=True)]
        return wide


@dataclass
class Teal(Nothing):
    share: float = 0.0
    kinds: tuple[str, ...] = ("qkv", "o", "up", "down")
    thresholds: dict[str, float] = field(default_factory=dict)

    def saved(self, sizes: dict[str, float]) -> float:
        return self.share * sum(sizes[kind] for kind in self.kinds)

    def linear_input(self, each: Linear, kind: str, x: Tensor) -> None:
        if kind in self.kinds:
            x.masked_fill_(x.abs() < self.thresholds[each.name], 0.0)


@dataclass
class Cats(Nothing):
    share: float = 0.0
    thresholds: dict[int, float] = field(default_factory=dict)

    def saved(self, sizes: dict[str, float]) -> float:
        return self.share * (sizes["up"] / 2 + sizes["down"])

    def neurons(self, layer: int, gate: Tensor, wide: Tensor, x: Tensor) -> Tensor:
        return wide.masked_fill(gate.abs() < self.thresholds[layer], 0.0)


@dataclass
class Chosen(Nothing):
    """Of each row so many neurons, by a linear map of its input; without one, by their own sizes."""

    keep: float = 1.0
    maps: dict[int, Tensor] | None = None

    def saved(self, sizes: dict[str, float]) -> float:
        return (1 - self.keep) * (sizes["up"] + sizes["down"])

    def neurons(self, layer: int, gate: Tensor, wide: Tensor, x: Tensor) -> Tensor:
        sizes = wide.abs() if self.maps is None else functional.pad(x, (0, 1), value=1.0) @ self.maps[layer]
        kept = sizes.topk(round(self.keep * sizes.shape[1]), 1).indices
        return torch.zeros_like(wide).scatter_(1, kept, wide.gather(1, kept))


@dataclass
class Heads(Nothing):
    """Of each row and layer the heads of the greatest outputs."""

    keep: float = 1.0

    def saved(self, sizes: dict[str, float]) -> float:
        return (1 - self.keep) * sizes["o"]  # and of the queries; keys and values serve other heads too

    def attention(self, layer: int, weights: Tensor, values: Tensor) -> Tensor:
        mixed = weights @ values
        sizes = mixed.norm(dim=-1)  # [H, T]
        kept = sizes.topk(round(self.keep * len(sizes)), 0).indices
        return mixed * torch.zeros_like(sizes).scatter_(0, kept, 1.0)[..., None]


@dataclass
class Cascade(Nothing):
    """SpAtten's pruning of tokens, or of heads, down to a share in the last of so many layers."""

    first: int = PROMPT
    keep: float = 1.0
    layers: int = 1
    of_heads: bool = False
    importance: Tensor | None = None
    alive: Tensor | None = None

    def attention(self, layer: int, weights: Tensor, values: Tensor) -> Tensor:
        if not layer:
            self.importance = self.alive = None
        count = len(weights) if self.of_heads else PROMPT
        alive = torch.ones(count, dtype=torch.bool) if self.alive is None else self.alive
        if not self.of_heads:
            weights = weights.clone()
            weights[:, PROMPT:, :PROMPT] *= alive
            weights[:, PROMPT:] /= weights[:, PROMPT:].sum(-1, keepdim=True)
        mixed = weights @ values
        if self.of_heads:
            mixed[:, PROMPT:] *= alive[:, None, None]
            new = mixed[:, :PROMPT].abs().sum((1, 2))
        else:
            new = weights[:, :PROMPT, :PROMPT].sum((0, 1))
        self.importance = new if self.importance is None else self.importance + new
        share = 1 - (1 - self.keep) * (layer + 1) / max(1, self.layers - 1)
        kept = self.importance.masked_fill(~alive, -1).topk(max(1, round(max(share, self.keep) * count))).indices
        self.alive = torch.zeros_like(alive).index_fill_(0, kept, True)
        return mixed


def linears(block: Block) -> Iterator[tuple[str, Linear]]:
    """Every linear of a block, with its kind."""
    assert isinstance(block.feed_forward, FeedForward)
    for kind, some in (
        ("qkv", block.attention.qkv), ("o", (block.attention.output,)), ("up", block.feed_forward.up),
        ("down", (block.feed_forward.down,)),
    ):  # fmt: skip
        for each in some:
            yield kind, each


@contextmanager
def patched(decoder: Decoder, method: Nothing) -> Iterator[Callable[[Linear, Tensor], None]]:
    """Have attention without a cache and activations go through a method; yield the hook of linears' inputs."""
    plain = ops.attention, ops.activate
    kinds, layers = dict[str, str](), dict[str, int]()
    at_layer, entered = 0, torch.empty(0)
    for layer, block in enumerate(decoder.blocks):
        for kind, each in linears(block):
            kinds[each.name], layers[each.name] = kind, layer

    def attention(
        q: Tensor,
        keys: Sequence[Tensor] | Tensor,
        values: Sequence[Tensor] | Tensor,
        query_positions: Sequence[Tensor],
        key_positions: Sequence[Tensor],
        form: AttentionForm,
        spans: Tensor | None = None,
    ) -> Tensor:
        assert spans is None, "no image is measured"
        k, v = (x[0].transpose(0, 1).repeat_interleave(form.heads // form.kv_heads, 0) for x in (keys, values))
        scores = q.transpose(0, 1) @ k.mT * form.scale
        scores.masked_fill_(query_positions[0][:, None] < key_positions[0], -torch.inf)
        return method.attention(at_layer, scores.softmax(-1), v).transpose(0, 1).flatten(1)

    def activate(x: Tensor, kind: Activation, gated: bool, reader: Linear) -> Tensor:
        a, b = x.chunk(2, -1)
        gate = functional.silu(a) if kind == "silu" else functional.gelu(a, approximate="tanh")
        return method.neurons(layers[reader.name], gate, gate * b, entered)

    def hook(each: Linear, x: Tensor) -> None:
        nonlocal at_layer, entered
        at_layer = layers[each.name]
        if kinds[each.name] == "up":
            entered = x
        method.linear_input(each, kinds[each.name], x)

    ops.attention, ops.activate = attention, activate
    try:
        yield hook
    finally:
        ops.attention, ops.activate = plain


@torch.inference_mode()
def states(decoder: Decoder, ids: Tensor, method: Nothing) -> Tensor:
    """Hidden states [T, I] behind the last block."""
    step = ForwardBatch((len(ids),), len(ids))
    stream, delta = decoder.embedding.forward(ids, step.positions), None
    with patched(decoder, method) as hook:
        for block in decoder.blocks:
            stream, delta = block.forward(stream, delta, step, hook)
    return stream if delta is None else stream + delta


def reduced(moments: Sequence[Tensor], rank: int | None) -> Tensor:
    """The best linear map [I + 1, F] of a rank, by the moments of inputs and targets."""
    own, cross = moments
    own = own + RIDGE * own.diagonal().mean() * torch.eye(len(own), dtype=own.dtype)
    whole: Tensor = torch.linalg.solve(own, cross)
    if rank is None:
        return whole.float()
    values, axes = torch.linalg.eigh(_outer(own, whole))
    top: Tensor = axes[:, values.argsort(descending=True)[:rank]]
    root = torch.linalg.cholesky(own)
    found: Tensor = torch.linalg.solve_triangular(root.T, top @ (top.T @ (root.T @ whole)), upper=True)
    return found.float()


def _outer(own: Tensor, whole: Tensor) -> Tensor:
    """[I + 1, I + 1]: its eigenvectors are the left singular vectors of the fitted targets."""
    fitted: Tensor = torch.linalg.cholesky(own).T @ whole
    return fitted @ fitted.T


def methods(decoder: Decoder, found: Statistics) -> list[Nothing]:
    """Every method at its settings."""

    def below(share: float, some: dict[Any, list[Tensor]]) -> dict[Any, float]:
        return {key: float(torch.cat(parts).sort().values[int(share * sum(map(len, parts)))])
                for key, parts in some.items()}  # fmt: skip

    def teal(share: float, *kinds: str) -> Nothing:
        where = kinds or ("qkv", "o", "up", "down")
        name = f"teal {share:.0%} {' '.join(kinds) or 'everywhere'}"
        return Teal(name, share=share, kinds=where, thresholds=below(share, found.inputs))

    def maps(rank: int | None) -> dict[int, Tensor]:
        return {layer: reduced(each, rank) for layer, each in found.moments.items()}

    count = len(decoder.blocks)
    return [
        *(teal(share) for share in (0.25, 0.4, 0.5)),
        *(teal(share, "down") for share in (0.5, 0.7, 0.8)),
        *(teal(0.5, kind) for kind in ("qkv", "o", "up")),
        *(Cats(f"cats {share:.0%}", share=share, thresholds=below(share, found.gates)) for share in (0.3, 0.5, 0.7)),
        *(Chosen(f"dejavu 50%, rank {rank or 'full'}", keep=0.5, maps=maps(rank)) for rank in (64, 256, None)),
        Chosen("oracle 50% of neurons", keep=0.5),
        *(Heads(f"heads {keep:.0%} kept, oracle", keep=keep) for keep in (0.75, 0.5)),
        *(Cascade(f"spatten {keep:.0%} of tokens", keep=keep, layers=count) for keep in (0.5, 0.25)),
        *(Cascade(f"spatten {keep:.0%} of heads", keep=keep, layers=count, of_heads=True) for keep in (0.75, 0.5)),
    ]


def shares(decoder: Decoder) -> dict[str, float]:
    """Of the blocks' linears, the share of each kind."""
    found: dict[str, float] = defaultdict(float)
    for block in decoder.blocks:
        for kind, each in linears(block):
            found[kind] += each.shape[0] * each.shape[1]
    return {kind: count / sum(found.values()) for kind, count in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a GGUF file or `demo`")
    parser.add_argument("--windows", type=int, default=2, help="of each kind of text")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="methods whose names begin so")
    parser.add_argument("--json", type=Path, help="where the result goes; else it is the last line")
    args = parser.parse_args()
    path = hub.resolve(args.model)
    tokenizer, decoder = vocabulary.tokenizer(path), opening.load(path, torch.float32)
    found = Statistics()
    for kind in ("prose", "code"):
        for ids in texts.calibration(tokenizer, kind, CALIBRATION // 2, 0):
            states(decoder, torch.tensor(ids), found)
    windows = {kind: torch.tensor(texts.scored(tokenizer, kind, args.windows * LENGTH)) for kind in ("prose", "code")}
    base = {kind: [states(decoder, ids, Nothing()) for ids in each.split(LENGTH)] for kind, each in windows.items()}
    sizes, rows = shares(decoder), {}
    print(f"{'':<28}{'saved':>8}{'prose':>10}{'code':>10}")
    for method in methods(decoder, found):
        if args.only and not method.name.startswith(tuple(args.only)):
            continue
        lost = {kind: _loss(decoder, each, base[kind], method) for kind, each in windows.items()}
        rows[method.name] = {"saved": method.saved(sizes), **lost}
        print(f"{method.name:<28}{method.saved(sizes):>8.3f}{lost['prose']:>10.4f}{lost['code']:>10.4f}", flush=True)
    result = json.dumps({"model": Path(args.model).stem, "windows": args.windows, "shares": sizes, "methods": rows})
    args.json.write_text(result + "\n") if args.json else print(result)


@torch.inference_mode()
def _loss(decoder: Decoder, ids: Tensor, base: list[Tensor], method: Nothing) -> float:
    """Mean KL divergence over the rows of all windows from the method's first on."""
    lost = []
    for one, theirs in zip(ids.split(LENGTH), base, strict=True):
        ours = states(decoder, one, method)
        parts = (each[method.first :].split(128) for each in (theirs, ours, one))
        lost += [compare(decoder.logits(a), decoder.logits(b), c).kl for a, b, c in zip(*parts, strict=True)]
    return float(torch.cat(lost).mean())


if __name__ == "__main__":
    main()
