"""How a checkpoint wants images: sizes and tiles, and the tokens that stand for an image in a prompt.

Read from `preprocessor_config.json`, `processor_config.json` and `config.json`, as transformers' processors read them.
Rescaling and normalisation are the vision tower's, and are not read here. Files of a model are untrusted: every number
has bounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from attar import strict_json
from attar.errors import UserError
from attar.protocol.image_limits import MAX_ROWS

PREPROCESSOR, PROCESSOR = "preprocessor_config.json", "processor_config.json"
MAX_CONFIG = 8 << 20  # bytes of a file
MAX_SIDE = 4096  # pixels
MAX_RESIZED = 16_000_000  # pixels that an image may be resized to
BICUBIC, BILINEAR, LANCZOS = 3, 2, 1  # Pillow's numbers

Family = Literal["idefics3", "llava", "llava_downsample", "llava_next", "qwen2_vl", "gemma3"]
FAMILIES: dict[str, Family] = {
    "idefics3": "idefics3", "smolvlm": "idefics3", "llava": "llava", "llava_next": "llava_next",
    "llava_downsample": "llava_downsample",
    "qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2_vl", "gemma3": "gemma3",
}  # fmt: skip
"""Preprocessing by `model_type`: the reader's method."""


@dataclass(frozen=True, slots=True)
class PixelSettings:
    """How pixels of an image become tiles. Sizes are (height, width)."""

    family: Family
    resample: int
    edge: int = 0  # pixels of the longest side (Idefics3), or of the shortest
    size: tuple[int, int] | None = None  # exact, in place of `edge`
    crop: tuple[int, int] | None = None  # from the middle, after resizing
    square: tuple[int, int, int] | None = None  # colour of the margins that make an image square before it is resized
    tile: int = 0  # pixels of a tile's sides
    split: bool = True  # whether Idefics3 has more than the global tile
    pinpoints: tuple[tuple[int, int], ...] = ()  # resolutions of LLaVA-NeXT
    patch: int = 0  # pixels of a patch's sides
    merge: int = 1  # patches of Qwen2-VL that become one row, in each direction
    min_pixels: int = 0
    max_pixels: int = 0

    def json(self) -> bytes:
        """Return the settings as JSON, equal for equal settings: part of an image's digest."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> PixelSettings:
        """Return the settings that `json` has written."""
        pairs = {name: value[name] and tuple(value[name]) for name in ("size", "crop", "square")}
        return cls(**{**value, **pairs, "pinpoints": tuple((high, wide) for high, wide in value["pinpoints"])})


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Settings of images of a model.

    image_token: id that stands in the prompt once for each feature row. place_token: id of the token that chat
    templates write for an image. end_token: id behind the rows, where there is one. tile_rows: feature rows of one
    tile; for Qwen2-VL they follow from the patches.
    """

    pixels: PixelSettings
    image_token: int
    place_token: int
    end_token: int | None
    tile_rows: int


