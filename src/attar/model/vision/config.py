"""A vision tower and its projector as data: one `VisionConfig` describes every family that the one tower runs.

It is read from config.json, and the pixels' normalisation from preprocessor_config.json. As in `ModelConfig`, a
field's default means "feature off". Files are untrusted: every number has bounds. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from attar.errors import UserError
from attar.model.fields import COUNT, EPSILON, Fields
from attar.model.vision.wrappers import OUTSIDE

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"]
Connector = Literal["shuffle", "mlp", "merge", "pool", "downsample"]

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
    "quick_gelu": "quick_gelu",
}  # fmt: skip
SIDE = 4096  # pixels of a tile's side
PATCH = 256  # pixels of a patch's side
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class VisionNames:
    """Module names of a family's tensors, after the prefix of the tower (`tower`) or of the projector."""

    tower: tuple[str, ...]  # prefixes in circulation
    projector: tuple[str, ...]
    patch: str = "embeddings.patch_embedding"
    positions: str = "embeddings.position_embedding"
    class_token: str = "embeddings.class_embedding"
    pre_norm: str = "pre_layrnorm"  # as published
    post_norm: str = "post_layernorm"
    layer: str = "encoder.layers.{i}"
    attention_norm: str = "layer_norm1"
    feed_forward_norm: str = "layer_norm2"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.out_proj"
    up: tuple[str, ...] = ("mlp.fc1",)
    down: str = "mlp.fc2"


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """A vision transformer and the projector of its patches into a language model of width `out`.

    Raises ValueError on construction where the fields contradict each other.
    """

    hidden: int
    heads: int
    intermediate: int
    layers: int  # those that run; more may be stored
    patch: int  # pixels of a patch's side
    image_size: int  # pixels of a tile's side; 0: any multiple of `unit`
    out: int
    connector: Connector
    factor: int  # patches that become one row, in each direction
    image_token: int
    activation: Activation = "gelu_tanh"
    norm: Literal["rms", "layer"] = "layer"
    norm_eps: float = 1e-6
    gated: bool = False
    patch_bias: bool = True
    class_token: bool = False  # a row before the patches, and a norm before the layers (CLIP)
    post_norm: bool = True
    buckets: bool = False  # positions by fractions of the side (Idefics3)
    frames: int = 1  # copies of the image in time that a patch spans (Qwen: 2)
    rope_theta: float | None = None  # rows turn by their height and width, in place of learned positions
    window: int = 0  # patches of a window's side, outside of `full_layers`; 0: all see all
    full_layers: frozenset[int] = frozenset()
    newline: bool = False  # rows of several tiles end with a learned row (LLaVA-NeXT)
    projector_bias: bool = True
    projector_activation: Activation = "gelu"
    sections: bool = False  # tokens of images have three positions (M-RoPE)
    bidirectional: bool = False  # rows of an image see each other in the language model (Gemma 3)
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    rescale: float = 1 / 255
    names: VisionNames = field(default_factory=lambda: VisionNames((), ()))

    def __post_init__(self) -> None:
        if (problem := self._problem()) is not None:
            raise UserError("config_invalid", f"vision_config: {problem}")

    def _problem(self) -> str | None:
        if self.hidden % self.heads:
            return f"{self.heads} heads do not divide {self.hidden} columns"
        if self.rope_theta is not None and self.hidden // self.heads % 4:
            return f"heads of {self.hidden // self.heads} columns cannot turn by height and width"
        if self.image_size % self.patch and self.connector in ("shuffle", "pool"):
            return f"patches of {self.patch} pixels do not divide a side of {self.image_size}"
        if self.image_size and self.side % self.factor and self.connector != "downsample":
            return f"{self.side} patches of a side cannot be merged by {self.factor}"
        if self.window % self.factor:
            return f"a window of {self.window} patches cannot be merged by {self.factor}"
        return None

    @property
    def side(self) -> int:
        """Patches of a tile's side."""
        return self.image_size // self.patch

    @property
    def rows_side(self) -> int:
        """Rows of a tile's side: blocks of factor x factor patches, of which the last may reach over the margin."""
        return -(-self.side // self.factor)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def unit(self) -> int:
        """Pixels of which each side of an image is a multiple."""
        return self.patch * self.factor


# Reading

_LLAVA_TOWERS = (
    "vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.",
)  # fmt: skip
_LLAVA_PROJECTORS = ("multi_modal_projector.", "model.multi_modal_projector.")
_LLAVA = VisionNames(_LLAVA_TOWERS, _LLAVA_PROJECTORS)
_IDEFICS = VisionNames(("model.vision_model.", "vision_model."), ("model.connector.", "connector."))
_QWEN = VisionNames(
    ("visual.", "model.visual."), ("visual.merger.", "model.visual.merger."), patch="patch_embed.proj",
    layer="blocks.{i}", attention_norm="norm1", feed_forward_norm="norm2", qkv=("attn.qkv",), output="attn.proj",
)  # fmt: skip
_QWEN25 = replace(_QWEN, up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj")

SIGLIP: Mapping[str, object] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_channels": 3,
}  # fmt: skip
_Read = Callable[[Fields, Fields, int], VisionConfig]


def read_vision(
    config: Mapping[str, object], out: int, preprocessor: Mapping[str, object] | None = None
) -> VisionConfig | None:
    """Return the tower and projector that a config.json describes; None for a model without.

    `out` is the width of the language model. Raises ValueError for values that are missing, out of bounds,
    contradictory or not supported.
    """
    names = Fields(config, {"architectures": []}).items("architectures")
    name = next((each for each in names if isinstance(each, str) and each in OUTSIDE), None)
    if name is None:
        name = _OF_KIND.get(str(config.get("model_type")))
    inner = Fields(config).inner("vision_config")
    if name is None or inner is None:
        return None
    defaults, mean, std, read = READERS[name]
    vision = Fields(inner, defaults, where="config.json: vision_config")
    vision.only("num_channels", 3, "images of other than three channels")
    vision.only("in_channels", 3, "images of other than three channels")
    return _normalised(read(Fields(config), vision, out), preprocessor or {}, mean, std)


def _normalised(
    config: VisionConfig, given: Mapping[str, object], mean: tuple[float, ...], std: tuple[float, ...]
) -> VisionConfig:
    defaults: dict[str, object] = {
        "image_mean": list(mean), "image_std": list(std), "do_rescale": True, "do_normalize": True,
        "rescale_factor": 1 / 255,
    }  # fmt: skip
    f = Fields(given, defaults, where="preprocessor_config.json")
    rescale = f.number("rescale_factor", high=1.0) if f.flag("do_rescale") else 1.0
    if not f.flag("do_normalize"):
        return replace(config, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), rescale=rescale)
    means = (Fields({"image_mean": each}, where=f.where) for each in f.items("image_mean", 3))
    least = -1e-9  # a mean may be 0
    shifts = tuple(each.number("image_mean", low=least, high=255.0) for each in means)
    return replace(config, mean=shifts, std=f.numbers("image_std", 3), rescale=rescale)


