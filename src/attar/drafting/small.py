"""Training of a small draft model: a Llama of a few narrow layers, by distillation of a frozen target on a text.

Its embedding, which is its LM head too, begins as the target's, projected on its principal directions. It is written
as an ordinary model folder with the target's tokenizer, in float32: any engine loads it, and `attar compress` takes it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints.convert.from_gguf import write_tokenizer
from attar.checkpoints.drafts.files import write_head
from attar.checkpoints.gguf.checkpoint import GgufCheckpoint
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.vocabulary import is_gguf
from attar.drafting.distillation import Distillation
from attar.drafting.initial import normal
from attar.drafting.target import States, Target, quick
from attar.model.config import Rope
from attar.model.rope import rotation

EPS = 1e-5
THETA = 10000.0
HEAD = 32  # columns of a head
STEP = 32  # a width is a multiple of it: the kernels' blocks
SCALE = 0.02  # standard deviation of the embedding at the beginning


class SmallLearner:
    """A model of `layers` layers and `width` columns, a multiple of 32, with all tokens of the target."""

    def __init__(self, target: Target, layers: int, width: int, loss: str, seed: int) -> None:
        self.target, self.depth, self.width, self.wide = target, layers, width, 3 * width
        self.layers: tuple[int, ...] = (target.config.layers,)
        self.slow: tuple[Tensor, ...] = ()
        self.rope = Rope(THETA, HEAD)
        self.loss = Distillation(target, None, loss)
        shapes = {
            "self_attn.q_proj": (width, width), "self_attn.k_proj": (width, width), "self_attn.v_proj": (width, width),
            "self_attn.o_proj": (width, width), "mlp.gate_proj": (self.wide, width), "mlp.up_proj": (self.wide, width),
            "mlp.down_proj": (width, self.wide),
        }  # fmt: skip
        self.embedding = "model.embed_tokens.weight"
        self.weights = {self.embedding: projected(target.ends[0], width)}
        for i in range(layers):
            at = f"model.layers.{i}"
            for k, (name, shape) in enumerate(shapes.items()):
                self.weights[f"{at}.{name}.weight"] = normal(seed, i * len(shapes) + k, shape)
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.weights[f"{at}.{name}.weight"] = torch.ones(width)
        self.weights["model.norm.weight"] = torch.ones(width)
        for each in self.weights.values():
            each.requires_grad_()

    @property
    def needs_predictions(self) -> bool:
        """Return whether learning reads the target's predictions over all tokens."""
        return self.loss.needs_predictions

    def parameters(self) -> list[Tensor]:
        return list(self.weights.values())

    def learn(self, ids: Tensor, states: States) -> float:
        """Add the gradients of the loss on token ids [S, L]; return the loss."""
        with torch.autocast("cpu", torch.bfloat16, enabled=quick(self.weights[self.embedding])):
            x = self._x(ids)
        loss = self.loss.loss(x.float(), self.weights[self.embedding], states, torch.arange(len(x)))
        loss.backward()
        return float(loss.detach())

    @torch.no_grad()
    def agreement(self, ids: Tensor, states: States) -> list[tuple[int, int]]:
        """Return how often the model's best token is the target's on token ids [S, L], and of how many."""
        return [self.loss.agreement(self._x(ids), self.weights[self.embedding], states.best)]

    def write(self, folder: Path) -> None:
        config, target = self.target.config, self.target.path
        settings = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": config.vocab_size,
            "hidden_size": self.width, "intermediate_size": self.wide, "num_hidden_layers": self.depth,
            "num_attention_heads": self.width // HEAD, "num_key_value_heads": self.width // HEAD, "head_dim": HEAD,
            "hidden_act": "silu", "rms_norm_eps": EPS, "rope_theta": THETA, "tie_word_embeddings": True,
            "max_position_embeddings": config.context, "torch_dtype": "float32",
            "bos_token_id": config.bos_ids[0] if config.bos_ids else None,
            "eos_token_id": list(config.eos_ids) or None,
        }  # fmt: skip
        write_head(folder, settings, self.weights)
        if is_gguf(target):
            write_tokenizer(GgufCheckpoint.open(target, torch.float32), folder)
        else:
            files = Checkpoint.open(target).folder
            files.carry(files.carry_files(), folder)

    def _x(self, ids: Tensor) -> Tensor:
        """Return the inputs of the LM head, [S * L, width]."""
        positions = torch.arange(ids.shape[1])
        angles = rotation(self.rope, positions, ids.shape[1])
        x = self.weights[self.embedding][ids]
        for i in range(self.depth):
            at, normed = f"model.layers.{i}", self._norm(f"model.layers.{i}.input_layernorm", x)
            q, k, v = (
                self._product(f"{at}.self_attn.{name}_proj", normed).unflatten(-1, (-1, HEAD)).transpose(1, 2)
                for name in ("q", "k", "v")
            )
            mixed = F.scaled_dot_product_attention(turned(q, *angles), turned(k, *angles), v, is_causal=True)
            x = x + self._product(f"{at}.self_attn.o_proj", mixed.transpose(1, 2).flatten(2))
            normed = self._norm(f"{at}.post_attention_layernorm", x)
            gate, up = (self._product(f"{at}.mlp.{name}_proj", normed) for name in ("gate", "up"))
            x = x + self._product(f"{at}.mlp.down_proj", F.silu(gate) * up)
        return self._norm("model.norm", x).flatten(0, 1)

    def _product(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], EPS)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return heads [..., N, size], turned by the rotary angles [N, size / 2] of their rows."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def projected(embedding: Tensor, width: int) -> Tensor:
    """Return the rows of an embedding [V, I] on its first `width` principal directions, [V, width], scaled; a narrower
    embedding is padded with zeros."""
    _, directions = torch.linalg.eigh((embedding.T @ embedding).double())
    found = embedding @ directions.flip(1)[:, :width].float()
    found = F.pad(found, (0, width - found.shape[1]))
    return found * (SCALE / found.std().clamp_min(1e-9))
