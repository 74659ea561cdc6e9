"""What a compressed vision-language model keeps as it is: its vision tower and its projector."""

from __future__ import annotations

from collections.abc import Mapping

from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.recipe.recipe import Recipe
from attar.errors import UserError
from attar.model.vision.wrappers import OUTSIDE


def copied(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the modules of the checkpoint that belong to no language model, each with the dtypes of its tensors."""
    folder, found = checkpoint.folder, dict[str, str]()
    for module in OUTSIDE.get(checkpoint.config.architecture, ()):
        tensors = [name for name in folder.names() if module in name.split(".")]
        if tensors:
            found[module] = " and ".join(sorted({folder.info(name).dtype for name in tensors}))
    return found


def note(copied: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sentence of `copied` for the model card; () where nothing is copied."""
    if not copied:
        return ()
    each = ", ".join(f"{module} ({dtypes})" for module, dtypes in copied.items())
    return (f"The language model alone is compressed; copied as they are: {each}.",)


def check(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Raise ValueError where a recipe changes what the projector's output means to the language model."""
    architecture = checkpoint.config.architecture
    if architecture not in OUTSIDE:
        return
    if recipe.rotate is not None:
        raise UserError(
            "feature_unsupported",
            f"{recipe.name}: rotations turn the hidden states that the projector of {architecture} gives: "
            "not supported for models with a vision tower",
        )
    if recipe.structured is not None:
        raise UserError(
            "feature_unsupported", f"{recipe.name}: {architecture}: pruning of heads is not supported with a tower"
        )
