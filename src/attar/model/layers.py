"""The parts of a decoder block. Each is plain data and a short `forward` of calls through the kernel dispatch.

The residual stream travels as a pair (stream, delta): a block leaves its last addition to the norm that comes next, so
that adding and normalising can be one kernel. Legend: N rows, I hidden size, H query heads, G key-value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attar.kernels import ops
from attar.kernels.operands import ActivationHook, AttentionForm, Linear, Norm, Routes
from attar.kv.pages import Rotation
from attar.model.cache import ForwardBatch, sent
from attar.model.config import Activation, Rope


@dataclass(eq=False)
class Attention:
    layer: int
    qkv: tuple[Linear, ...]  # three, or one that holds q, k and v in that order of rows
    output: Linear
    form: AttentionForm
    rope: Rope | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def forward(self, x: Tensor, step: ForwardBatch, hook: ActivationHook | None = None) -> Tensor:
        form = self.form
        heads = ops.linear(x, self.qkv, hook, step.routes).view(x.shape[0], -1, form.head_dim)
        if step.again is not None:
            heads = torch.cat((heads, heads[step.again]))
        q, k, v = heads.split((form.heads, form.kv_heads, form.kv_heads), 1)
        rotation = None if self.rope is None else step.rotation(self.rope)
        place = step.place_of(form.window)
        if step.cache is not None and place is not None:
            pages = step.cache.layers[self.layer]
            q = ops.write_kv(q, k, v, pages, place, rotation, self.q_norm, self.k_norm)
            q = q if step.again is None else q[: x.shape[0]]
            if step.watched is not None:
                step.queries[self.layer] = q[step.watched]
            mixed, _ = ops.paged_attention(q, pages, place, form)
        else:
            q, k = self._placed(q, k, rotation)
            mixed = self._whole(q, k, v, step)
        return ops.linear(mixed, (self.output,), hook, step.routes)

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, step: ForwardBatch) -> Tensor:
        """Attend without a cache, from queries [N, H, D], keys and values [N, G, D] that `heads` returned unrotated;
        return the products of the output projection [N, I]."""
        if self.rope is not None:
            rotation = step.rotation(self.rope)
            cos, sin = rotation.cos[rotation.rows], rotation.sin[rotation.rows]
            q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        return ops.linear(self._whole(q, k, v, step), (self.output,))

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, step: ForwardBatch) -> Tensor:
        keys, values = step.whole(k, v)
        positions = step.split(step.positions)
        return ops.attention(q, keys, values, positions, positions, self.form, step.spans)

    def heads(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [N, H, D], keys and values [N, G, D] of rows x [N, I], normed and rotated, ready for
        attention."""
        heads = ops.linear(x, self.qkv).view(x.shape[0], -1, self.form.head_dim)
        q, k, v = heads.split((self.form.heads, self.form.kv_heads, self.form.kv_heads), 1)
        return *self._placed(q, k, rotation), v

    def _placed(self, q: Tensor, k: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            q, k = ops.norm(q, None, self.q_norm)[1], ops.norm(k, None, self.k_norm)[1]
        if rotation is not None:
            cos, sin = rotation.cos[rotation.rows], rotation.sin[rotation.rows]
            q, k = ops.rope(q, cos, sin), ops.rope(k, cos, sin)
        return q, k


@dataclass(eq=False)
class FeedForward:
    up: tuple[Linear, ...]  # (gate, up), one that holds both in that order of rows, or, un-gated, just up
    down: Linear
    activation: Activation
    gated: bool

    def forward(self, x: Tensor, hook: ActivationHook | None = None, routes: Routes | None = None) -> Tensor:
        wide = ops.feed_forward_in(x, self.up, self.activation, self.gated, self.down, hook, routes)
        return ops.linear(wide, (self.down,), hook, routes)


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of a column [N, 1], independently of the row's place.

    torch's own sigmoid takes whole vectors by other code than the remainder, so a row's bits would depend on its place;
    its softmax takes every row alone.
    """
    return torch.cat((x, torch.zeros_like(x)), -1).softmax(-1)[:, :1]


@dataclass(eq=False)
class MixtureOfExperts:
    router: Linear
    experts: tuple[FeedForward, ...]
    top_k: int
    normalise_top_k: bool
    shared: FeedForward | None = None
    shared_gate: Linear | None = None

    def forward(self, x: Tensor, hook: ActivationHook | None = None, routes: Routes | None = None) -> Tensor:
        gates = ops.linear(x, (self.router,), hook, routes).float().softmax(-1)
        weights, chosen = gates.topk(self.top_k, -1)  # [N, top_k]
        if self.normalise_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        out, known = torch.zeros_like(x), chosen.cpu()  # on a GPU the one wait of the layer, for all experts
        for e, expert in enumerate(self.experts):
            rows, rank = (known == e).nonzero(as_tuple=True)
            if len(rows):
                own = None if routes is None else routes.of(rows)
                rows, rank = sent(x.device, rows, rank)
                out[rows] += expert.forward(x[rows], hook, own) * weights[rows, rank, None].to(x.dtype)
        if self.shared is not None and self.shared_gate is not None:
            gate = sigmoid(ops.linear(x, (self.shared_gate,), hook, routes))
            out = out + self.shared.forward(x, hook, routes) * gate
        return out


@dataclass(eq=False)
class Block:
    attention_norm: Norm
    attention: Attention
    feed_forward_norm: Norm
    feed_forward: FeedForward | MixtureOfExperts
    attention_post_norm: Norm | None = None
    feed_forward_post_norm: Norm | None = None
    sum: Callable[[Tensor], Tensor] | None = None
    """Sum over the processes that each hold a part of the block's linear layers; None for one process."""

    def forward(
        self, stream: Tensor, delta: Tensor | None, step: ForwardBatch, hook: ActivationHook | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the block on (stream, delta), both [N, I]; return (stream, delta), whose sum is its output."""
        stream, x = ops.norm(stream, delta, self.attention_norm)
        delta = self.normed(self.attention.forward(x, step, hook), self.attention_post_norm)
        stream, x = ops.norm(stream, delta, self.feed_forward_norm)
        return stream, self.normed(self.feed_forward.forward(x, hook, step.routes), self.feed_forward_post_norm)

    def normed(self, part: Tensor, post_norm: Norm | None) -> Tensor:
        """Return the products [N, I] of attention or feed-forward as they are added to the residual."""
        whole = part if self.sum is None else self.sum(part)
        return whole if post_norm is None else ops.norm(whole, None, post_norm)[1]

    def run(self, hidden: Tensor, step: ForwardBatch, hook: ActivationHook | None = None) -> Tensor:
        """Run the block on hidden states [N, I]; return hidden states [N, I]."""
        stream, delta = self.forward(hidden, None, step, hook)
        return stream + delta

    def feed_forwards(self) -> Iterator[FeedForward]:
        if isinstance(self.feed_forward, FeedForward):
            yield self.feed_forward
            return
        yield from self.feed_forward.experts
        if self.feed_forward.shared is not None:
            yield self.feed_forward.shared

    def linears(self) -> Iterator[Linear]:
        """Yield every linear layer of the block, in the order in which a forward pass reads them."""
        yield from self.attention.qkv
        yield self.attention.output
        if isinstance(self.feed_forward, MixtureOfExperts):
            yield self.feed_forward.router
        for each in self.feed_forwards():
            yield from each.up
            yield each.down
        if isinstance(self.feed_forward, MixtureOfExperts) and self.feed_forward.shared_gate is not None:
            yield self.feed_forward.shared_gate

    def norms(self) -> Iterator[Norm]:
        """Yield every norm of the block."""
        attention = self.attention
        found = (self.attention_norm, self.attention_post_norm, self.feed_forward_norm, self.feed_forward_post_norm)
        yield from (norm for norm in (*found, attention.q_norm, attention.k_norm) if norm is not None)