def _base(f: Fields, v: Fields, out: int, names: VisionNames, token: int) -> VisionConfig:
    f = Fields(f.data, {"image_token": token}, {"image_token": ("image_token_id", "image_token_index")})
    return VisionConfig(
        hidden=v.integer("hidden_size"),
        heads=v.integer("num_attention_heads", high=COUNT),
        intermediate=v.integer("intermediate_size"),
        layers=v.integer("num_hidden_layers", high=COUNT),
        patch=v.integer("patch_size", high=PATCH),
        image_size=v.integer("image_size", high=SIDE),
        out=out,
        connector="mlp",
        factor=1,
        image_token=f.integer("image_token", low=0),
        activation=v.choice("hidden_act", ACTIVATIONS),
        norm_eps=v.number("layer_norm_eps", high=EPSILON),
        names=names,
    )


def _idefics3(f: Fields, v: Fields, out: int) -> VisionConfig:
    """Read SigLIP with patches shuffled into rows of `scale_factor` squared patches (SmolVLM, Idefics3)."""
    base = _base(f, v, out, _IDEFICS, 128257)
    factor = Fields(f.data, {"scale_factor": 2}).integer("scale_factor", high=64)
    return replace(base, connector="shuffle", factor=factor, buckets=True, projector_bias=False)


