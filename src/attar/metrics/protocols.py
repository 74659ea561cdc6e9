"""How a measurement was made, as reports state it: figures compare only under one protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attar.metrics import greedy
from attar.metrics.bootstrap import LEVEL, RESAMPLES, SEED


@dataclass(frozen=True, slots=True)
class Protocol:
    """The way a text was cut. `bos` is the token put in front of every window, None where there was none; `prompts` is
    the number of prompts that were continued greedily."""

    context: int
    stride: int
    bos: int | None
    windows: int
    prompts: int = 0

    def to_dict(self) -> dict[str, Any]:
        every = "every token once" if self.bos is not None else "every token once but the first of each text"
        past = "" if self.stride == self.context else ", by the first window that holds it"
        return {
            "context": self.context,
            "stride": self.stride,
            "bos": self.bos,
            "windows": self.windows,
            "counted": every + past,
            "intervals": f"{LEVEL:.0%} bootstrap over windows, {RESAMPLES} resamples, seed {SEED}",
            **({"greedy": self.greedy} if self.prompts else {}),
        }

    def lines(self, tokens: int) -> list[str]:
        """Return lines for people about the measurement of `tokens` tokens."""
        bos = "no BOS" if self.bos is None else f"BOS {self.bos} first"
        windows = f"{self.windows} window{'s' * (self.windows != 1)}"
        cut = f"{tokens} tokens in {windows} of {self.context}, stride {self.stride}, {bos}"
        return [f"{cut}; {self.to_dict()['counted']}", *([self.greedy] if self.prompts else [])]

    @property
    def greedy(self) -> str:
        return f"{self.prompts} prompts of {greedy.PROMPT} tokens, continued by {greedy.LENGTH}"


@dataclass(frozen=True, slots=True)
class ImageProtocol:
    """The way that pairs of images and texts were measured. `rows` counts those of all images."""

    images: int
    rows: int
    bos: int | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": self.images,
            "image_rows": self.rows,
            "bos": self.bos,
            "counted": "every token of the text behind its image, special tokens beside the image apart",
            "intervals": f"{LEVEL:.0%} bootstrap over images, {RESAMPLES} resamples, seed {SEED}",
        }

    def lines(self, tokens: int) -> list[str]:
        """Return lines for people about the measurement of `tokens` tokens."""
        bos = "no BOS" if self.bos is None else f"BOS {self.bos} first"
        return [f"{tokens} tokens behind {self.images} images of {self.rows} rows, {bos}"]
