"""Training of an EAGLE-3 head (Li et al., arXiv 2503.01840) on a frozen target, with its training-time test.

The head is unrolled: step 0 reads the target's states, step j its own outputs of step j - 1, one token on. In attention
a row of step j sees the keys of step 0 at and below its own row, and of the steps between the keys of its own row:
what it will see behind j drafts. There is no loss on states. The published loss is the sum over steps of 0.8^j times
the mean cross-entropy with the target's prediction, restricted to the draft vocabulary and normed there; rows whose
best token lies outside of it do not count. `acceptance` is the mean of -log sum min(p, q) (arXiv 2602.23881), with p
not normed.

States of deep layers are large (in SmolLM2-135M a row's root mean square is 14 to 24), so a run learns fc for states
that are divided by their size, and fc is stored for states as they are. Else what the block adds to them would count
for nothing for thousands of steps, or fc would change by far too much in one. fc begins as [0 0 1], which passes the
highest of the three states on, and the LM head as the target's own rows.

Steps behind the first run every fourth row alone. Their keys are their own and those of step 0, so that each chain is
what it would be beside all others, at a quarter of the cost.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints.drafts import eagle
from attar.drafting.distillation import Distillation
from attar.drafting.initial import normal, stored
from attar.drafting.small import turned
from attar.drafting.target import States, Target, quick
from attar.errors import UserError
from attar.model.config import Rope
from attar.model.rope import rotation

DECAY = 0.8
EPS = 1e-5
STRIDE = 4  # rows of which one is unrolled
Keys = list[tuple[Tensor, Tensor]]


class EagleLearner:
    """A head of the target's width, unrolled `depths` steps, whose LM head has the rows of `tokens` (None for all).
    `sample` is some of the text, token ids [S, L], which tells how large states are.

    Raises ValueError for a target of fewer than three layers, or whose embedding no head can share.
    """

    def __init__(
        self, target: Target, depths: int, tokens: Tensor | None, loss: str, seed: int, sample: Tensor,
        speculators: bool = False,
    ) -> None:  # fmt: skip
        config, self.target, self.depths = target.config, target, depths
        self.speculators = speculators  # the layout that is written
        if config.layers < 3 or config.embedding_scale != 1.0 or config.learned_positions:
            raise UserError(
                "architecture_unsupported",
                "an EAGLE-3 head reads three layers and shares a plain embedding, which this model lacks: train medusa",
            )
        last = config.layers
        aux = (2, last // 2, last - 3) if last >= 6 else (0, last // 2, last - 1)
        self.aux: tuple[int, ...] = aux
        self.layers: tuple[int, ...] = (*aux, last)
        self.tokens = torch.arange(config.vocab_size) if tokens is None else tokens
        self.loss = Distillation(target, self.tokens, loss)
        self.embedding, head = target.ends
        self.rope = Rope(10000.0, config.head_dim)
        width, size = config.hidden, config.head_dim
        query, key, wide = config.heads * size, config.kv_heads * size, config.intermediate
        shapes = {
            "self_attn.q_proj": (query, 2 * width), "self_attn.k_proj": (key, 2 * width),
            "self_attn.v_proj": (key, 2 * width), "self_attn.o_proj": (width, query),
            "mlp.gate_proj": (wide, width), "mlp.up_proj": (wide, width), "mlp.down_proj": (width, wide),
        }  # fmt: skip
        self.weights = {f"midlayer.{n}.weight": normal(seed, i, s) for i, (n, s) in enumerate(shapes.items())}
        for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
            self.weights[f"{name}.weight"] = torch.ones(width)
        self.weights["norm.weight"] = target.decoder.final_norm.weight.detach().float().clone()
        states = target.quick_states(sample, self.layers)
        # Medians, because the first row's may be a hundred times as large.
        sizes = [states.of(layer).square().mean(1).sqrt().median() for layer in aux]
        self.sizes = torch.stack(sizes).repeat_interleave(width)
        self.weights["fc.weight"] = torch.cat((torch.zeros(width, 2 * width), torch.eye(width)), 1)
        self.weights["lm_head.weight"] = head[self.tokens].clone()
        for each in self.weights.values():
            each.requires_grad_()
        self.slow: tuple[Tensor, ...] = (self.weights["lm_head.weight"],)

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    @property
    def needs_predictions(self) -> bool:
        """Return whether learning reads the target's predictions over all tokens: the published loss does not count
        rows whose best token cannot be drafted."""
        return True

    def learn(self, ids: Tensor, states: States) -> float:
        """Add the gradients of the loss on token ids [S, L]; return the loss."""
        known = torch.isin(states.best, self.tokens) if self.loss.name == "published" else None
        first = int(ids.sum()) % min(STRIDE, ids.shape[1] - self.depths)  # by step, and not by where a run resumed
        total = torch.zeros(())
        for depth, (rows, x) in enumerate(self._unrolled(ids, states, first, STRIDE)):
            counted = None if known is None else known[rows]
            total = total + DECAY**depth * self.loss.loss(x, self.weights["lm_head.weight"], states, rows, counted)
        total.backward()
        return float(total.detach())

    @torch.no_grad()
    def agreement(self, ids: Tensor, states: States) -> list[tuple[int, int]]:
        """Return, for each depth, how often the head's best token is the target's on token ids [S, L], and of how
        many. Every row stands behind the text's own tokens."""
        head = self.weights["lm_head.weight"]
        return [self.loss.agreement(x, head, states.best[rows]) for rows, x in self._unrolled(ids, states)]

    def write(self, folder: Path) -> None:
        shape = eagle.shape_of(self.target.config, self.rope.theta, len(self.tokens), self.aux)
        parts = stored({**self.weights, "fc.weight": self.weights["fc.weight"] / self.sizes})
        if self.speculators:
            eagle.write_speculators(folder, shape, parts, self.tokens, self.target.path.stem, self.depths)
        else:
            eagle.write(folder, shape, parts, self.tokens)

    def _unrolled(self, ids: Tensor, states: States, first: int = 0, stride: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Return for each step j the inputs of the LM head [N, I], and the rows of ids [S * L] behind which the target
        predicts the same tokens: at place i of a sequence the token i + j + 2, behind row i + j + 1. Steps behind the
        first run every `stride`-th row, from `first` on."""
        sequences, length = ids.shape
        begins = torch.arange(sequences)[:, None] * length
        raw = (torch.cat([states.of(layer) for layer in self.aux], 1) / self.sizes).view(sequences, length, -1)
        places, keys, found = torch.arange(length - 1), Keys(), list[tuple[Tensor, Tensor]]()
        learns = torch.is_grad_enabled()
        with torch.autocast("cpu", torch.bfloat16, enabled=learns and quick(self.weights["fc.weight"])):
            hidden = (raw[:, :-1] @ self.weights["fc.weight"].T).float()
            for depth in range(self.depths):
                if depth == 1:
                    places = torch.arange(first, length - 1, stride)
                    hidden = hidden[:, places]
                places = places[places < length - 1 - depth]
                hidden = hidden[:, : len(places)]
                keys = [*keys[:1], *((k[:, :, : len(places)], v[:, :, : len(places)]) for k, v in keys[1:])]
                embedded = self.embedding[ids[:, places + depth + 1]]
                hidden = self._block(embedded, hidden, keys, places, depth)
                x = self._norm("norm", hidden)
                found.append(((begins + places + depth + 1).reshape(-1), x.flatten(0, 1)))
        return found

    def _block(self, embedded: Tensor, hidden: Tensor, keys: Keys, places: Tensor, depth: int) -> Tensor:
        """Run the block on rows [S, N, I] of a step, which stand at `places` of the first step; the keys and values are
        added to those of the steps before."""
        config = self.target.config
        x = torch.cat(
            (self._norm("midlayer.input_layernorm", embedded), self._norm("midlayer.hidden_norm", hidden)), -1
        )
        q, k, v = (
            self._product(f"self_attn.{name}_proj", x).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
            for name in ("q", "k", "v")
        )
        positions = places + depth
        angles = rotation(self.rope, positions, int(positions[-1]) + 1)
        q, k = turned(q, *angles), turned(k, *angles)
        keys.append((k, v))
        mixed = self._attend(q, keys, places)
        y = hidden + self._product("self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
        m = self._norm("midlayer.post_attention_layernorm", y)
        wide = F.silu(self._product("mlp.gate_proj", m)) * self._product("mlp.up_proj", m)
        return y + self._product("mlp.down_proj", wide)

    def _attend(self, q: Tensor, keys: Keys, places: Tensor) -> Tensor:
        """Return the mixed values of queries [S, H, N, D]: over the first step's keys up to a row's own place, and over
        the row's own keys of the later steps."""
        shared = self.target.config.heads // self.target.config.kv_heads
        every = [(k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)) for k, v in keys]
        (k0, v0), later = every[0], every[1:]
        if not later:
            return F.scaled_dot_product_attention(q.to(v0.dtype), k0.to(v0.dtype), v0, is_causal=True)
        scale = q.shape[-1] ** -0.5
        above = torch.arange(k0.shape[2]) > places[:, None]
        scores = [(q @ k0.transpose(2, 3)).float().mul(scale).masked_fill(above, -torch.inf)]
        scores += [(q * k).sum(-1, keepdim=True).float() * scale for k, _ in later]
        shares = torch.cat(scores, -1).softmax(-1)
        mixed = shares[..., : k0.shape[2]] @ v0
        for place, (_, v) in enumerate(later):
            mixed = mixed + shares[..., k0.shape[2] + place, None] * v
        return mixed

    def _product(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"midlayer.{name}.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], EPS)
