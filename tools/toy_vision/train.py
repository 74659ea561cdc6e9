"""Train the toy that sees: a vision tower, its projector, and a LoRA adapter of the embedded model.

    PYTHONPATH=src:tools python -m toy_vision.train --work build/toy

First the tower learns alone: nine learned averages of its patches must name the shape and the colour in each cell. Then
tower, projector, adapter and the rows of the two marker tokens learn together to answer, and the tower goes on naming.
A picture is followed by a question of each kind that is possible, with its answer, and each answer is learned. The
embedded model itself stays as it is. Matrices of the tower learn by Muon (`train_demo_model.py`), the rest by AdamW.

A checkpoint is written every five minutes; a run that was stopped goes on from it. Seeds fix pictures and questions.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from toy_vision import checkpoint, scenes
from train_demo_model import Muon

RANK = 16
CELLS, SHAPES, COLOURS = len(scenes.CELLS), len(scenes.SHAPES), len(scenes.COLOURS)
IGNORED = -100
MUON, ADAM = 0.02, 2e-3  # learning rates at their peak
NAMING = 0.3  # weight of naming cells while answers are learned


class Adapted(nn.Module):
    """A linear layer that stays, and a low-rank change that learns (Hu et al., LoRA, equation 3, with scale 1)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.T) @ self.b.T  # type: ignore[no-any-return]


