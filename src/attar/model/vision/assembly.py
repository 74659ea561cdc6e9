"""Assembly of a vision tower and its projector from a source of named tensors, each checked before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from attar.errors import UserError
from attar.kernels.dispatch import BackendWeights
from attar.kernels.operands import Linear, Norm
from attar.model.vision.config import VisionConfig
from attar.model.vision.model import VisionModel
from attar.model.vision.positions import buckets
from attar.model.vision.projector import Projector
from attar.model.vision.tensors import linears, tensors
from attar.model.vision.tower import Tower, VisionLayer

LISTED = 5  # missing tensors that a message names
STORED = ("float32", "float16", "bfloat16", "float64")
EPS_DOWNSAMPLED = 1e-5  # of the norm in VILA's projector: torch's default
PACKED = "packed"
"""What `Source.shape` says in place of a dtype, of the weight of a quantized linear."""


class Source(Protocol):
    """Tensors of a checkpoint's files by their stored names."""

    def has(self, name: str) -> bool:
        """Return whether the files hold a tensor, or the weight of this name quantized."""

    def shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return a tensor's dtype name (`PACKED` for a quantized weight) and shape, without reading it."""

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored."""

    def packed(self, module: str) -> bool:
        """Return whether the files hold a linear in a quantized format."""

    def linear(self, module: str) -> Linear:
        """Return such a linear, without its bias."""


def prefixes(config: VisionConfig, source: Source) -> dict[str, str]:
    """Return the prefix of each part's names in the files."""
    first = {part: name for part, name, _ in reversed(list(tensors(config)))}
    own = {"tower": config.names.tower, "projector": config.names.projector, "outer": ("", "model.")}
    return {part: _prefix(source, options, first.get(part, "")) for part, options in own.items()}


class _Weights:
    """The tensors of one tower by part and name, all of them found and of the right shape before one is read."""

    def __init__(self, config: VisionConfig, source: Source, dtype: torch.dtype, as_stored: bool) -> None:
        self.source, self.dtype, self.as_stored = source, dtype, as_stored
        wanted = list(tensors(config))
        self._prefixes = prefixes(config, source)
        may_be_packed = {(part, f"{name}.weight") for part, name, _ in linears(config)}
        missing = [self.stored(part, name) for part, name, _ in wanted if not source.has(self.stored(part, name))]
        if missing:
            more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
            said = f"the vision tower lacks {', '.join(missing[:LISTED])}{more}"
            raise UserError("checkpoint_incomplete", said)
        self.dtypes = set[str]()
        for part, name, shape in wanted:
            dtype_name, found = source.shape(self.stored(part, name))
            if found != shape:
                said = f"{self.stored(part, name)} is {list(found)}: vision_config makes it {list(shape)}"
                raise UserError("checkpoint_mismatch", said)
            if dtype_name not in STORED and (dtype_name != PACKED or (part, name) not in may_be_packed):
                said = f"{self.stored(part, name)} is {dtype_name}: linears of towers are read dense or quantized"
                raise UserError("quantization_unsupported", said)
            self.dtypes.add(dtype_name)

    def stored(self, part: str, name: str) -> str:
        return self._prefixes[part] + name

    def tensor(self, part: str, name: str) -> Tensor:
        return self.source.read(self.stored(part, name)).to(self.dtype)

    def linear(self, part: str, name: str, bias: bool = True) -> Linear:
        at, own = self.stored(part, name), self.tensor(part, f"{name}.bias") if bias else None
        if self.source.packed(at):
            found = self.source.linear(at)
            found.name, found.bias = at, own
            return found
        weight = self.source.read(f"{at}.weight")
        if not self.as_stored or weight.dtype == torch.float64:
            weight = weight.to(self.dtype)
        return Linear(at, weight.flatten(1), own)

    def norm(self, config: VisionConfig, part: str, name: str, eps: float | None = None) -> Norm:
        at, weight = self.stored(part, name), self.tensor(part, f"{name}.weight")
        if config.norm == "rms":
            return Norm("rms", weight, None, eps or config.norm_eps, name=at)
        return Norm("layer", weight, self.tensor(part, f"{name}.bias"), eps or config.norm_eps, name=at)


