"""The vision tower of a GGUF model: its mmproj file, which lies beside the model's.

llama.cpp keeps tower and projector of a vision-language model in a file of its own, of the architecture `clip`. Here
the mmproj file of MODEL.gguf is mmproj-MODEL.gguf in the same folder, and no other name is looked for. Its metadata
become the same `VisionConfig` and `ImageSettings` that a folder's JSON files become. Both are untrusted: every number
has bounds.

Metadata lack some of what a folder says of pixels: how Idefics3 and Qwen resize, and whether LLaVA crops. They are read
as the defaults of the family; LLaVA's images get margins that make them square, as llama.cpp and LLaVA itself do it.
Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.gguf.parts import part_name
from attar.checkpoints.strict_io import naming
from attar.errors import UserError
from attar.images.settings import BICUBIC, BILINEAR, LANCZOS, MAX_RESIZED, MAX_SIDE, ImageSettings, PixelSettings
from attar.model.fields import COUNT, EPSILON, Fields
from attar.model.vision.config import PATCH, SIDE, Connector, VisionConfig, VisionNames
from attar.protocol.image_limits import MAX_ROWS

PREFIX = "mmproj-"
ARCHITECTURE, KIND = "clip", "clip.projector_type"
AT = "clip.vision"
NAMES = VisionNames(
    ("",), ("",), patch="v.patch_embd", positions="v.position_embd", class_token="v.class_embd", pre_norm="v.pre_ln",
    post_norm="v.post_ln", layer="v.blk.{i}", attention_norm="ln1", feed_forward_norm="ln2",
    qkv=("attn_q", "attn_k", "attn_v"), output="attn_out", up=("ffn_up",), down="ffn_down",
)  # fmt: skip
"""Names of tensors in mmproj files, as the names of a family."""

PROJECTORS: Mapping[Connector, Mapping[str, str]] = {
    "shuffle": {"modality_projection.proj": "mm.model.fc"},
    "mlp": {"linear_1": "mm.0", "linear_2": "mm.2"},
    "merge": {"ln_q": "v.post_ln", "mlp.0": "mm.0", "mlp.2": "mm.2"},
    "pool": {"mm_soft_emb_norm": "mm.soft_emb_norm"},
}
"""Modules of projectors by our names -> their names in files."""

INPUT = "mm_input_projection_weight"  # Gemma 3's, which is no module
_INPUT = "mm.input_projection.weight"
PATCH_WEIGHT = f"{NAMES.patch}.weight"
SECOND_FRAME = f"{PATCH_WEIGHT}.1"
SHORT = 64  # elements of an array that a key of towers may have
QWEN_WINDOW = 112  # pixels of a window's side, where a file says nothing
_FLOATS: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Mmproj:
    """An mmproj file's tower and projector, and how it wants images."""

    path: Path
    config: VisionConfig
    images: ImageSettings


def path_of(model: Path) -> Path:
    """Return the path that the mmproj file of a GGUF model has, whether it is there or not."""
    part = part_name(model)
    return model.with_name(f"{PREFIX}{model.stem if part is None else part.stem}.gguf")


def read(model: Path, whole: bool = True) -> Mmproj | None:
    """Read the mmproj file of a GGUF model; None without one. Without `whole`, the headers of both are enough.

    Raises CheckpointError for a damaged file, and UserError naming the file and the key for a projector that attar does
    not read, for values that are missing or out of bounds, and for a model whose vocabulary lacks an image token.
    """
    path = path_of(model)
    if not path.is_file():
        return None
    file, language = GgufFile(path, whole), GgufFile(model, whole).metadata
    with naming(path):
        return of(path, file.metadata, file.names(), language)


def stored(model: Path, modules: Sequence[str]) -> dict[str, str]:
    """Return the dtypes that the mmproj file of a GGUF model has of each of `modules`, as `attar compress` writes it:
    tower and projector, or the one that is both, by their names in a folder. Empty without such a file."""
    path = path_of(model)
    if not path.is_file() or not modules:
        return {}
    file, found = GgufFile(path), dict[str, set[str]]()
    for name in file.names():
        module = modules[-1 if name.startswith("mm.") else 0]
        found.setdefault(module, set()).add(_FLOATS.get(kind := file.info(name).kind.name, kind))
    return {module: " and ".join(sorted(found[module])) for module in modules if module in found}


