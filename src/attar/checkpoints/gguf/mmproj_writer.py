"""Write the vision tower of a folder to an mmproj file, as `mmproj.py` and llama.cpp read it.

`plan` is the check as well: what it would write is read back, and a tower that the file describes otherwise than the
folder is not written. Matrices keep their dtype. The rest is stored in float32, as llama.cpp wants it. Hardly any
metadata key says how images are resized: where the folder differs from the defaults, a note tells the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from attar.checkpoints.gguf import mmproj
from attar.checkpoints.gguf.export import FILE_TYPES, QUANTIZATION_VERSION
from attar.checkpoints.gguf.mmproj import AT, INPUT, NAMES, SECOND_FRAME
from attar.checkpoints.gguf.values import as_stored, same
from attar.checkpoints.gguf.writer import Tensors, atomic_gguf
from attar.errors import UserError
from attar.formats.codecs import ggml_round
from attar.formats.codecs.ggml import TYPES
from attar.images.settings import ImageSettings
from attar.model.vision import assembly
from attar.model.vision.config import VisionConfig
from attar.model.vision.tensors import tensors

DENSE: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F32"}
KINDS: Mapping[str, str] = {"shuffle": "idefics3", "pool": "gemma3", "mlp": "mlp", "merge": "qwen2vl_merger"}
"""`clip.projector_type` by connector."""

QWEN_SIDE = 560  # pixels; llama.cpp wants a size of models that take any
_UNSAID = ("names",)


class _Stored(NamedTuple):
    """A tensor of the file, the folder's tensor that it is of, and which third or frame of it it is."""

    name: str
    source: str
    shape: tuple[int, ...]
    third: int | None = None
    frame: int | None = None


@dataclass(frozen=True)
class Plan:
    """An mmproj file before it is written: its metadata, the types and shapes of its tensors, and notes for the
    user."""

    source: assembly.Source
    metadata: Mapping[str, Any]
    tensors: Tensors
    stored: tuple[_Stored, ...]
    notes: tuple[str, ...]

    def write(self, path: Path, overwrite: bool) -> None:
        """Write the file. Raises CheckpointError where `path` exists, unless `overwrite`, and where the disk is
        full."""
        with atomic_gguf(path, self.metadata, self.tensors, overwrite) as writer:
            for each in self.stored:
                kind, shape = self.tensors[each.name]
                raw = ggml_round.encode(kind, self._values(each).reshape(shape))
                writer.write(each.name, raw)

    def _values(self, each: _Stored) -> Tensor:
        found = self.source.read(each.source)
        if each.third is not None:
            found = found.view(3, *each.shape)[each.third]
        if each.frame is not None:
            found = found[:, :, each.frame]
        if each.name == "mm.soft_emb_norm.weight":  # with the one that Gemma adds
            found = found.float() + 1
        return found.contiguous()


def plan(
    config: VisionConfig, source: assembly.Source, images: ImageSettings, language: Mapping[str, Any], name: str
) -> Plan:
    """Plan the mmproj file of the tower `config`, whose tensors `source` has, beside a model file with the metadata
    `language`.

    Raises UserError (`gguf_inexpressible`) for a tower that an mmproj file cannot describe, for quantized ones, and
    where the model's vocabulary has other image tokens.
    """
    if config.newline or config.connector not in KINDS:
        raise _inexpressible("llama.cpp has no such projector, or attar does not write it")
    dtypes = assembly.stored_dtypes(config, source)
    if assembly.PACKED in dtypes:
        raise _inexpressible("its linears are quantized, and attar writes dense towers: keep it in a folder")
    stored = tuple(_tensors(config, source))
    layout = {each.name: (TYPES[_kind(config, source, each)], each.shape) for each in stored}
    kinds = [kind.name for kind, shape in layout.values() if len(shape) == 2]
    metadata = _metadata(config, images, name, FILE_TYPES[max(dict.fromkeys(kinds), key=kinds.count)])
    try:
        again = mmproj.of(Path(name), as_stored(metadata), layout.keys(), language)
    except UserError as error:
        raise _inexpressible(str(error)) from None
    for field in fields(VisionConfig):
        ours, theirs = getattr(config, field.name), getattr(again.config, field.name)
        if field.name not in _UNSAID and not same(ours, theirs):
            raise _inexpressible(f"no metadata key describes its {field.name}, which is {ours}")
    if replace(images, pixels=again.images.pixels) != again.images:
        raise _inexpressible("the vocabulary has other tokens for images than the folder's settings")
    return Plan(source, metadata, layout, stored, tuple(_notes(config, images, again.images)))


def _notes(config: VisionConfig, ours: ImageSettings, theirs: ImageSettings) -> Iterator[str]:
    others = [
        field.name for field in fields(ours.pixels)
        if getattr(ours.pixels, field.name) != getattr(theirs.pixels, field.name)
    ]  # fmt: skip
    if others:
        yield (
            f"No metadata key of an mmproj file says how this folder resizes images ({', '.join(others)}): readers of "
            "the file take the family's defaults."
        )
    if config.class_token:
        yield (
            "Versions of llama.cpp with its issue 25814 mix up the rows of towers with a class token like this one: "
            "their answers about images are worse than attar's from the same file."
        )
    if config.window and config.window * config.patch != mmproj.QWEN_WINDOW:
        yield (
            f"llama.cpp takes windows of {mmproj.QWEN_WINDOW} pixels for this family whatever a file says, and this "
            f"tower has {config.window * config.patch}: its answers about images will differ."
        )


