"""A constructed model that retrieves exactly at any length, without training.

It has two layers of one head of 128 columns, a hidden size of 192 in three parts of 64, and no feed-forward. A token's
code is a random unit vector in the first part. Layer 0 writes the code of the token before into the second part: its
biases give the score cos(angle of the distance - 1), and all else is zero. Layer 1 compares the own code with the codes
before, in pairs that turn too slowly to matter, and writes the code found there into the third part. The LM head reads
that. So a token that occurred before is followed by what followed it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from attar.kernels.operands import Linear
from attar.model.assembly import build
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.families import read_config

VOCABULARY, CODE, HEAD = 1024, 64, 128
NEEDLES, VALUES = 8, 3
FILLER = VOCABULARY - NEEDLES * (VALUES + 1)  # tokens below it are filler; each of the others occurs once
THETA = 1e10
SHARP = 30.0  # greatest score of one pair of layer 0
MATCH = 40.0  # score of equal codes in layer 1
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": 3 * CODE, "intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD,
    "max_position_embeddings": 1 << 17, "rope_theta": THETA, "attention_bias": True, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass
class _Weights:
    tensors: dict[str, Tensor]
    dtype: torch.dtype = field(default=torch.float32)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    matrix = tensor

    def linear(self, name: str) -> Linear:
        return Linear(name, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


def lookup_model(seed: int = 0) -> Decoder:
    """The model, in float32."""
    codes = torch.randn((VOCABULARY, CODE), generator=torch.Generator().manual_seed(seed))
    codes /= codes.norm(dim=1, keepdim=True)
    size, half, eye = 3 * CODE, HEAD // 2, torch.eye(CODE)
    own, before, out = (slice(i * CODE, (i + 1) * CODE) for i in range(3))
    tensors = {
        "model.embed_tokens.weight": torch.zeros(VOCABULARY, size),
        "lm_head.weight": torch.zeros(VOCABULARY, size),
        "model.norm.weight": torch.ones(size),
    }
    tensors["model.embed_tokens.weight"][:, own] = codes
    tensors["lm_head.weight"][:, out] = 10 * codes
    for i in range(2):
        at = f"model.layers.{i}"
        for name, shape in (("q", (HEAD, size)), ("k", (HEAD, size)), ("v", (HEAD, size)), ("o", (size, HEAD))):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = torch.zeros(shape)
            tensors[f"{at}.self_attn.{name}_proj.bias"] = torch.zeros(shape[0])
        for name, shape in (("gate", (16, size)), ("up", (16, size)), ("down", (size, 16))):
            tensors[f"{at}.mlp.{name}_proj.weight"] = torch.zeros(shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(size)
        tensors[f"{at}.self_attn.v_proj.weight"][:CODE, own] = eye
    fast = torch.arange(half // 2)
    turn = THETA ** -(fast / half)
    strength = (SHARP * HEAD**0.5) ** 0.5  # of each pair
    first, second = "model.layers.0.self_attn", "model.layers.1.self_attn"
    tensors[f"{first}.k_proj.bias"][fast] = strength
    tensors[f"{first}.q_proj.bias"][fast] = strength * turn.cos()
    tensors[f"{first}.q_proj.bias"][fast + half] = -strength * turn.sin()
    tensors[f"{first}.o_proj.weight"][before, :CODE] = eye / size**0.5  # undoes the norm, whose input has length 1
    slow = torch.cat((torch.arange(half // 2, half), torch.arange(half // 2, half) + half))
    factor = (MATCH * HEAD**0.5 / (size / 2)) ** 0.5  # the norm's input has the length sqrt(2)
    for name, part in (("q", own), ("k", before)):
        weight = torch.zeros(HEAD, size)
        weight[slow, part] = factor * eye
        tensors[f"{second}.{name}_proj.weight"] = weight
    tensors[f"{second}.o_proj.weight"][out, :CODE] = 4 * eye / (size / 2) ** 0.5
    return build(read_config(CONFIG), _Weights(tensors))


def haystack(length: int, seed: int = 0) -> tuple[Tensor, list[list[int]]]:
    """Token ids [length] and their needles, from early to late, each a key and its values."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, FILLER, (length,), generator=numbers)
    order = (FILLER + torch.randperm(VOCABULARY - FILLER, generator=numbers)).view(NEEDLES, VALUES + 1)
    room = length // NEEDLES
    for i, needle in enumerate(order):
        at = i * room + int(torch.randint(0, room - VALUES, (1,), generator=numbers))
        ids[at : at + VALUES + 1] = needle
    return ids, order.tolist()


def answer(decoder: Decoder, cache: KVCache, tokens: list[int]) -> list[int]:
    """The values that follow `tokens`, each chosen greedily."""
    found, rows, horizon = list[int](), tokens, cache.capacity
    for _ in range(VALUES):
        logits = decoder.forward(torch.tensor(rows), ForwardBatch((len(rows),), horizon, cache))
        found.append(int(logits[-1].argmax()))
        rows = found[-1:]
    return found
