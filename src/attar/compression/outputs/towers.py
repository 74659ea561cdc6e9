"""Vision tower and projector of a compressed vision-language model: quantized if asked for, else as they are.

Weights are rounded to nearest, one scale for each output row: at 8 bits this needs no calibration. The linears of the
layers and of the projector are quantized. The patches' convolution, norms, tables, and Gemma 3's projector, which is no
module, stay as they are. In the config their modules are given by patterns, for transformers 5 renames what holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from attar.checkpoints.layouts import compressed_tensors, export_layouts
from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.sources.vision import VisionFiles, vision_config
from attar.compression.outputs.tower_schemes import UNCHANGED
from attar.compression.recipe.recipe import Recipe
from attar.compression.solvers.rounding import rtn
from attar.errors import UserError
from attar.formats.scheme import Part, Scheme, scale_dtype
from attar.model.vision import assembly
from attar.model.vision.config import VisionConfig
from attar.model.vision.tensors import linears
from attar.model.vision.wrappers import OUTSIDE


@dataclass(frozen=True)
class QuantizedTower:
    """The linears of a tower and its projector that are quantized, by their modules' stored names."""

    checkpoint: Checkpoint
    name: str  # of the scheme
    schemes: Mapping[str, Scheme]  # which differ in the dtype of scales alone
    targets: tuple[str, ...]  # patterns of these linears
    ignored: tuple[str, ...]  # patterns of the other linears of tower and projector

    def parts(self, tensor: str) -> dict[str, Part] | None:
        """Return the tensors that store a weight instead of `tensor`; None where that stays as it is."""
        scheme = self.schemes.get(_module(tensor))
        if scheme is None:
            return None
        rows, columns = self.checkpoint.folder.info(tensor).shape
        return export_layouts.declared(compressed_tensors, _module(tensor), scheme, (rows, columns))

    def quantized(self, tensor: str) -> dict[str, Tensor]:
        """Return the tensors of `parts`. Raises ValueError where the weight has a NaN or an infinity."""
        module = _module(tensor)
        try:
            packed = rtn.solve(self.checkpoint.folder.read(tensor), self.schemes[module])
        except UserError as error:
            raise UserError(error.code, f"{module}: {error}") from None
        return export_layouts.parts_of(compressed_tensors, module, packed)

    def in_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a `quantization_config` with this tower beside the language model."""
        return compressed_tensors.with_patterns(config, self.targets, next(iter(self.schemes.values())))

    def to_dict(self) -> dict[str, Any]:
        """Return what the receipt says of it."""
        shapes = {module: self.checkpoint.folder.info(f"{module}.weight").shape for module in self.schemes}
        size = sum(scheme.bytes((shapes[module][0], shapes[module][1])) for module, scheme in self.schemes.items())
        return {"scheme": self.name, "linears": len(self.schemes), "bytes": size}


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight") if tensor.endswith(".weight") else ""


def quantized(checkpoint: Checkpoint, recipe: Recipe, name: str) -> QuantizedTower | None:
    """Return the tower of a checkpoint in the scheme `name`, one of `TOWER_SCHEMES`; None where it stays as it is.

    Raises ValueError for a model without a tower that attar reads.
    """
    if name == UNCHANGED:
        return None
    folder, architecture = checkpoint.folder, checkpoint.config.architecture
    config = vision_config(folder) if architecture in OUTSIDE else None
    if config is None:
        raise UserError("feature_unsupported", f"--vision {name}: {folder.path} has no vision tower")
    assembly.stored_dtypes(config, VisionFiles(folder))  # it is whole, and in floats
    config = replace(config, layers=_stored_layers(config, checkpoint))
    prefixes = assembly.prefixes(config, VisionFiles(folder))
    form, schemes, targets = Scheme.parse(name), dict[str, Scheme](), dict[str, None]()
    for part, linear, _ in linears(config):
        module = prefixes[part] + linear
        schemes[module] = form.with_scale_dtype(scale_dtype(folder.info(f"{module}.weight").dtype))
        targets |= dict.fromkeys(_targets(config, prefixes, architecture, part, linear))
    ignored = list[str]()
    for outside in OUTSIDE[architecture]:
        if not any(outside in module.split(".") for module in schemes):
            ignored += compressed_tensors.ignored_within(outside)
            continue
        for tensor in folder.names():
            module = _module(tensor)
            words = module.split(".")
            if outside in words and module not in schemes and len(folder.info(tensor).shape) == 2:
                within = [word for word in words[words.index(outside) + 1 :] if word != "vision_model"]
                ignored.append(_pattern(outside, ".".join(within)))
    return QuantizedTower(checkpoint, name, schemes, tuple(targets), tuple(ignored))


def _stored_layers(config: VisionConfig, checkpoint: Checkpoint) -> int:
    """Return the number of layers in the files: LLaVA runs all but the last, and readers build that one as well."""
    prefix, layers = assembly.prefixes(config, VisionFiles(checkpoint.folder))["tower"], config.layers
    while checkpoint.folder.has(f"{prefix}{config.names.layer.format(i=layers)}.{config.names.down}.weight"):
        layers += 1
    return layers


def _targets(
    config: VisionConfig, prefixes: Mapping[str, str], architecture: str, part: str, linear: str
) -> Iterator[str]:
    """Yield the pattern of a linear: of a layer that of all layers, for readers take no more than some patterns."""
    if part == "projector":
        outside = next(each for each in OUTSIDE[architecture] if each in prefixes[part].split("."))
        within = prefixes[part].rstrip(".").split(".")
        yield _pattern(outside, ".".join((*within[within.index(outside) + 1 :], linear)), anywhere=False)
        return
    names = config.names
    kinds = (*names.qkv, names.output, *names.up, names.down)
    yield _pattern(OUTSIDE[architecture][0], next(kind for kind in kinds if linear.endswith(f".{kind}")))


def _pattern(outside: str, name: str, anywhere: bool = True) -> str:
    between = ".*[.]" if anywhere else "[.]"
    return f"re:.*{outside}{between}{name.replace('.', '[.]')}$"


def copied(checkpoint: Checkpoint, tower: QuantizedTower | None = None) -> dict[str, str]:
    """Return the modules of the checkpoint that belong to no language model and stay as they are, each with the dtypes
    of its tensors; of a quantized `tower`, the tensors that stay."""
    folder, found = checkpoint.folder, dict[str, str]()
    for module in OUTSIDE.get(checkpoint.config.architecture, ()):
        tensors = [name for name in folder.names() if module in name.split(".")]
        tensors = [name for name in tensors if tower is None or _module(name) not in tower.schemes]
        if tensors:
            found[module] = " and ".join(sorted({folder.info(name).dtype for name in tensors}))
    return found


def note(checkpoint: Checkpoint, tower: QuantizedTower | None) -> tuple[str, ...]:
    """Return the sentence about tower and projector for the model card; () where there are none."""
    rest = copied(checkpoint, tower)
    if not rest:
        return ()
    each = ", ".join(f"{module} ({dtypes})" for module, dtypes in rest.items())
    if tower is None:
        return (f"The language model alone is compressed; copied as they are: {each}.",)
    linears = f"{len(tower.schemes)} linears of vision tower and projector are {tower.name}"
    return (f"{linears}; what else they have is copied as it is: {each}.",)


def check(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Raise ValueError where a recipe changes what the projector's output means to the language model."""
    architecture = checkpoint.config.architecture
    if architecture not in OUTSIDE:
        return
    if recipe.rotate is not None:
        raise UserError(
            "feature_unsupported",
            f"{recipe.name}: rotations turn the hidden states that the projector of {architecture} gives: "
            "not supported for models with a vision tower",
        )
    if recipe.structured is not None:
        raise UserError(
            "feature_unsupported", f"{recipe.name}: {architecture}: pruning of heads is not supported with a tower"
        )


def check_library(tower: QuantizedTower | None, recipe: Recipe, method: str) -> None:
    """Raise ValueError where a folder's format has no place for a quantized tower beside the language model."""
    if tower is not None and method != compressed_tensors.METHOD:
        raise UserError(
            "option_conflict",
            f"{recipe.name} is stored as {method}, and a tower in {tower.name} as {compressed_tensors.METHOD}: leave "
            f"--vision out, or choose a recipe of that format, such as gptq-w4g128 or rtn-w8a8",
        )
