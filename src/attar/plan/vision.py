"""A vision tower and its projector before anything is loaded: bytes of their weights, and time of an image.

A start lays weights out for the kernels: dense linears in their stored dtype, quantized ones as their scheme's layout,
all else in float32. A tower that is stored in bfloat16 is computed in bfloat16 where the processor has AMX; all of it
is then held in bfloat16.

    time of an image = products + attention + overhead

The kernels multiply by the weights of a tower as by those of a decoder, about `tiles.TILE` rows at a time, so the
profile's curves hold. On AMX products count by the rate of those in bfloat16, which a profile has where it was measured
on such a processor. Attention counts by its multiply-adds at the rate of products, and norms and activations as those
of a decoder's rows. Neither was measured of towers, so both may be half or double in the range. Torch-free.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from attar.errors import UserError
from attar.formats.scheme import ITEM_BITS, Scheme, scale_dtype
from attar.images.geometry import layout
from attar.images.settings import ImageSettings
from attar.model.vision.config import VisionConfig
from attar.model.vision.tensors import linears, tensors
from attar.model.vision.tiles import (
    Product,
    Tiles,
    attention_multiply_adds,
    products,
    rows_of,
    slices,
    tower_rows,
)
from attar.plan import costs
from attar.plan.rates.profile import MachineProfile
from attar.plan.rates.step_time import Evidence, product_seconds

UNMEASURED = 1.0  # relative error of parts that no rate is measured for: half to double
FEATURE = 4  # bytes of an element of a feature row, which is float32 on CPUs
AMX = "amx"  # level of instructions of a profile whose processor multiplies bfloat16 by AMX
SIZE = (768, 1024)  # height and width of an image, where none is given

QUANTIZED = ("w8", "w8a8")  # what `attar compress --vision` makes of linears

Stored = str | Scheme
"""The dtype of a dense tensor, or the scheme of a linear's weight."""


@dataclass(frozen=True)
class TowerWeights:
    """A tower and its projector as they are stored: the dtype or scheme of each tensor by part and name, as
    `model.vision.tensors.tensors` names them, and `dtype` of those that are not named."""

    config: VisionConfig
    dtype: str
    stored: Mapping[tuple[str, str], Stored]

    def of(self, part: str, name: str) -> Stored:
        """Return the dtype or scheme of a tensor."""
        return self.stored.get((part, name), self.dtype)

    def quantized(self, scheme: Scheme) -> TowerWeights:
        """Return the weights with every linear in `scheme`, as `attar compress --vision` writes them."""
        weights = ((part, f"{name}.weight") for part, name, _ in linears(self.config))
        new = {
            key: scheme.with_scale_dtype(scale_dtype(dtype))
            for key in weights
            if isinstance(dtype := self.of(*key), str)
        }
        return replace(self, stored={**self.stored, **new})

    @property
    def size(self) -> int:
        """Return the bytes on disk of the weights that run. A file may have more, such as layers without a use."""
        total = 0
        for part, name, shape in tensors(self.config):
            stored = self.of(part, name)
            if isinstance(stored, Scheme):
                total += stored.bytes((shape[0], shape[1]))
            else:
                total += math.prod(shape) * ITEM_BITS[stored] // 8
        return total

    def choices(self, amx: bool) -> dict[str, int]:
        """Return the bytes of the weights once they are loaded: as they are `stored`, and as `attar compress --vision`
        would write them, where no linear is quantized yet."""
        found = {"stored": self.bytes(amx)}
        if any(isinstance(each, Scheme) for each in self.stored.values()):
            return found
        return found | {name: self.quantized(Scheme.parse(name)).bytes(amx) for name in QUANTIZED}

    def on_amx(self, amx: bool) -> bool:
        """Return whether the tower is computed in bfloat16, on a processor with `amx` or without."""
        return amx and all(self.of(part, name) == "bfloat16" for part, name, _ in tensors(self.config))

    def bytes(self, amx: bool) -> int:
        """Return the bytes of the weights once they are loaded."""
        if self.on_amx(amx):
            return 2 * self._held()
        matrices = {(each.part, each.name): each for each in products(self.config, _one_tile(self.config))}
        total = 4 * self._held(matrices)
        for (part, name), each in matrices.items():
            stored = self.of(part, name)
            if isinstance(stored, Scheme):
                total += costs.memory_bytes(each.outputs, each.columns, stored)
            else:  # Gemma 3's projector is no module, and is turned first
                dtype = "float32" if name == "mm_input_projection_weight" else scale_dtype(stored)
                total += costs.read_bytes(each.outputs, each.columns, None, dtype)
        return total

    def _held(self, but: Collection[tuple[str, str]] = ()) -> int:
        """Return the number of elements of all tensors that are not in `but`, without the class row: loading
        adds it to its position."""
        found = sum(math.prod(shape) for part, name, shape in tensors(self.config) if (part, name) not in but)
        return found - self.config.hidden * self.config.class_token


