"""Draft heads beside their target: the memory that one takes, and its loading."""

from __future__ import annotations

from pathlib import Path

from attar.checkpoints.drafts import eagle as eagle_files
from attar.checkpoints.drafts import eagle1, early_exit, files, medusa
from attar.checkpoints.drafts.files import HeadFolder, Kind
from attar.checkpoints.sources.opening import stored
from attar.engine.loader import LoadedModel
from attar.errors import UserError
from attar.kernels import dispatch
from attar.kv import schemes
from attar.model.drafts.early_exit import first_layers
from attar.plan import costs, steps
from attar.plan.costs import BLOCK
from attar.plan.steps import StepLimits
from attar.sampling.drafters import eagle
from attar.sampling.drafters.drafter import Drafter
from attar.sampling.drafters.eagle import EagleDrafter
from attar.sampling.drafters.early_exit import EarlyExitDrafter
from attar.sampling.drafters.medusa import MedusaDrafter
from attar.sampling.drafters.model import ROWS, blocks_for

NUMBER = 4  # bytes of a number in memory


def memory_bytes(path: Path, target: Path, context: int, limits: StepLimits) -> int:
    """Return the bytes that a head takes: its numbers, twice while they are laid out, the states and logits of a
    step, and a cache; for an early exit, a step of the model's first layers. Raises CheckpointError where its folder
    cannot be read, or does not fit the model's layers."""
    config, storage = stored(target)
    numbers, _ = files.size(path)
    states = 2 * config.hidden * (limits.rows + limits.sequences)
    own = NUMBER * (2 * numbers + states + 4 * config.vocab_size * (limits.sequences + limits.drafts))
    kind = files.kind_of(path)
    if kind == "medusa":
        return own
    if kind == "exit":
        layers = early_exit.exit_layer(HeadFolder(path), config.layers)
        first, most = first_layers(config, layers), min(context, config.context)
        step = StepLimits(rows=ROWS, sequences=limits.sequences, drafts=limits.sequences, threads=limits.threads)
        cache = blocks_for(most, limits.sequences, BLOCK) * costs.block_bytes(first, schemes.scheme("float32"))
        return 2 * NUMBER * numbers + cache + steps.largest_step(first, storage, step, most).total
    waiting = 3 * NUMBER * config.hidden * (eagle.ROWS + limits.rows) * limits.sequences
    return (
        own
        + waiting
        + 2 * NUMBER * config.hidden * BLOCK * (eagle.blocks_for(context, limits.sequences) + eagle.SCRATCH)
    )


def load_head(
    path: Path,
    kind: Kind,
    target: LoadedModel,
    context: int,
    sequences: int,
    activations: str = "int8g128",
    trees: bool = False,
) -> Drafter:
    """Load the head at `path` for a target on CPUs, in one process, for sequences of up to `context` tokens. With
    `trees` it makes trees, which an exit does not.

    Raises ValueError for a target elsewhere, and CheckpointError for a head of another shape.
    """
    if target.executor is not None or target.decoder.device.type != "cpu":
        raise UserError("option_conflict", "a draft head runs beside a model on CPUs in one process: use draft suffix")
    decoder = target.decoder
    store = None if decoder.store is None else dispatch.store(activations)
    if kind == "medusa":
        return MedusaDrafter(medusa.read(path, decoder, store), decoder.final_norm, decoder.config.layers, trees)
    if kind == "exit":
        made = early_exit.read(path, decoder, store)
        return EarlyExitDrafter(made, context, sequences, decoder.config.vocab_size)
    blocks = eagle.blocks_for(context, sequences)
    read = eagle1.read if kind == "eagle" else eagle_files.read
    return EagleDrafter(read(path, decoder, store), context, blocks, decoder.lossless, trees)
