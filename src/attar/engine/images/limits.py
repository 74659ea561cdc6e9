"""What images do not go with yet, said in one place, and the memory that they take."""

from __future__ import annotations

from pathlib import Path

from attar.checkpoints.sources.vision import StoredTower, tower_at
from attar.errors import UserError
from attar.kv import schemes
from attar.model.vision.against import Beside, against
from attar.model.vision.config import VisionConfig
from attar.plan.vision import TowerWeights
from attar.protocol.settings import Settings
from attar.protocol.speculation import DRAFTERS
from attar.sampling.drafters.drafter import Drafter

NO_TENSORS = "the model's files lack the vision tower"


def against_images(config: VisionConfig, device: str, processes: int, draft: str | None, other: Beside) -> str | None:
    """Return a clause that says why requests have no images, such as a setting; None where they may have some.

    `processes` are those that share the model.
    """
    if device != "cpu":
        return f"--device {device}: images are computed on CPUs only"
    if processes > 1:
        return "--tp and --pp: images are computed in one process only"
    if draft is not None and draft not in DRAFTERS:
        return f"--draft {draft}: with images drafts come from {' or '.join(DRAFTERS)}"
    options = {
        "--kv-eviction": Beside(evicts=other.evicts),
        "--sparse-attention and --sparse-prefill": Beside(few=other.few),
        f"--kv {other.scheme.name if other.scheme else ''}": Beside(scheme=other.scheme),
    }
    found = ((option, against(config, each)) for option, each in options.items())
    return next((f"{option}: {why}" for option, why in found if why is not None), None)


def tower_of(path: Path) -> tuple[VisionConfig | None, str]:
    """Return the vision tower that a checkpoint has, None without one, and why one that there is cannot be used."""
    tower, why = _found(path)
    return None if tower is None else tower.config, why


def tower_weights(path: Path, dtype: str, whole: bool = True) -> tuple[TowerWeights | None, str]:
    """Return the weights of the vision tower that a checkpoint has, for plans, from headers alone: None without one,
    and why one that there is cannot be used. `dtype` is that of tensors which the files lack. Without `whole`, headers
    of GGUF files may be all there is. Raises CheckpointError for tensors that loading refuses."""
    tower, why = _found(path, whole)
    return None if tower is None else tower.weights(dtype), why


def _found(path: Path, whole: bool = True) -> tuple[StoredTower | None, str]:
    try:
        return tower_at(path, whole), ""
    except UserError as error:
        return None, str(error)


def no_images(settings: Settings, config: VisionConfig) -> str | None:
    """Return why an engine of these settings takes no images, where the model has a tower; None where it does."""
    if not settings.image_cache:
        return "--image-cache 0"
    # Ids of images are one process's own, so no block with an image may leave it.
    if settings.cache_dir is not None:
        return "--cache-dir: blocks of images stay in their engine"
    if settings.role != "both":
        return f"--role {settings.role}: blocks of images stay in their engine"
    few = bool(settings.sparse_attention or settings.sparse_prefill)
    other = Beside(bool(settings.kv_eviction), few, None if settings.kv is None else schemes.scheme(settings.kv))
    return against_images(config, settings.device, settings.tp * settings.pp, settings.draft, other)


def check_drafter(drafter: Drafter | None) -> None:
    """Raise UserError where a drafter would read the tokens of images, for which it has no features."""
    if drafter is not None and drafter.name not in DRAFTERS:
        message = f"the drafter {drafter.name} reads no images: with images drafts come from {' or '.join(DRAFTERS)}"
        raise UserError("option_conflict", message)