def read_settings(folder: Path) -> ImageSettings | None:
    """Read the settings of a checkpoint's folder; None where it is no vision-language model, or has no such files.

    Raises UserError: `config_invalid` for values out of bounds, `feature_unsupported` for what is not built.
    """
    config = _read(folder / "config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or not isinstance(config.get("vision_config"), dict):
        return None
    processor = _read(folder / PROCESSOR)
    given = _read(folder / PREPROCESSOR) or processor.get("image_processor")
    if not isinstance(given, dict) or not given:
        return None
    reader = _Reader(config, processor, given)
    return getattr(reader, family)()  # type: ignore[no-any-return]


class _Reader:
    """Reads the settings of one family, a method each."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        self.config, self.processor, self.given = config, processor, given
        self.vision: Mapping[str, Any] = config["vision_config"]
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if given.get(name) is False:
                raise _unsupported(f"{name} = false")

    def idefics3(self) -> ImageSettings:
        size, tiles = self._size("size", {"longest_edge": 4 * 364}), self._size("max_image_size", {"longest_edge": 364})
        pixels = PixelSettings(
            "idefics3", self._resample(LANCZOS), edge=_whole(size, "longest_edge", MAX_SIDE),
            tile=_whole(tiles, "longest_edge", MAX_SIDE), split=self.given.get("do_image_splitting") is not False,
        )  # fmt: skip
        scale = _whole(self.config, "scale_factor", 64, 2)
        side = _whole(self.vision, "image_size", MAX_SIDE, 224) // self._patch()
        rows = side * side // (scale * scale)
        return self._made(pixels, _whole(self.processor, "image_seq_len", MAX_ROWS, rows or 1))

    def llava(self) -> ImageSettings:
        pixels = self._clip("llava")
        high, wide = pixels.crop or pixels.size or (0, 0)
        return self._made(pixels, (high // pixels.patch) * (wide // pixels.patch) + self._extra())

    def llava_downsample(self) -> ImageSettings:
        pixels, factor = self._clip("llava"), _whole(self.config, "downsample_factor", 64, 2)
        high, wide = (-(-side // pixels.patch // factor) for side in pixels.crop or pixels.size or (0, 0))
        return self._made(pixels, high * wide)

    def llava_next(self) -> ImageSettings:
        clip = self._clip("llava_next")
        tile = (clip.crop or clip.size or (0, 0))[0]
        if (tile, tile) != (clip.crop or clip.size) or (clip.edge or tile) != tile:
            raise _invalid("size and crop_size of LLaVA-NeXT are one square")
        points = self.given.get("image_grid_pinpoints") or self.config.get("image_grid_pinpoints") or _PINPOINTS
        if not isinstance(points, list) or not 1 <= len(points) <= 64:
            raise _invalid("image_grid_pinpoints is a list of 1 to 64 resolutions")
        found = tuple(_pair(each) for each in points)
        if any(high % tile or wide % tile for high, wide in found):
            raise _invalid("image_grid_pinpoints are multiples of the tile")
        pixels = PixelSettings(
            "llava_next", clip.resample, tile=tile, pinpoints=found, patch=clip.patch
        )  # fmt: skip
        return self._made(pixels, (tile // clip.patch) ** 2 + self._extra())

    def qwen2_vl(self) -> ImageSettings:
        size = self._size("size", {})
        least = self.given.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = self.given.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        bounds = {"min_pixels": least, "max_pixels": most}
        pixels = PixelSettings(
            "qwen2_vl", self._resample(BICUBIC), patch=_whole(self.given, "patch_size", 64, 14),
            merge=_whole(self.given, "merge_size", 16, 2), min_pixels=_whole(bounds, "min_pixels", MAX_RESIZED),
            max_pixels=_whole(bounds, "max_pixels", MAX_RESIZED),
        )  # fmt: skip
        if pixels.min_pixels > pixels.max_pixels or (pixels.patch * pixels.merge) ** 2 > pixels.max_pixels:
            raise _invalid("min_pixels is at most max_pixels, which hold a merged patch")
        return self._made(pixels, 0)

    def gemma3(self) -> ImageSettings:
        if self.given.get("do_pan_and_scan"):
            raise _unsupported("do_pan_and_scan")
        size = _pair_of(self._size("size", {"height": 224, "width": 224}))
        rows = _whole(self.config, "mm_tokens_per_image", MAX_ROWS, 256)
        return self._made(
            PixelSettings("gemma3", self._resample(BILINEAR), size=size),
            _whole(self.processor, "image_seq_length", MAX_ROWS, rows),
            _whole(self.config, "boi_token_index", 2**31, 255_999),
            _whole(self.config, "eoi_token_index", 2**31, 256_000),
        )  # fmt: skip

    def _made(
        self, pixels: PixelSettings, rows: int, place: int | None = None, end: int | None = None
    ) -> ImageSettings:
        if rows > MAX_ROWS or (rows < 1 and pixels.family != "qwen2_vl"):
            raise _invalid(f"an image has 1 to {MAX_ROWS} feature rows, not {rows}")
        name = "image_token_id" if "image_token_id" in self.config else "image_token_index"
        token = _whole(self.config, name, 2**31)
        return ImageSettings(pixels, token, token if place is None else place, end, rows)

    def _clip(self, family: Family) -> PixelSettings:
        """Return the settings of CLIP's and SigLIP's image processors: an exact size, or a shortest side and a crop."""
        given, size = self.given, self._size("size", {"shortest_edge": 224})
        exact = _pair_of(size) if "height" in size else None
        crops = given.get("do_center_crop") is not False and ("crop_size" in given or exact is None)
        crop = _pair_of(self._size("crop_size", {"height": 224, "width": 224})) if crops else None
        if exact is None and crop is None:
            raise _unsupported("a size of shortest_edge without do_center_crop")
        edge = 0 if exact else _whole(size, "shortest_edge", MAX_SIDE)
        if crop is not None and max(crop) > (edge or min(exact or crop)):
            raise _unsupported("a crop_size larger than the size")
        colour = None
        if family == "llava" and given.get("do_pad"):
            mean = given.get("image_mean") or (0.48145466, 0.4578275, 0.40821073)
            red, green, blue = (min(255, max(0, int(float(each) * 255))) for each in mean)
            colour = (red, green, blue)
        return PixelSettings(family, self._resample(BICUBIC), edge, exact, crop, colour, patch=self._patch())

    def _patch(self) -> int:
        found = _whole(self.vision, "patch_size", 256, 14)
        return _whole(self.processor, "patch_size", 256, found)

    def _extra(self) -> int:
        """Return the rows of a tile of LLaVA beside its patches: that of the class token is dropped by default."""
        config, processor = self.config, self.processor
        strategy = processor.get("vision_feature_select_strategy") or config.get("vision_feature_select_strategy")
        own = 1 if self.vision.get("model_type", "clip_vision_model") == "clip_vision_model" else 0
        given = processor.get("num_additional_image_tokens")
        extra = own if given is None else _whole(processor, "num_additional_image_tokens", 64, 0, least=0)
        return extra - (strategy in (None, "default"))

    def _size(self, name: str, default: Mapping[str, int]) -> Mapping[str, Any]:
        """Return a size as a mapping; a number means what it means to transformers."""
        value = self.given.get(name) or default
        if isinstance(value, int) and not isinstance(value, bool):
            return {"height": value, "width": value} if name == "crop_size" else {next(iter(default), "size"): value}
        if not isinstance(value, Mapping):
            raise _invalid(f"{name} is a mapping")
        return {key: each for key, each in value.items() if each is not None}

    def _resample(self, default: int) -> int:
        found = _whole(self.given, "resample", 5, default, least=0)
        if found == 0:
            raise _unsupported("resample = 0")
        return found


_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def _read(path: Path) -> Mapping[str, Any]:
    """Return a file's JSON object; an empty one where there is no file. Raises UserError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    try:
        value = strict_json.parse_as_python(data) if len(data) <= MAX_CONFIG else None
    except strict_json.JSONError as error:
        raise UserError("config_invalid", f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError("config_invalid", f"{path} is no JSON object of at most {MAX_CONFIG >> 20} MiB")
    return value


def _whole(mapping: Mapping[str, Any], name: str, most: int, default: int | None = None, least: int = 1) -> int:
    value = mapping.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _invalid(f"{name} is an integer from {least} to {most}, not {value!r:.40}")
    return value


def _pair_of(size: Mapping[str, Any]) -> tuple[int, int]:
    return _whole(size, "height", MAX_SIDE), _whole(size, "width", MAX_SIDE)


def _pair(value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise _invalid("a resolution is a height and a width")
    return _pair_of({"height": value[0], "width": value[1]})


def _invalid(what: str) -> UserError:
    return UserError("config_invalid", f"settings of images: {what}")


def _unsupported(what: str) -> UserError:
    return UserError("feature_unsupported", f"settings of images: {what} is not supported")