def _llava(f: Fields, v: Fields, out: int) -> VisionConfig:
    """Read CLIP without its last layers and its class row, and a projector of two layers (LLaVA-1.5, LLaVA-NeXT)."""
    v = Fields(v.data, {**v.defaults, "model_type": "clip_vision_model"}, where=v.where)
    clip = v.choice("model_type", {"clip_vision_model": True, "siglip_vision_model": False})
    if clip:
        v = Fields(v.data, {**v.defaults, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}, where=v.where)
    f = Fields(
        f.data,
        {
            "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
        },
    )  # fmt: skip
    base = _base(f, v, out, _LLAVA, 32000)
    layer = f.get("vision_feature_layer")
    if isinstance(layer, bool) or not isinstance(layer, int) or not -base.layers - 1 <= layer <= base.layers:
        raise f.error("vision_feature_layer", "must be the number of one layer", "feature_unsupported")
    strategy = f.choice("vision_feature_select_strategy", {"default": True, "full": False})
    if strategy != clip:
        said = "drops the class row, which is supported with CLIP alone; with SigLIP, full"
        raise f.error("vision_feature_select_strategy", said, "feature_unsupported")
    return replace(
        base,
        layers=layer if layer >= 0 else base.layers + 1 + layer,
        class_token=clip,
        patch_bias=not clip,
        post_norm=False,
        projector_activation=f.choice("projector_hidden_act", ACTIVATIONS),
        projector_bias=f.flag("multimodal_projector_bias"),
    )


def _llava_next(f: Fields, v: Fields, out: int) -> VisionConfig:
    return replace(_llava(f, v, out), newline=True)


def _llava_downsample(f: Fields, v: Fields, out: int) -> VisionConfig:
    """Read LLaVA whose projector normalizes and reads 2 x 2 patches at a time (VILA, as `attar convert` writes it)."""
    factor = Fields(f.data, {"downsample_factor": 2}).integer("downsample_factor", low=2, high=64)
    return replace(_llava(f, v, out), connector="downsample", factor=factor)


