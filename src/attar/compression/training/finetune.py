"""QLoRA (Dettmers et al. 2023): train a low-rank adapter on a frozen model, compressed or not.

The base is any model that attar reads: NF4 as in the paper, any other format, or a dense model (then it is LoRA). Its
weights never change. Every product reads them as they are stored and makes float32 of them a matrix at a time, forwards
and again backwards. So memory is the stored model, the graph of one block (`trainable_model`) and 16 bytes for each
number of the adapter. Each chosen linear gets (alpha / r) B A added, A from a uniform distribution over 1 / sqrt(I) and
B zero: the first step begins at the base itself. The loss is the mean negative log-likelihood of the next token; Adam,
the gradient's norm clipped, a warm-up and a cosine.

The output is a folder that PEFT, and `adapters.lora`, read. A killed run resumes: every `save_every` steps the
adapter, Adam's moments and the losses so far go to disk. All randomness comes from counters, so the bytes are those of
an uninterrupted run, given the same torch build, instruction set and thread count: with others no run is resumed. The
last two saves stay, and the newer one counts unless it is damaged. The adapter is float32 throughout; on CPUs bfloat16
would save little and round the small steps away. Not done: dropout, paged moments, packing texts of different lengths.
"""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attar.checkpoints.adapters import lora
from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.vocabulary import is_gguf
from attar.checkpoints.writer import ShardWriter, atomic_folder, plan_files
from attar.compression.calibration.texts import token_hash, windows, within_context, within_vocabulary
from attar.compression.training.saves import Saves
from attar.compression.training.trainable_model import WholeModel, schedule, shuffled
from attar.errors import UserError
from attar.formats.scheme import Part
from attar.kernels.operands import Adapter, Linear
from attar.model.assembly import all_compressible
from attar.progress import Progress
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

CLIP = 1.0  # limit of the gradient's norm
NO_LABEL = -100
LEARNED = "sequences to learn from"


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Settings of the training. `targets` are patterns of module names. Raises ValueError on invalid values."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("*",)
    epochs: int = 1
    rate: float = 2e-4
    batch: int = 2048  # tokens a step
    save_every: int = 25  # steps
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.rank, self.epochs, self.batch, self.save_every) < 1 or self.seed < 0:
            raise UserError(
                "option_out_of_range", "rank, epochs, batch and save_every are at least 1, and the seed at least 0"
            )
        if not (0 < self.alpha < 1e6 and 0 < self.rate < 1):
            raise UserError(
                "option_out_of_range",
                f"alpha and rate are positive, and rate is below 1, not {self.alpha} and {self.rate}",
            )


@dataclass(frozen=True)
class FineTuned:
    """Result of `finetune`: the adapter's folder, its number of parameters, and the mean loss in nats of every step.
    `notes` are further sentences for the user."""

    path: Path
    parameters: int
    losses: tuple[float, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self) | {"path": str(self.path), "losses": list(self.losses), "notes": list(self.notes)}


def refuse_file(base: Path) -> None:
    """Raise ValueError for a GGUF file, which can be run but not trained on."""
    if is_gguf(base):
        raise UserError(
            "source_is_gguf",
            f"{base} is a GGUF file, and adapters are trained on folders: give the one it was made from, compressed or "
            f"not, or make one: attar convert {base} OUT --to dense; what is trained there runs on the file too",
        )


def read_ids(base: Path, text: Path, samples: int, length: int) -> Tensor:
    """Return token ids [S, L] of at most `samples` windows of a text file, by the tokenizer of the model `base`. Raises
    ValueError where there is no such file, it has fewer than two tokens, or `length` is beyond the context."""
    refuse_file(base)
    within_context(length, Checkpoint.open(base).config, LEARNED)
    tokenizer = Tokenizer.load(base)
    return windows(tokenizer.encode(read_text(text), add_special_tokens=False), samples, length, tokenizer.added_bos)