def _prefix(source: Source, options: Sequence[str], probe: str) -> str:
    return next((each for each in options if source.has(each + probe)), options[0])


def stored_dtypes(config: VisionConfig, source: Source) -> set[str]:
    """Return the dtypes of the tower's and the projector's tensors, `PACKED` among them where linears are quantized.
    Raises ValueError as `build`."""
    return _Weights(config, source, torch.float32, True).dtypes


def build(
    config: VisionConfig,
    source: Source,
    dtype: torch.dtype,
    store: BackendWeights | None = None,
    rows_dtype: torch.dtype | None = None,
) -> VisionModel:
    """Build the tower and its projector to compute in `dtype`, in `store` where one is given.

    Rows of images are given in `rows_dtype`, by default the same. Weights keep their stored dtype in a store, else they
    are held in `dtype`; quantized linears stay as they are. Raises ValueError naming tensors that are missing, of
    another shape than the config says, or of numbers that are not real, before any is read.
    """
    weights, names = _Weights(config, source, dtype, store is not None), config.names
    positions = None
    if config.rope_theta is None:
        positions = weights.tensor("tower", f"{names.positions}.weight")
    class_row = pre_norm = None
    if config.class_token:
        assert positions is not None
        class_row = weights.tensor("tower", names.class_token) + positions[0]
        positions = positions[1:].clone()  # and not a view, which keeps the first row too
        pre_norm = weights.norm(config, "tower", names.pre_norm)
    if config.buckets and positions is not None:
        positions = positions[buckets(config.side)]
    tower = Tower(
        config,
        weights.linear("tower", names.patch, config.patch_bias),
        positions,
        class_row,
        pre_norm,
        [_layer(config, weights, layer) for layer in range(config.layers)],
        weights.norm(config, "tower", names.post_norm) if config.post_norm else None,
    )
    made = VisionModel(config, tower, _build_projector(config, weights), dtype, rows_dtype or dtype)
    if store is not None:
        for linear in made.linears():
            store.take(linear)
        for norm in made.norms():
            store.take_norm(norm)
    return made


def _layer(config: VisionConfig, weights: _Weights, layer: int) -> VisionLayer:
    names = config.names
    at = names.layer.format(i=layer)
    return VisionLayer(
        weights.norm(config, "tower", f"{at}.{names.attention_norm}"),
        tuple(weights.linear("tower", f"{at}.{name}") for name in names.qkv),
        weights.linear("tower", f"{at}.{names.output}"),
        weights.norm(config, "tower", f"{at}.{names.feed_forward_norm}"),
        tuple(weights.linear("tower", f"{at}.{name}") for name in names.up),
        weights.linear("tower", f"{at}.{names.down}"),
    )


def _build_projector(config: VisionConfig, weights: _Weights) -> Projector:
    if config.connector == "shuffle":
        return Projector(config, (weights.linear("projector", "modality_projection.proj", bias=False),))
    if config.connector == "mlp":
        linears = tuple(weights.linear("projector", name, config.projector_bias) for name in ("linear_1", "linear_2"))
        return Projector(config, linears, None, weights.tensor("outer", "image_newline") if config.newline else None)
    if config.connector == "downsample":
        linears = tuple(weights.linear("projector", name) for name in ("linear_1", "linear_2"))
        return Projector(config, linears, weights.norm(config, "projector", "norm", EPS_DOWNSAMPLED))
    if config.connector == "merge":
        linears = tuple(weights.linear("projector", name) for name in ("mlp.0", "mlp.2"))
        return Projector(config, linears, weights.norm(config, "projector", "ln_q"))
    norm = Norm("rms", weights.tensor("projector", "mm_soft_emb_norm.weight"), None, config.norm_eps, 1.0)
    name = "mm_input_projection_weight"  # stored [in, out]
    return Projector(config, (Linear(name, weights.tensor("projector", name).T.contiguous()),), norm)
