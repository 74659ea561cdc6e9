"""The tensors of a vision tower and its projector: names and shapes, from a `VisionConfig` alone. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from attar.model.vision.config import VisionConfig


def tensors(config: VisionConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield every tensor of tower and projector: the part it belongs to (tower, projector or outer), its name there,
    and its shape."""
    names, hidden, wide = config.names, config.hidden, config.intermediate
    patch = (config.patch, config.patch)
    merge = config.connector == "merge"
    yield "tower", f"{names.patch}.weight", (hidden, 3, config.frames, *patch) if merge else (hidden, 3, *patch)
    if config.patch_bias:
        yield "tower", f"{names.patch}.bias", (hidden,)
    if config.rope_theta is None:
        yield "tower", f"{names.positions}.weight", (config.side**2 + int(config.class_token), hidden)
    if config.class_token:
        yield "tower", names.class_token, (hidden,)
        yield from _norm(config, "tower", names.pre_norm, hidden)
    for layer in range(config.layers):
        at = names.layer.format(i=layer)
        yield from _norm(config, "tower", f"{at}.{names.attention_norm}", hidden)
        yield from _norm(config, "tower", f"{at}.{names.feed_forward_norm}", hidden)
        rows = (hidden,) * 3 if len(names.qkv) == 3 else (3 * hidden,)
        for name, out in zip(names.qkv, rows, strict=True):
            yield from _linear("tower", f"{at}.{name}", out, hidden)
        yield from _linear("tower", f"{at}.{names.output}", hidden, hidden)
        for name in names.up:
            yield from _linear("tower", f"{at}.{name}", wide, hidden)
        yield from _linear("tower", f"{at}.{names.down}", hidden, wide)
    if config.post_norm:
        yield from _norm(config, "tower", names.post_norm, hidden)
    yield from _projector(config)
    if config.newline:
        yield "outer", "image_newline", (config.out,)


def linears(config: VisionConfig) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield every linear layer that may be quantized: its part, its name there, and its shape (out, in).

    These are the linears of the layers and of the projector. The patches' convolution, the table of positions and
    Gemma 3's projector, which is no module, are not among them.
    """
    table = f"{config.names.positions}.weight"
    for part, name, shape in tensors(config):
        if len(shape) == 2 and name.endswith(".weight") and (part, name) != ("tower", table):
            yield part, name.removesuffix(".weight"), (shape[0], shape[1])


def _projector(config: VisionConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    hidden, merged = config.hidden, config.hidden * config.factor**2
    if config.connector == "shuffle":
        yield from _linear("projector", "modality_projection.proj", config.out, merged, bias=False)
    elif config.connector == "mlp":
        yield from _linear("projector", "linear_1", config.out, hidden, config.projector_bias)
        yield from _linear("projector", "linear_2", config.out, config.out, config.projector_bias)
    elif config.connector == "downsample":
        yield from _norm(config, "projector", "norm", merged)
        yield from _linear("projector", "linear_1", config.out, merged)
        yield from _linear("projector", "linear_2", config.out, config.out)
    elif config.connector == "merge":
        yield from _norm(config, "projector", "ln_q", hidden)
        yield from _linear("projector", "mlp.0", merged, merged)
        yield from _linear("projector", "mlp.2", config.out, merged)
    else:
        yield "projector", "mm_soft_emb_norm.weight", (hidden,)
        yield "projector", "mm_input_projection_weight", (hidden, config.out)


def _norm(config: VisionConfig, part: str, name: str, size: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield part, f"{name}.weight", (size,)
    if config.norm == "layer":
        yield part, f"{name}.bias", (size,)


def _linear(
    part: str, name: str, out: int, columns: int, bias: bool = True
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield part, f"{name}.weight", (out, columns)
    if bias:
        yield part, f"{name}.bias", (out,)
