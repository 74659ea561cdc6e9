"""Train the embedded demo model: a 5.8 M parameter Llama, in plain torch.

The model ships inside the package so that `attar compress demo out` works on a machine with no network, and so that
the tests have something *trained* to measure: compression methods cannot be told apart on random weights.

    python tools/train_demo_model.py --text novels.jsonl.xz --held-out novels_valid.jsonl --work build/demo --tokens 2e7

One pass over public-domain novels, in windows of 512 tokens. Matrices learn by Muon (momentum orthogonalised with five
Newton-Schulz steps; K. Jordan 2024), the tied embedding and the norms by AdamW. The learning rate is warm-up, constant,
then a linear decay over the last `--cooldown` of the tokens: a run can therefore be lengthened or cut short while it is
still on the plateau by resuming it with another `--tokens`.

A checkpoint is written every ten minutes and at the end; a killed run goes on from the last one. Every checkpoint is
also exported as a Hugging Face folder under WORK/export, the one with the best held-out score so far.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, CONTEXT = 4096, 256, 6, 4, 2, 64, 768, 512
BOS = "<|endoftext|>"
EPS, ROPE_THETA = 1e-6, 10000.0
HELD_OUT_CHARACTERS = 400_000
# A template for a model that only continues text: the turns are paragraphs.
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}\n\n{% endfor %}"


# --- model: the Llama architecture under its Hugging Face tensor names ------------------------------------------------


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split convention; x is [batch, heads, position, HEAD_DIM]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            p(x).view(batch, length, -1, HEAD_DIM).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (rotate(k, cos, sin), v))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.down_proj = nn.Linear(FEED_FORWARD, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm(HIDDEN)
        angle = torch.outer(
            torch.arange(CONTEXT).float(), ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)
        )
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.5 / math.sqrt(p.shape[1]))
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for block in self.layers:  # a block starts as the identity
            nn.init.zeros_(block.self_attn.o_proj.weight)  # type: ignore[union-attr,arg-type]
            nn.init.zeros_(block.mlp.down_proj.weight)  # type: ignore[union-attr,arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids [batch, position] to logits [batch, position, VOCAB]."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]  # type: ignore[index]
        x = self.embed_tokens(ids)
        for block in self.layers:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is replaced by its nearest semi-orthogonal matrix."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype  # of the orthogonalisation

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]), self.dtype)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonalise(g: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan's quintic: fast, and only roughly one at the fixed points
    x = g.to(dtype)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return (x if wide else x.T).float()


# --- data -------------------------------------------------------------------------------------------------------------


def read_texts(path: Path) -> list[str]:
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as f:
        return [json.loads(line)["text"] for line in f] if ".jsonl" in path.name else [f.read()]


def make_tokenizer(texts: list[str], path: Path) -> Tokenizer:
    if path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def make_stream(tokenizer: Tokenizer, texts: list[str], path: Path) -> Tensor:
    if not path.exists():
        ids: list[int] = []
        for text in texts:
            ids.append(tokenizer.token_to_id(BOS))
            paragraphs = text.split("\n\n")
            for encoded in tokenizer.encode_batch([p + "\n\n" for p in paragraphs]):
                ids.extend(encoded.ids)
        torch.save(torch.tensor(ids, dtype=torch.int16), path)
    return torch.load(path, weights_only=True)  # type: ignore[no-any-return]


def batch_at(stream: Tensor, step: int, size: int, bos: int) -> tuple[Tensor, Tensor]:
    """Windows in one seeded permutation per epoch. Half of them open with BOS, so that a text may begin anywhere."""
    windows = (len(stream) - 1) // CONTEXT
    g = torch.Generator().manual_seed(step)
    rows = []
    for i in range(step * size, (step + 1) * size):
        epoch, index = divmod(i, windows)
        order = torch.randperm(windows, generator=torch.Generator().manual_seed(epoch))
        rows.append(stream[int(order[index]) * CONTEXT :][: CONTEXT + 1].long())
    ids = torch.stack(rows)
    inputs, targets = ids[:, :-1].clone(), ids[:, 1:].clone()
    opened = torch.rand(size, generator=g) < 0.5
    inputs[opened, 1:], targets[opened, 1:] = ids[opened, :-2], ids[opened, 1:-1]
    inputs[opened, 0], targets[opened, 0] = bos, ids[opened, 0]
    return inputs, targets


@torch.inference_mode()
def bits_per_byte(model: Llama, tokenizer: Tokenizer, text: str) -> float:
    """Bits per UTF-8 byte of `text` in consecutive windows of CONTEXT tokens; each window starts without a past."""
    ids = torch.tensor(tokenizer.encode(text).ids)
    nats = 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        piece = ids[start : start + CONTEXT + 1]
        logits = model(piece[None, :-1])[0].float()
        nats += F.cross_entropy(logits, piece[1:], reduction="sum").item()
    return nats / math.log(2) / len(text.encode())


# --- files ------------------------------------------------------------------------------------------------------------


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{k}": v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    bos = tokenizer.token_to_id(BOS)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": FEED_FORWARD, "hidden_act": "silu",
        "rms_norm_eps": EPS, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "bos_token_id": bos, "eos_token_id": bos,
    }  # fmt: skip
    generation = {"bos_token_id": bos, "eos_token_id": bos, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": BOS,
        "model_max_length": CONTEXT, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    for name, value in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def replace_atomically(value: object, path: Path) -> None:
    torch.save(value, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


# --- the run ----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, nargs="+", help="training text: .txt, .jsonl or .jsonl.xz")
    parser.add_argument("--held-out", type=Path, required=True, help="text for the score; never trained on")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints, caches and the export")
    parser.add_argument("--tokens", type=float, default=16e6)
    parser.add_argument("--batch", type=int, default=16, help="windows of 512 a step")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=4e-3)
    parser.add_argument("--cooldown", type=float, default=0.45, help="fraction of the steps spent decaying to zero")
    parser.add_argument("--minutes-between-checkpoints", type=float, default=10)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    def log(**fields: object) -> None:
        line = json.dumps(fields)
        print(line, flush=True)
        with open(args.work / "train.log", "a") as f:
            f.write(line + "\n")

    torch.manual_seed(0)
    texts = [t for path in args.text for t in read_texts(path)]
    held_out = "".join(read_texts(args.held_out))[:HELD_OUT_CHARACTERS]
    tokenizer = make_tokenizer(texts, args.work / "tokenizer.json")
    stream = make_stream(tokenizer, texts, args.work / "stream.pt")
    model = Llama()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        Muon(matrices, lr=args.muon_lr),
        torch.optim.AdamW(others, lr=args.adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    steps = int(args.tokens // (args.batch * CONTEXT))
    state_path, step, best = args.work / "state.pt", 0, math.inf
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, best = state["step"], state["best"]
    log(
        event="start",
        step=step,
        steps=steps,
        stream_tokens=len(stream),
        parameters=sum(p.numel() for p in model.parameters()),
    )
    began = saved_at = time.monotonic()
    first = step
    while step < steps:
        warm = min(1.0, (step + 1) / 60)
        scale = warm * min(1.0, (steps - step) / (args.cooldown * steps))
        for optimizer, base in zip(optimizers, (args.muon_lr, args.adam_lr), strict=True):
            optimizer.param_groups[0]["lr"] = base * scale
        inputs, targets = batch_at(stream, step, args.batch, tokenizer.token_to_id(BOS))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs)
            loss = F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        step += 1
        if step % 20 == 0:
            rate = (step - first) * args.batch * CONTEXT / (time.monotonic() - began)
            log(
                event="step",
                step=step,
                loss=round(loss.item(), 4),
                lr_scale=round(scale, 3),
                tokens_per_second=round(rate),
            )
        due = time.monotonic() - saved_at > 60 * args.minutes_between_checkpoints
        if due or step == steps:
            bpb = bits_per_byte(model, tokenizer, held_out)
            log(event="checkpoint", step=step, tokens=step * args.batch * CONTEXT, bits_per_byte=round(bpb, 4))
            if bpb < best:
                best = bpb
                export(model, tokenizer, args.work / "export")
            replace_atomically(
                {
                    "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizers],
                    "step": step,
                    "best": best,
                },
                state_path,
            )
            saved_at = time.monotonic()


if __name__ == "__main__":
    main()