def of(path: Path, metadata: Mapping[str, Any], names: Collection[str], language: Mapping[str, Any]) -> Mmproj:
    """Return what the metadata and tensor names of an mmproj file say, beside the metadata of its language model.
    Raises UserError as `read`."""
    f = Fields(_plain(metadata), where="metadata")
    if f.get("general.architecture") != ARCHITECTURE:
        raise f.error("general.architecture", f"must be {ARCHITECTURE} in an mmproj file", "file_wrong_kind")
    reader = f.choice(KIND, READERS)
    key = f"{language.get('general.architecture')}.embedding_length"
    out = Fields(language, where="metadata of the model").integer(key)
    tower, pixels, rows, words = reader(f, frozenset(names), out)
    tokens = _tokens(language, words)
    place, image, end = (tokens.get(word) for word in (words.place, words.image, words.end))
    assert image is not None
    assert place is not None
    return Mmproj(path, replace(tower, image_token=image), ImageSettings(pixels, image, place, end, rows))


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata with short arrays as lists. Longer ones stay, and no reader takes them."""
    return {
        key: list(value)
        if isinstance(value, Collection) and not isinstance(value, str) and len(value) <= SHORT
        else value
        for key, value in metadata.items()
    }


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """Tokens of a family: that of a feature row, that which a chat template writes, and that behind the rows."""

    image: str
    place: str
    end: str | None = None


_Read = tuple[VisionConfig, PixelSettings, int, ImageTokens]
"""Tower, pixels, feature rows of a tile, and tokens."""
_Reader = Callable[[Fields, Collection[str], int], _Read]


def _tokens(language: Mapping[str, Any], words: ImageTokens) -> dict[str | None, int]:
    """Return the ids of a family's tokens. Raises UserError where the vocabulary lacks one."""
    wanted = {word for word in (words.image, words.place, words.end) if word is not None}
    found: dict[str | None, int] = {}
    given = language.get("tokenizer.ggml.tokens")
    if isinstance(given, Collection) and not isinstance(given, str):
        for number, token in enumerate(given):
            if token in wanted:
                found.setdefault(token, number)
                if len(found) == len(wanted):
                    break
    if missing := wanted - found.keys():
        said = f"the model's vocabulary lacks {', '.join(sorted(missing))}, which stands for an image"
        raise UserError("config_invalid", said)
    return found


def _base(f: Fields, out: int) -> VisionConfig:
    f = Fields(f.data, {**f.defaults, "clip.use_gelu": False, "clip.use_silu": False}, where=f.where)
    gelu, silu = f.flag("clip.use_gelu"), f.flag("clip.use_silu")
    if gelu and silu:
        raise f.error("clip.use_gelu", "and clip.use_silu are both set")
    return VisionConfig(
        hidden=f.integer(f"{AT}.embedding_length"),
        heads=f.integer(f"{AT}.attention.head_count", high=COUNT),
        intermediate=f.integer(f"{AT}.feed_forward_length"),
        layers=f.integer(f"{AT}.block_count", high=COUNT),
        patch=f.integer(f"{AT}.patch_size", high=PATCH),
        image_size=f.integer(f"{AT}.image_size", high=SIDE),
        out=out,
        connector="mlp",
        factor=1,
        image_token=0,
        activation="gelu_tanh" if gelu else "silu" if silu else "quick_gelu",
        norm_eps=f.number(f"{AT}.attention.layer_norm_epsilon", high=EPSILON),
        mean=_pixels(f, f"{AT}.image_mean"),
        std=f.numbers(f"{AT}.image_std", 3),
        names=NAMES,
    )


def _pixels(f: Fields, key: str) -> tuple[float, ...]:
    least = -1e-9  # a mean may be 0
    return tuple(Fields({key: each}, where=f.where).number(key, low=least, high=255.0) for each in f.items(key, 3))


def _factor(f: Fields, key: str, default: int) -> int:
    return Fields(f.data, {key: default}, where=f.where).integer(key, high=64)


def _rows(f: Fields, rows: int) -> int:
    if not 1 <= rows <= MAX_ROWS:
        raise f.error(f"{AT}.image_size", f"makes {rows} feature rows of a tile, not 1 to {MAX_ROWS}")
    return rows


