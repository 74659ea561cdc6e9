"""What images do not go with yet, said in one place: of a server's settings, and of an engine's."""

from __future__ import annotations

from attar.errors import UserError
from attar.protocol.speculation import DRAFTERS
from attar.sampling.drafters.drafter import Drafter


def against_images(device: str, processes: int, draft: str | None) -> str | None:
    """Return the sentence that says with which setting requests have no images; None where they may have some."""
    if device != "cpu":
        return f"--device {device}: images are computed on CPUs only"
    if processes > 1:
        return "--tp and --pp: images are computed in one process only"
    if draft is not None and draft not in DRAFTERS:
        return f"--draft {draft}: with images drafts come from {' or '.join(DRAFTERS)}"
    return None


def check_drafter(drafter: Drafter | None) -> None:
    """Raise UserError where a drafter would read the tokens of images, for which it has no features."""
    if drafter is not None and drafter.name not in DRAFTERS:
        message = f"the drafter {drafter.name} reads no images: with images drafts come from {' or '.join(DRAFTERS)}"
        raise UserError("option_conflict", message)