class Toy(nn.Module):
    """transformers' SmolVLM on the embedded model, with the parts that learn."""

    def __init__(self) -> None:
        super().__init__()
        text = transformers.AutoConfig.from_pretrained(checkpoint.DEMO).to_dict()
        config = transformers.SmolVLMConfig(
            text_config=text, vision_config=checkpoint.VISION, scale_factor=checkpoint.SCALE, pad_token_id=0
        )
        whole = transformers.SmolVLMModel(config).float()  # the embedded model's configuration says bfloat16
        self.tower, self.connector, self.text = whole.vision_model, whole.connector, whole.text_model
        base = load_file(checkpoint.DEMO / "model.safetensors")
        self.text.load_state_dict({name.removeprefix("model."): value.float() for name, value in base.items()})
        self.text.requires_grad_(False)
        for layer in self.text.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, child in list(part.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(part, name, Adapted(child))
        self.tokens = nn.Parameter(torch.randn(2, text["hidden_size"]) * 0.02)
        patches = (checkpoint.VISION["image_size"] // checkpoint.VISION["patch_size"]) ** 2  # type: ignore[operator]
        self.averages = nn.Parameter(torch.zeros(CELLS, patches))
        self.named = nn.Linear(checkpoint.VISION["hidden_size"], SHAPES + 1 + COLOURS + 1)  # type: ignore[arg-type]

    def seen(self, pixels: Tensor) -> Tensor:
        """Hidden states [B, patches, width] of pictures [B, SIDE, SIDE, 3]."""
        scaled = (pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        return self.tower(pixel_values=scaled).last_hidden_state  # type: ignore[no-any-return]

    def naming(self, seen: Tensor, shape: Tensor, colour: Tensor) -> Tensor:
        """The loss of naming shape and colour [B, CELLS] in each cell; the last number stands for nothing."""
        found = self.named(self.averages.softmax(-1) @ seen).flatten(0, 1)
        by_shape, by_colour = found[:, : SHAPES + 1], found[:, SHAPES + 1 :]
        return F.cross_entropy(by_shape, shape.flatten()) + F.cross_entropy(by_colour, colour.flatten())

    def forward(self, seen: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
        """Logits [N, vocabulary] behind the N text tokens of `ids` [B, L], which follow the picture, that are
        `wanted` [B, L]."""
        rows = self.connector(seen)
        table = self.text.embed_tokens.weight
        around, whole = (row.expand(len(ids), 1, -1) for row in self.tokens)
        bos = table[0].expand(len(ids), 1, -1)
        inputs = torch.cat((bos, around, whole, rows, around, F.embedding(ids, table)), 1)
        hidden = self.text(inputs_embeds=inputs, use_cache=False).last_hidden_state
        return hidden[:, -ids.shape[1] :][wanted] @ table.T  # type: ignore[no-any-return]

    def trained(self) -> dict[str, Tensor]:
        """What `checkpoint.merged` reads, in bfloat16."""
        parts = {"tokens": self.tokens}
        parts |= {f"vision_model.{name}": value for name, value in self.tower.state_dict().items()}
        parts |= {f"connector.{name}": value for name, value in self.connector.state_dict().items()}
        for name, module in self.text.named_modules():
            if isinstance(module, Adapted):
                parts |= {f"{checkpoint.adapted(name)}.a": module.a, f"{checkpoint.adapted(name)}.b": module.b}
        return {name: value.detach().bfloat16().contiguous() for name, value in parts.items()}


class Batches:
    """Batches of training, each a function of its number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tokenizer = Tokenizer.from_file(str(checkpoint.DEMO / "tokenizer.json"))

    def scenes(self, number: int) -> list[scenes.Scene]:
        source = scenes.scenes("training", number)
        return [next(source) for _ in range(self.size)]

    @staticmethod
    def cells(found: list[scenes.Scene]) -> tuple[Tensor, Tensor]:
        """The shape and the colour in each cell, [B, CELLS] each."""
        shape = torch.full((len(found), CELLS), SHAPES)
        colour = torch.full((len(found), CELLS), COLOURS)
        for row, scene in enumerate(found):
            for each in scene.objects:
                shape[row, each.cell], colour[row, each.cell] = each.shape, each.colour
        return shape, colour

    def questions(self, number: int, found: list[scenes.Scene]) -> tuple[Tensor, Tensor]:
        """The ids of questions and answers about scenes, and the targets."""
        random = np.random.default_rng((number, 2))
        lines = [self._line(scene, random) for scene in found]
        longest = max(len(ids) for ids, _ in lines)
        ids = torch.tensor([[*each, *[0] * (longest - len(each))] for each, _ in lines])
        targets = torch.tensor([[*each, *[IGNORED] * (longest - len(each))] for _, each in lines])
        return ids, targets

    def _line(self, scene: scenes.Scene, random: np.random.Generator) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        targets: list[int] = []
        asked: list[scenes.Question] = []
        for kind in random.permutation(scenes.KINDS):
            about = int(random.integers(len(scene.objects)))
            one = scenes.question(scene, str(kind), about)
            if one is not None:
                asked.append(one)
        for one in asked:
            question = self.tokenizer.encode(f"{one.text}\n").ids
            answer = [*self.tokenizer.encode(one.answer).ids, 0]
            ids += [*question, *answer]
            targets += [*[IGNORED] * (len(question) - 1), *answer, IGNORED]
        return ids, targets


def stacked(found: list[scenes.Scene]) -> Tensor:
    """Pictures [B, SIDE, SIDE, 3]."""
    return torch.from_numpy(np.stack([scene.pixels for scene in found]))


@torch.inference_mode()
def right(toy: Toy, batches: Batches, count: int, seed: int) -> float:
    """The share of held-out questions whose every answer token has the largest logit."""
    items = scenes.held_out(count, seed)
    hits = 0
    for first in range(0, count, 50):
        part = items[first : first + 50]
        for pixels, one in ((scene.pixels, question) for scene, question in part):
            question = batches.tokenizer.encode(f"{one.text}\n").ids
            answer = [*batches.tokenizer.encode(one.answer).ids, 0]
            ids = torch.tensor([question + answer[:-1]])
            seen = toy.seen(torch.from_numpy(pixels)[None])
            logits = toy(seen, ids, torch.arange(ids.shape[1])[None] >= len(question) - 1)
            hits += logits.argmax(-1).tolist() == answer
    return hits / count


def rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 100 steps, then half a cosine."""
    return peak * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * min(1, step / steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tower-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    toy, batches = Toy(), Batches(args.batch)
    inner = [p for p in toy.tower.encoder.parameters() if p.ndim == 2]
    adapted = [p for p in toy.parameters() if p.requires_grad and not any(p is each for each in inner)]
    muon = Muon(inner, lr=MUON, dtype=torch.float32)
    adam = torch.optim.AdamW(adapted, lr=ADAM, betas=(0.9, 0.98), weight_decay=0.01)
    saved, step = args.work / "state.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        toy.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        step = state["step"]
    begun = last = time.monotonic()
    total = args.tower_steps + args.steps
    mean = 0.0
    while step < total:
        alone = step < args.tower_steps
        found = batches.scenes(step)
        seen = toy.seen(stacked(found))
        loss = toy.naming(seen, *batches.cells(found))
        if not alone:
            ids, targets = batches.questions(step, found)
            wanted = targets != IGNORED
            answering = F.cross_entropy(toy(seen, ids, wanted), targets[wanted])
            loss = answering + NAMING * loss
        done, steps = (step, args.tower_steps) if alone else (step - args.tower_steps, args.steps)
        muon.param_groups[0]["lr"] = rate(done, steps, MUON if alone else MUON / 4)
        adam.param_groups[0]["lr"] = rate(done, steps, ADAM)
        muon.zero_grad(set_to_none=True)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(adapted, 1.0)
        muon.step()
        adam.step()
        loss = loss if alone else answering
        step += 1
        mean = loss.item() if mean == 0 else 0.98 * mean + 0.02 * loss.item()
        if step % 100 == 0 or step in (args.tower_steps, total):
            print(f"step {step} of {total}, loss {mean:.4f}, {time.monotonic() - begun:.0f} s", flush=True)
        if step % 300 == 0 and not alone:
            print(f"step {step}: {right(toy, batches, 200, seed=1):.3f} of 200 held-out questions right", flush=True)
        if step == args.tower_steps:
            mean = 0.0
        if time.monotonic() - last > 300 or step in (args.tower_steps, total):
            last = time.monotonic()
            state = {
                "model": toy.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict(), "step": step
            }  # fmt: skip
            torch.save(state, saved.with_suffix(".tmp"))
            os.replace(saved.with_suffix(".tmp"), saved)
            save_file(toy.trained(), args.work / "weights.safetensors")


if __name__ == "__main__":
    main()