def finetune(
    base: Path,
    out: Path,
    ids: Tensor,
    options: FineTuning,
    *,
    memory: int | None = None,
    overwrite: bool = False,
    resume: bool = True,
    progress: Progress | None = None,
) -> FineTuned:
    """Train an adapter of the model `base` on token ids [S, L], at least two a sequence, into the folder `out`.

    At most `memory` bytes are used (by default all that this machine allows). An existing adapter is replaced only with
    `overwrite`, and nothing but an adapter is.

    Raises ValueError where the sequences exceed the model's context, no linear matches, the memory is too little, or a
    loss is not finite. Also raises it where an interrupted run of this output had other settings, was made elsewhere or
    left no undamaged save.
    """
    if ids.shape[1] < 2:
        raise UserError("text_too_short", "sequences of one token have no next token to learn from")
    refuse_file(base)
    if base.resolve().is_relative_to(out.resolve()):
        raise UserError(
            "output_is_source", f"{out} would replace the model that it is trained on: choose another output"
        )
    report = progress or (lambda stage, done, total: None)
    checkpoint = Checkpoint.open(base)
    within_context(ids.shape[1], checkpoint.config, LEARNED)
    within_vocabulary(ids, checkpoint.config.vocab_size, "learned")
    hashes = checkpoint.folder.source_hashes(lambda done, total: report("hashing", done, total))
    about = receipt.environment() | asdict(options)
    about |= {"targets": list(options.targets), "base": hashes, "text": token_hash(ids)}
    with atomic_folder(out, overwrite, known_by=lora.CONFIG) as work, torch.inference_mode(False), torch.enable_grad():
        if not resume:
            work.clear()
        learner = _Learner(checkpoint, options)
        sequences = max(1, options.batch // ids.shape[1])
        learner.fit(sequences * ids.shape[1], sum(p.numel() for p in learner.parameters()), memory, "training")
        saves = Saves(work.state, about, resume)
        losses = _train(learner, ids, options, sequences, saves, report)
        _write(work.out, learner, options, receipt.known(base))
    return FineTuned(out, sum(p.numel() for p in learner.parameters()), tuple(losses), tuple(saves.notes))


class _Learner(WholeModel):
    """A frozen model with an adapter on every linear that matches: A [r, I] and B [O, r] by the linear's name."""

    def __init__(self, checkpoint: Checkpoint, options: FineTuning) -> None:
        super().__init__(checkpoint)
        self._scale = options.alpha / options.rank
        names = all_compressible(self.config)
        chosen = {name for name in names if any(fnmatch.fnmatchcase(name, each) for each in options.targets)}
        if not chosen:
            raise UserError(
                "name_unknown", f"no linear matches {', '.join(options.targets)}: there are {', '.join(names[:7])} ..."
            )
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        self._by_block: list[list[Linear]] = []
        for block in self.blocks:
            self._by_block.append([linear for linear in block.linears() if linear.name in chosen])
            for linear in self._by_block[-1]:
                rows, columns = linear.shape
                first = _uniform(options.seed, len(self.factors), (options.rank, columns)) / math.sqrt(columns)
                self.factors[linear.name] = (first.requires_grad_(), torch.zeros(rows, options.rank).requires_grad_())

    def parameters(self) -> list[Tensor]:
        return [each for pair in self.factors.values() for each in pair]

    def install(self, layer: int) -> None:
        if layer < len(self._by_block):
            for linear in self._by_block[layer]:
                down, up = self.factors[linear.name]
                linear.adapter = Adapter(down, up * self._scale)


def _uniform(seed: int, stream: int, shape: tuple[int, int]) -> Tensor:
    """Return float32 numbers in [-1, 1), drawn from a counter of (seed, stream)."""
    words = np.random.Philox(key=np.array([seed, stream], dtype=np.uint64), counter=np.array([0, 0, 3, 0]))
    raw = np.asarray(words.random_raw(math.prod(shape))) >> np.uint64(11)
    return torch.from_numpy((raw.astype(np.float64) * 2.0**-52 - 1).astype(np.float32)).view(shape)


def _train(
    learner: _Learner, ids: Tensor, options: FineTuning, sequences: int, saves: Saves, report: Progress
) -> list[float]:
    """Train from the beginning, or from the save of an earlier run; return the loss of every step."""
    parameters = learner.parameters()
    adam = torch.optim.Adam(parameters, lr=options.rate)
    losses = saves.resume(parameters, adam)
    plan = [
        order[at : at + sequences]
        for epoch in range(options.epochs)
        for order in [shuffled(range(len(ids)), options.seed, epoch)]
        for at in range(0, len(order), sequences)
    ]
    for step in range(len(losses), len(plan)):
        some = ids[plan[step]]
        for group in adam.param_groups:
            group["lr"] = options.rate * schedule((step + 0.5) / len(plan))
        adam.zero_grad(set_to_none=True)
        losses.append(learner.learn(some, _next_token(some)))
        if not math.isfinite(losses[-1]):
            raise UserError(
                "training_diverged", f"the loss of step {step + 1} is {losses[-1]}: a smaller rate may help"
            )
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        adam.step()
        if (step + 1) % options.save_every == 0 and step + 1 < len(plan):
            saves.put(parameters, adam, losses)
        report("training", step + 1, len(plan))
    return losses


def _next_token(ids: Tensor) -> Callable[[Tensor, slice], Tensor]:
    """Return the loss of some rows: their share of the mean next-token loss over all of the sequences [S, L]."""
    wanted = F.pad(ids[:, 1:], (0, 1), value=NO_LABEL).reshape(-1)
    count = len(ids) * (ids.shape[1] - 1)
    return lambda logits, rows: F.cross_entropy(logits, wanted[rows], ignore_index=NO_LABEL, reduction="sum") / count


def _write(folder: Path, learner: _Learner, options: FineTuning, base: list[str]) -> None:
    """Write the adapter in PEFT's form, with the name of its base."""
    tensors: dict[str, Tensor] = {}
    for name, (down, up) in learner.factors.items():
        tensors |= {f"{lora.PREFIX}{name}{lora.DOWN}": down.detach(), f"{lora.PREFIX}{name}{lora.UP}": up.detach()}
    files = plan_files({name: Part("float32", tuple(t.shape)) for name, t in tensors.items()}, 1 << 62)
    with ShardWriter(folder, files) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.finish()
    (folder / files[0].name).rename(folder / lora.WEIGHTS)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "r": options.rank,
        "lora_alpha": options.alpha, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "use_rslora": False, "inference_mode": True, "target_modules": sorted(learner.factors),
    }  # fmt: skip
    (folder / lora.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if base:
        (folder / lora.BASE).write_text(json.dumps({"receipts": base}) + "\n")