def _idefics3(f: Fields, names: Collection[str], out: int) -> _Read:
    """Read SmolVLM and Idefics3."""
    factor = f.integer(f"{AT}.projector.scale_factor", high=64)
    base = _base(f, out)
    config = replace(base, connector="shuffle", factor=factor, buckets=True, projector_bias=False)
    key = f"{AT}.preproc_image_size"
    longest = Fields(f.data, {key: 4 * config.image_size}, where=f.where).integer(key, high=MAX_SIDE)
    pixels = PixelSettings("idefics3", LANCZOS, edge=longest, tile=config.image_size)
    return config, pixels, _rows(f, (config.side // factor) ** 2), ImageTokens("<image>", "<image>")


def _gemma3(f: Fields, names: Collection[str], out: int) -> _Read:
    base, factor = _base(f, out), _factor(f, f"{AT}.projector.scale_factor", 4)
    config = replace(base, connector="pool", factor=factor, bidirectional=True, projector_bias=False)
    pixels = PixelSettings("gemma3", BILINEAR, size=(config.image_size, config.image_size))
    words = ImageTokens("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    return config, pixels, _rows(f, (config.side // factor) ** 2), words


def _llava(f: Fields, names: Collection[str], out: int) -> _Read:
    """Read LLaVA-1.5: a file holds the layers that run, and one more where it does not name the last."""
    if "v.image_newline" in names or f.get(f"{AT}.image_grid_pinpoints") is not None:
        raise f.error(KIND, "is mlp with tiles (LLaVA-NeXT): its mmproj files are not read", "feature_unsupported")
    if "mm.1.weight" in names:
        raise f.error(KIND, "is mlp with norms between its layers, which is not read", "feature_unsupported")
    base, key = _base(f, out), f"{AT}.feature_layer"
    layers = base.layers - 1
    if f.get(key) is not None:
        given = [Fields({key: each}, where=f.where).integer(key, high=base.layers) for each in f.items(key)]
        if len(given) != 1:
            raise f.error(key, "must be the number of one layer", "feature_unsupported")
        layers = given[0]
    if layers < 1:
        raise f.error(f"{AT}.block_count", "leaves no layer")
    clip = NAMES.class_token in names
    config = replace(
        base, layers=layers, class_token=clip, patch_bias=f"{NAMES.patch}.bias" in names, post_norm=False,
        projector_bias="mm.0.bias" in names,
    )  # fmt: skip
    red, green, blue = (min(255, max(0, int(each * 255))) for each in config.mean)
    size = (config.image_size, config.image_size)
    pixels = PixelSettings("llava", BICUBIC, size=size, square=(red, green, blue), patch=config.patch)
    return config, pixels, _rows(f, config.side**2), ImageTokens("<image>", "<image>")


def _qwen2(f: Fields, names: Collection[str], out: int) -> _Read:
    base, factor = _base(f, out), _factor(f, f"{AT}.spatial_merge_size", 2)
    config = replace(
        base, image_size=0, connector="merge", factor=factor, frames=2, rope_theta=10000.0, patch_bias=False,
        post_norm=False, sections=True,
    )  # fmt: skip
    least, most = f"{AT}.image_min_pixels", f"{AT}.image_max_pixels"
    bounds = Fields(f.data, {least: 56 * 56, most: 28 * 28 * 1280}, where=f.where)
    pixels = PixelSettings(
        "qwen2_vl", BICUBIC, patch=config.patch, merge=factor, min_pixels=bounds.integer(least, high=MAX_RESIZED),
        max_pixels=bounds.integer(most, high=MAX_RESIZED),
    )  # fmt: skip
    if pixels.min_pixels > pixels.max_pixels or config.unit**2 > pixels.max_pixels:
        raise f.error(most, "must be at least the smallest size, and hold a merged patch")
    return config, pixels, 0, ImageTokens("<|image_pad|>", "<|image_pad|>")


def _qwen25(f: Fields, names: Collection[str], out: int) -> _Read:
    config, pixels, rows, words = _qwen2(f, names, out)
    period, key = f.integer(f"{AT}.n_wa_pattern", high=COUNT), f"{AT}.window_size"
    window = Fields(f.data, {key: QWEN_WINDOW}, where=f.where).integer(key, high=SIDE)
    merged = window // config.factor // config.patch
    if merged < 1:
        raise f.error(key, "is less than one merged patch")
    full = frozenset(range(period - 1, config.layers, period))
    up = replace(NAMES, up=("ffn_gate", "ffn_up"))
    config = replace(
        config, norm="rms", gated=True, window=merged * config.factor, full_layers=full, names=up
    )  # fmt: skip
    return config, pixels, rows, words


READERS: Mapping[str, _Reader] = {
    "idefics3": _idefics3, "gemma3": _gemma3, "mlp": _llava, "qwen2vl_merger": _qwen2, "qwen2.5vl_merger": _qwen25,
}  # fmt: skip
"""Readers by `clip.projector_type`."""


def stored_name(config: VisionConfig, name: str) -> str:
    """Return the name in a file of a tensor that `vision.assembly` asks for by the names of `NAMES`."""
    if name == INPUT:
        return _INPUT
    module, _, part = name.rpartition(".")
    return f"{PROJECTORS[config.connector].get(module, module)}.{part}" if module else name