def _metadata(config: VisionConfig, images: ImageSettings, name: str, file_type: int) -> dict[str, Any]:
    kind = "qwen2.5vl_merger" if config.connector == "merge" and config.norm == "rms" else KINDS[config.connector]
    found: dict[str, Any] = {
        "general.architecture": mmproj.ARCHITECTURE,
        "general.type": "mmproj",
        "general.name": name,
        "general.file_type": file_type,
        "general.quantization_version": QUANTIZATION_VERSION,
        "clip.has_vision_encoder": True,
        mmproj.KIND: kind,
        f"{AT}.projection_dim": config.out,
        f"{AT}.image_size": config.image_size or QWEN_SIDE,
        f"{AT}.patch_size": config.patch,
        f"{AT}.embedding_length": config.hidden,
        f"{AT}.feed_forward_length": config.intermediate,
        f"{AT}.block_count": config.layers,
        f"{AT}.attention.head_count": config.heads,
        f"{AT}.attention.layer_norm_epsilon": config.norm_eps,
        f"{AT}.image_mean": [float(each) for each in config.mean],
        f"{AT}.image_std": [float(each) for each in config.std],
    }
    if config.activation in ("gelu_tanh", "silu"):
        found["clip.use_gelu" if config.activation == "gelu_tanh" else "clip.use_silu"] = True
    if config.connector in ("shuffle", "pool"):
        found[f"{AT}.projector.scale_factor"] = config.factor
    if config.connector == "shuffle":
        found[f"{AT}.preproc_image_size"] = images.pixels.edge
    if config.connector == "mlp":
        found["clip.has_llava_projector"] = True
        found[f"{AT}.feature_layer"] = [config.layers]
    if config.connector == "merge":
        found[f"{AT}.spatial_merge_size"] = config.factor
        found[f"{AT}.image_min_pixels"] = images.pixels.min_pixels
        found[f"{AT}.image_max_pixels"] = images.pixels.max_pixels
    if config.window:
        found[f"{AT}.window_size"] = config.window * config.patch
        found[f"{AT}.n_wa_pattern"] = min(config.full_layers, default=config.layers) + 1
    return found


def _kind(config: VisionConfig, source: assembly.Source, each: _Stored) -> str:
    """Return the type of a tensor: its own for the matrices of linears."""
    linear = len(each.shape) == 2 and each.name not in (f"{NAMES.positions}.weight", mmproj.stored_name(config, INPUT))
    return DENSE[source.shape(each.source)[0]] if linear else "F32"


def _tensors(config: VisionConfig, source: assembly.Source) -> Iterator[_Stored]:
    """Yield the tensors of the file, in their order."""
    own = replace(NAMES, up=("ffn_gate", "ffn_up")) if config.gated else NAMES
    prefixes = assembly.prefixes(config, source)
    names = _ours(config)
    for part, name, shape in tensors(replace(config, names=own)):
        there = mmproj.stored_name(config, name)
        if part != "tower":
            yield _Stored(there, prefixes[part] + name, shape)
        elif name == mmproj.PATCH_WEIGHT and config.frames > 1:
            flat = (*shape[:2], *shape[3:])
            at = f"{prefixes[part]}{config.names.patch}.weight"
            yield from (_Stored(each, at, flat, None, n) for n, each in enumerate((there, SECOND_FRAME)))
        elif name == NAMES.class_token:
            yield _Stored(there, prefixes[part] + config.names.class_token, shape)
        else:
            module, _, end = name.rpartition(".")
            ours, third = names[module]
            yield _Stored(there, f"{prefixes[part]}{ours}.{end}", shape, third)


def _ours(config: VisionConfig) -> dict[str, tuple[str, int | None]]:
    """Return each module of a tower by its name in files: ours, and which third of it, where q, k and v are one."""
    names = config.names
    found: dict[str, tuple[str, int | None]] = {
        NAMES.patch: (names.patch, None), NAMES.positions: (names.positions, None),
        NAMES.pre_norm: (names.pre_norm, None), NAMES.post_norm: (names.post_norm, None),
    }  # fmt: skip
    fused = len(names.qkv) == 1
    pairs = [
        (NAMES.attention_norm, names.attention_norm), (NAMES.feed_forward_norm, names.feed_forward_norm),
        (NAMES.output, names.output), (NAMES.down, names.down),
        *zip(("ffn_gate", "ffn_up") if config.gated else NAMES.up, names.up, strict=True),
    ]  # fmt: skip
    for layer in range(config.layers):
        there, here = NAMES.layer.format(i=layer), names.layer.format(i=layer)
        found |= {f"{there}.{theirs}": (f"{here}.{ours}", None) for theirs, ours in pairs}
        for number, theirs in enumerate(NAMES.qkv):
            ours = names.qkv[0 if fused else number]
            found[f"{there}.{theirs}"] = (f"{here}.{ours}", number if fused else None)
    return found


def _inexpressible(why: str) -> UserError:
    return UserError("gguf_inexpressible", f"the vision tower cannot be written to an mmproj file: {why}")