def _one_tile(config: VisionConfig) -> Tiles:
    """Return one tile of the smallest size that a tower takes. The shapes of weights do not depend on the size."""
    side = config.image_size or config.unit
    return Tiles((1, side, side), (1, 1), (side, side))


@dataclass(frozen=True, slots=True)
class ImageLoad:
    """Images of each request: their number, the size of each, its tiles, and its rows in the prompt. Markers that some
    models have around the rows of a tile or an image are text of the prompt, and are not counted."""

    count: int
    tiles: Tiles
    rows: int  # of one image

    @property
    def tokens(self) -> int:
        """Return the positions that the rows of a request's images take in the context, without markers."""
        return self.count * self.rows

    @property
    def least(self) -> int:
        """Return the fewest positions of a request: rows of its images, a token of prompt, and one of answer."""
        return self.tokens + 2

    def feature_bytes(self, config: VisionConfig) -> int:
        """Return the bytes of the features of a request's images."""
        return self.tokens * config.out * FEATURE

    def to_dict(self) -> dict[str, int]:
        """Return the fields as JSON-compatible values."""
        high, wide = self.tiles.size
        found = {"count": self.count, "height": high, "width": wide, "tiles": self.tiles.shape[0], "rows": self.rows}
        return found | {"tokens": self.tokens}

    def __str__(self) -> str:
        high, wide = self.tiles.size
        number, rows = f"{self.count} image{'s' * (self.count > 1)}", f"{self.rows:,} rows"
        pieces = self.tiles.shape[0]
        return f"{number} a request, each of {wide} x {high} pixels: {rows} in {pieces} tile{'s' * (pieces > 1)}"


def images(config: VisionConfig, settings: ImageSettings | None, count: int, size: tuple[int, int]) -> ImageLoad:
    """Return what `count` images of a height and width become.

    Without `settings`, of a config.json alone, only towers that take an image as one tile have a number of rows.
    Raises UserError for others, and for an image that the model does not take.
    """
    if settings is not None:
        found = layout(settings.pixels, *size)
        tiles = Tiles(found.shape, found.grid, size)
    elif config.image_size and not config.newline and config.connector != "shuffle":
        tiles = Tiles((1, config.image_size, config.image_size), (1, 1), size)
    else:
        message = (
            "the rows of an image follow from the model's preprocessor_config.json, which is not beside config.json"
        )
        raise UserError("file_not_found", message)
    return ImageLoad(count, tiles, rows_of(config, tiles))


@dataclass(frozen=True, slots=True)
class EncodingTime:
    """Seconds that a tower takes for the images of a request, and their relative error."""

    load: ImageLoad
    seconds: float
    spread: float
    evidence: Evidence = "fitted"

    @property
    def range(self) -> tuple[float, float]:
        """Return the least and the most seconds."""
        return self.seconds / (1 + self.spread), self.seconds * (1 + self.spread)

    def to_dict(self) -> dict[str, object]:
        """Return the images and the time as JSON-compatible values."""
        low, high = self.range
        found = {"value": self.seconds, "low": low, "high": high, "evidence": self.evidence}
        return {**self.load.to_dict(), "encoding": found}


def encoding(weights: TowerWeights, load: ImageLoad, profile: MachineProfile, amx: bool) -> EncodingTime:
    """Return the time of a request's images. Raises UserError where the profile lacks the rate that it needs."""
    config, shape = weights.config, load.tiles
    overhead = config.layers * profile.overheads.element * tower_rows(config, shape) * config.hidden
    if weights.on_amx(amx):
        if profile.bf16_tiles is None:
            message = (
                "--images: the vision tower is computed in bfloat16 on AMX, and the rates have no such products: "
                "attar bench --rates measures them, where PyTorch has oneDNN"
            )
            raise UserError("option_conflict", message)
        rate = profile.bf16_tiles
        seconds = 2.0 * sum(each.multiply_adds for each in products(config, shape)) / rate.value
        error = rate.spread * seconds
    else:
        rate = profile.bf16
        found = [_product(weights, each, profile) for each in products(config, shape)]
        seconds, error = (sum(part) for part in zip(*found, strict=True))
    beside = overhead + 2.0 * attention_multiply_adds(config, shape) / rate.value
    whole = seconds + beside
    return EncodingTime(load, load.count * shape.shape[0] * whole, (error + UNMEASURED * beside) / whole)


def _product(weights: TowerWeights, product: Product, profile: MachineProfile) -> tuple[float, float]:
    """Return the seconds of one tile's products with a weight, and their error in seconds."""
    stored = weights.of(product.part, product.name)
    scheme, dtype = (stored, "bfloat16") if isinstance(stored, Scheme) else (None, scale_dtype(stored))
    size = product.outputs * product.columns
    read = costs.read_bytes(product.outputs, product.columns, scheme, dtype) / size
    total = error = 0.0
    for rows, times in Counter(each.stop - each.start for each in slices(product.rows)).items():
        each, spread = product_seconds(profile, scheme, read, rows)
        total, error = total + times * size * each, error + times * size * each * spread
    return total, error
