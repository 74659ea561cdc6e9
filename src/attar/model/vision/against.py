"""What requests with images do not go with, because of the model's vision tower. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from attar.kv.schemes import KvScheme
from attar.model.vision.config import VisionConfig


class Beside(NamedTuple):
    """Settings that some towers do not go with: whether requests may drop keys, whether rows read few keys, and the
    scheme of the KV cache, None for the lossless one."""

    evicts: bool = False
    few: bool = False
    scheme: KvScheme | None = None


def against(config: VisionConfig, beside: Beside) -> str | None:
    """Return why requests with images do not go with some settings; None where they do."""
    if config.sections and beside.evicts:
        return "tokens have positions by time, height and width"
    if config.bidirectional and (beside.few or (beside.scheme is not None and beside.scheme.recent)):
        return "rows of one image see each other"
    return None