def _gemma3(f: Fields, v: Fields, out: int) -> VisionConfig:
    """Read SigLIP whose patches are averaged to `mm_tokens_per_image` rows."""
    base = _base(f, v, out, _LLAVA, 262144)
    count = Fields(f.data, {"mm_tokens_per_image": 256}).integer("mm_tokens_per_image", high=COUNT)
    side = round(count**0.5)
    if side * side != count or base.side % side:
        raise f.error("mm_tokens_per_image", f"is {count}: it must be a square whose side divides {base.side} patches")
    return replace(base, connector="pool", factor=base.side // side, bidirectional=True, projector_bias=False)


def _qwen(f: Fields, v: Fields, out: int, names: VisionNames) -> VisionConfig:
    rope = Fields(v.inner("rope_parameters") or {}, {"rope_theta": 10000.0}, where=v.where)
    frames = v.integer("temporal_patch_size", high=8)
    v = Fields({**v.data, "image_size": 1, "layer_norm_eps": 1e-6}, v.defaults, v.aliases, v.where)
    base = _base(f, v, out, names, 151655)
    return replace(
        base, image_size=0, connector="merge", factor=v.integer("spatial_merge_size", high=64), frames=frames,
        rope_theta=rope.number("rope_theta", low=1.0), patch_bias=False, post_norm=False, sections=True,
    )  # fmt: skip


def _qwen2(f: Fields, v: Fields, out: int) -> VisionConfig:
    """Read Qwen2-VL: images of any size, rotary positions, patches merged by two layers."""
    v = Fields(v.data, v.defaults, {**_QWEN_ALIASES, "hidden_size": ("embed_dim",)}, v.where)
    width = v.integer("hidden_size") * v.integer("mlp_ratio", high=64)
    found = _qwen(f, Fields({**v.data, "intermediate_size": width}, v.defaults, v.aliases, v.where), out, _QWEN)
    _same(Fields(v.data, {"hidden_size": out}, where=v.where), "hidden_size", out)
    return found


def _qwen25(f: Fields, v: Fields, out: int) -> VisionConfig:
    """Read Qwen2.5-VL: RMSNorm, a gated feed-forward, and windows in most layers."""
    v = Fields(v.data, v.defaults, _QWEN_ALIASES, v.where)
    _same(Fields(v.data, {"out_hidden_size": out}, where=v.where), "out_hidden_size", out)
    found = _qwen(f, v, out, _QWEN25)
    merged = v.integer("window_size", high=SIDE) // found.factor // found.patch  # rows of a window's side, as merged
    if merged < 1:
        raise v.error("window_size", "is less than one merged patch")
    full = frozenset(v.integers("fullatt_block_indexes", 0, COUNT))
    return replace(found, norm="rms", gated=True, window=merged * found.factor, full_layers=full)


def _same(f: Fields, key: str, out: int) -> None:
    if f.integer(key) != out:
        raise f.error(key, f"is not the language model's width of {out}")


_QWEN_ALIASES = {"num_hidden_layers": ("depth",), "num_attention_heads": ("num_heads",)}
_QWEN_COMMON: Mapping[str, object] = {
    "num_hidden_layers": 32, "num_attention_heads": 16, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
_QWEN2_DEFAULTS = {**_QWEN_COMMON, "hidden_size": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4}
_QWEN25_DEFAULTS = {
    **_QWEN_COMMON, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}  # fmt: skip
_IDEFICS_DEFAULTS = {**SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}

READERS: Mapping[str, tuple[Mapping[str, object], tuple[float, ...], tuple[float, ...], _Read]] = {
    "Idefics3ForConditionalGeneration": (_IDEFICS_DEFAULTS, HALF, HALF, _idefics3),
    "SmolVLMForConditionalGeneration": (_IDEFICS_DEFAULTS, HALF, HALF, _idefics3),
    "LlavaForConditionalGeneration": ({**SIGLIP, "patch_size": 32}, CLIP_MEAN, CLIP_STD, _llava),
    "LlavaNextForConditionalGeneration": ({**SIGLIP, "patch_size": 32}, CLIP_MEAN, CLIP_STD, _llava_next),
    "LlavaDownsampleForConditionalGeneration": (SIGLIP, HALF, HALF, _llava_downsample),
    "Qwen2VLForConditionalGeneration": (_QWEN2_DEFAULTS, CLIP_MEAN, CLIP_STD, _qwen2),
    "Qwen2_5_VLForConditionalGeneration": (_QWEN25_DEFAULTS, CLIP_MEAN, CLIP_STD, _qwen25),
    "Gemma3ForConditionalGeneration": (SIGLIP, HALF, HALF, _gemma3),
}
"""Defaults of omitted keys (those of the config classes in transformers), default mean and deviation of pixels, and
the reader of each architecture."""

_OF_KIND: Mapping[str, str] = {
    "idefics3": "Idefics3ForConditionalGeneration", "smolvlm": "SmolVLMForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration", "llava_next": "LlavaNextForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration", "llava_downsample": "LlavaDownsampleForConditionalGeneration",
}  # fmt: skip
