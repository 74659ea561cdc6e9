"""The draft model of speculative decoding beside its target: whether it fits, the memory it takes, and its loading."""

from __future__ import annotations

from pathlib import Path

from attar.checkpoints import vocabulary
from attar.checkpoints.sources.opening import stored
from attar.engine.loader import LoadedModel, load_model
from attar.errors import UserError
from attar.kv import schemes
from attar.plan import fit as planning
from attar.plan.costs import BLOCK
from attar.plan.fit import CacheLimits, Deployment
from attar.plan.steps import StepLimits
from attar.sampling.drafters.model import ModelDrafter, blocks_for
from attar.text.tokenizer import Tokenizer


def check_same_tokens(target: Tokenizer, draft: Tokenizer, size: int) -> None:
    """Raise ValueError, naming the first difference, unless both tokenizers have the same tokens, up to `size` of
    them."""
    for index in range(size):
        ours, theirs = target.id_to_bytes(index), draft.id_to_bytes(index)
        if ours != theirs:
            raise UserError(
                "option_conflict",
                f"the draft model has another tokenizer: token {index} is {theirs[:40]!r}, and {ours[:40]!r} in the "
                "model that it drafts for",
            )


def memory_bytes(path: Path, context: int, sequences: int, threads: int) -> int:
    """Return the bytes that a draft model takes: weights, a step, and its cache. Raises ValueError where it cannot be
    read."""
    config, storage = stored(path)
    own = min(context, config.context)
    blocks = blocks_for(own, sequences, BLOCK)
    limits = StepLimits(rows=512, sequences=sequences, drafts=sequences, threads=threads)
    deployment = Deployment(config, storage, schemes.scheme("float32"))
    found = planning.fit(deployment, 0, own, CacheLimits(blocks * BLOCK), limits)
    return -found.unused - found.processes


def load_drafter(
    path: Path, target: LoadedModel, context: int, sequences: int, *, activations: str = "int8g128", verify: bool = True
) -> ModelDrafter:
    """Load the draft model at `path` for a target on CPUs, in one process.

    Raises ValueError for a target elsewhere, another tokenizer, fewer tokens than the target's logits have, and as
    `load_model`.
    """
    if target.executor is not None or target.decoder.device.type != "cpu":
        raise UserError("option_conflict", "a draft model runs beside a model on CPUs in one process: use draft suffix")
    config, _ = stored(path)
    size = target.decoder.config.vocab_size
    if config.vocab_size < size:
        raise UserError(
            "option_conflict",
            f"the draft model's vocabulary of {config.vocab_size} is smaller than the {size} of the model that it "
            "drafts for",
        )
    if target.has_tokenizer != vocabulary.has_tokenizer(path):
        raise UserError("option_conflict", "one of the two models has no tokenizer: a draft model shares its target's")
    if target.has_tokenizer:
        check_same_tokens(target.tokenizer, vocabulary.tokenizer(path), target.tokenizer.vocab_size)
    draft = load_model(path, activations=activations, verify=verify)
    return ModelDrafter(draft.decoder, context, sequences, size)
