"""Training of an EAGLE-3 head (Li et al., arXiv 2503.01840) on a frozen target, with its training-time test.

The head is unrolled: step 0 reads the target's states, step j its own outputs of step j - 1, one token on. In attention
a row of step j sees the keys of step 0 at and below its own row, and of the steps between the keys of its own row:
what it will see behind j drafts. There is no loss on states. The published loss is the sum over steps of 0.8^j times
the mean cross-entropy with the target's prediction, restricted to the draft vocabulary and normed there; rows whose
best token lies outside of it do not count. `acceptance` is the mean of -log sum min(p, q) (arXiv 2602.23881), with p
not normed.

fc begins as [0 0 1], which passes the highest of the three states on, and the LM head as the target's own rows.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints.drafts import eagle
from attar.drafting.initial import normal
from attar.drafting.small import turned
from attar.drafting.target import Target
from attar.errors import UserError
from attar.model.cache import KeptStates
from attar.model.config import Rope
from attar.model.rope import rotation

DECAY = 0.8
EPS = 1e-5
Keys = list[tuple[Tensor, Tensor]]


class EagleLearner:
    """A head of the target's width, unrolled `depths` steps, whose LM head has the rows of `tokens` (None for all).

    Raises ValueError for a target of fewer than three layers, or whose embedding no head can share.
    """

    def __init__(
        self, target: Target, depths: int, tokens: Tensor | None, loss: str, seed: int, speculators: bool = False
    ) -> None:
        config, self.target, self.depths, self.loss = target.config, target, depths, loss
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
        self.embedding, head = target.ends()
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
        self.weights["fc.weight"] = torch.cat((torch.zeros(width, 2 * width), torch.eye(width)), 1)
        self.weights["lm_head.weight"] = head[self.tokens].clone()
        for each in self.weights.values():
            each.requires_grad_()

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def learn(self, ids: Tensor, states: KeptStates) -> float:
        """Add the gradients of the loss on token ids [S, L]; return the loss."""
        p = self.target.probabilities(states.of(self.layers[-1]), self.tokens).view(*ids.shape, -1)
        best = self.target.best(states.of(self.layers[-1])).view(ids.shape)
        known = torch.isin(best, self.tokens)
        total = torch.zeros(())
        for depth, logits in enumerate(self._unrolled(ids, states)):
            wanted = p[:, depth + 1 :][:, : logits.shape[1]]
            if self.loss == "published":
                counted = known[:, depth + 1 :][:, : logits.shape[1]]
                soft = wanted / wanted.sum(-1, keepdim=True).clamp_min(1e-9)
                losses = -(soft * logits.log_softmax(-1)).sum(-1)
                part = (losses * counted).sum() / counted.sum().clamp_min(1)
            else:
                part = -torch.minimum(wanted, logits.softmax(-1)).sum(-1).clamp_min(1e-6).log().mean()
            total = total + DECAY**depth * part
        total.backward()
        return float(total.detach())

    @torch.no_grad()
    def agreement(self, ids: Tensor, states: KeptStates) -> list[tuple[int, int]]:
        """Return, for each depth, how often the head's best token is the target's on token ids [S, L], and of how
        many. Every row stands behind the text's own tokens."""
        best, found = self.target.best(states.of(self.layers[-1])).view(ids.shape), []
        for depth, logits in enumerate(self._unrolled(ids, states)):
            guess = self.tokens[logits.argmax(-1)]
            wanted = best[:, depth + 1 :][:, : guess.shape[1]]
            found.append((int((guess == wanted).sum()), wanted.numel()))
        return found

    def write(self, folder: Path) -> None:
        shape, parts = eagle.shape_of(self.target.config, self.rope.theta, len(self.tokens), self.aux), self.weights
        if self.speculators:
            eagle.write_speculators(folder, shape, parts, self.tokens, self.target.path.stem, self.depths)
        else:
            eagle.write(folder, shape, parts, self.tokens)

    def _unrolled(self, ids: Tensor, states: KeptStates) -> list[Tensor]:
        """Return the draft logits [S, L - 1 - j, V] of each step j: row i of step j predicts token i + j + 2."""
        sequences, length = ids.shape
        raw = torch.cat([states.of(layer) for layer in self.aux], 1).view(sequences, length, -1)
        hidden = raw[:, :-1] @ self.weights["fc.weight"].T
        keys: Keys = []
        found: list[Tensor] = []
        for depth in range(self.depths):
            rows = length - 1 - depth
            embedded = self.embedding[ids[:, depth + 1 :]]
            hidden = self._block(embedded, hidden[:, :rows], keys, depth)
            found.append(self._norm("norm", hidden) @ self.weights["lm_head.weight"].T)
        return found

    def _block(self, embedded: Tensor, hidden: Tensor, keys: Keys, depth: int) -> Tensor:
        """Run the block on rows [S, N, I] of a step; its keys and values are added to those of the steps before."""
        config = self.target.config
        x = torch.cat(
            (self._norm("midlayer.input_layernorm", embedded), self._norm("midlayer.hidden_norm", hidden)), -1
        )
        rows, shared = x.shape[1], config.heads // config.kv_heads
        positions = torch.arange(depth, depth + rows)
        q, k, v = (
            self._product(f"self_attn.{name}_proj", x).view(*x.shape[:2], -1, config.head_dim).transpose(1, 2)
            for name in ("q", "k", "v")
        )
        angles = rotation(self.rope, positions, depth + rows)
        q, k = turned(q, *angles), turned(k, *angles).repeat_interleave(shared, 1)
        keys.append((k, v.repeat_interleave(shared, 1)))
        scale = config.head_dim**-0.5
        k0, v0 = (each[:, :, :rows] for each in keys[0])
        below = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = [(q @ k0.transpose(2, 3) * scale).masked_fill(below, -torch.inf)]
        scores += [(q * each[:, :, :rows]).sum(-1, keepdim=True) * scale for each, _ in keys[1:]]
        shares = torch.cat(scores, -1).softmax(-1)
        mixed = shares[..., :rows] @ v0
        for place, (_, value) in enumerate(keys[1:]):
            mixed = mixed + shares[..., rows + place, None] * value[:, :, :rows]
        y = hidden + self._product("self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
        m = self._norm("midlayer.post_attention_layernorm", y)
        wide = F.silu(self._product("mlp.gate_proj", m)) * self._product("mlp.up_proj", m)
        return y + self._product("mlp.down_proj", wide)

    def _product(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"midlayer.{name}.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], EPS)
