"""compressed-tensors checkpoints, read and written: the format that vLLM and transformers load.

config.json's `quantization_config` has groups; a group has `targets` (module names, patterns that begin with "re:", or
the class name "Linear") and says how weights and inputs are quantized. The tensors of a module X are

* X.weight_packed int32, X.weight_shape (pack-quantized), or X.weight in int8 or float8 (int-, float-, naive-quantized);
* X.weight_scale, and X.weight_zero_point where asymmetric;
* X.input_scale where activations have a static scale; X.weight_g_idx where GPTQ reordered the columns.

Reading, the tensors say *whether* a module is quantized and the groups say *how*. `ignore` repeats what the tensors
show, and so is not needed; a module that has scales but no group is an error. Of several groups that match, names win
over patterns and patterns over class names, each in alphabetical order: compressed-tensors' own rule.

Patterns come from strangers and run in Python's `re`, which can take exponential time. Hence a guard: at most 256
characters and 4 unbounded repetitions, no repeated group, no back-reference. Every pattern met in published
checkpoints passes.

Asymmetric packed weights, ours and compressed-tensors' own, load in transformers 5.23 only with
`CompressedTensorsConfig(dequantize=True)`; its default road has no place for packed zero points.

Not done: block-scaled and 4-bit floats, quantized KV caches, output activations, sparsity and transforms. Each is
refused by name, for ignoring it would give a model that runs and answers nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.gptq import by_group
from attar.checkpoints.safetensors import CheckpointError
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.formats.scheme import Granularity, Grid, Layout, Part, Scheme
from attar.kernels.operands import Linear

METHOD = "compressed-tensors"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
FORMATS = ("pack-quantized", *PLAIN)
MIXED = "mixed-precision"

STORED: Mapping[str, str] = {"scale": "weight_scale", "zero": "weight_zero_point", "shape": "weight_shape"}
"""Names of a PackedTensor's parts in the file, but for its codes."""

MAX_PATTERN = 256
MAX_REPETITIONS = 4


def stored_part(part: str, scheme: Scheme) -> str:
    """The name, after the module's, under which a part of a PackedTensor is stored."""
    if part == "codes":
        return "weight_packed" if scheme.layout == "packed" else "weight"
    return STORED[part]


# Reading


@dataclass(frozen=True)
class Group:
    """What a config group says of its modules; the rest of the scheme is read off their tensors."""

    weight: Grid
    activation: Grid | None
    static: bool


class CompressedTensors:
    """The quantized modules of a compressed-tensors checkpoint.

    Raises CheckpointError where the config asks for what is not supported.
    """

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        where = f"{folder.path}: quantization_config"
        for key, meaning in (("kv_cache_scheme", "a quantized KV cache"), ("transform_config", "a transform")):
            if config.get(key):
                raise CheckpointError(f"{where}: {key} is set: {meaning} is not supported")
        sparsity = config.get("sparsity_config") or {}
        if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
            raise CheckpointError(f"{where}: sparsity_config is set: sparse storage is not supported")
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise CheckpointError(f"{where}: needs config_groups that say how modules are quantized")
        self._groups: dict[str, Group] = {}
        patterns: dict[str, re.Pattern[str]] = {}
        for name, group in groups.items():
            at = f"{where}: {name}"
            if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
                raise CheckpointError(f"{at} must be an object with targets")
            _check_format(group.get("format") or config.get("format"), group.get("format") is None, at)
            read = _read_group(group, at)
            for target in group["targets"]:
                if not isinstance(target, str):
                    raise CheckpointError(f"{at}: a target is a string, not {target!r}")
                self._groups[target] = read
                if target.startswith("re:"):
                    patterns[target] = pattern(target.removeprefix("re:"), at)
        self._patterns = dict(sorted(patterns.items()))

    def holds(self, module: str) -> bool:
        return self.folder.has(f"{module}.weight_scale")

    def scheme_of(self, module: str) -> Scheme:
        """How the module is stored. Raises CheckpointError where no group covers it."""
        group = self._group(module)
        layout: Layout = "packed" if self.folder.has(f"{module}.weight_packed") else "plain"
        try:
            scheme = Scheme(group.weight, group.activation, group.static, layout=layout)
            return scheme.with_scale_dtype(self.folder.info(f"{module}.weight_scale").dtype)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{self.folder.path}: {module}: {error}") from None

    def shape(self, module: str) -> tuple[int, int]:
        """(out, in)."""
        if self.folder.has(f"{module}.weight_packed"):
            shape: Sequence[int] = self.folder.read(f"{module}.weight_shape").tolist()
        else:
            shape = self.folder.info(f"{module}.weight").shape
        if len(shape) != 2:
            raise CheckpointError(f"{self.folder.path}: {module} is quantized but not a matrix: its shape is {shape}")
        return shape[0], shape[1]

    def read(self, module: str) -> Linear:
        """The linear, without its bias. Raises CheckpointError where its tensors do not fit together."""
        scheme, shape = self.scheme_of(module), self.shape(module)
        try:
            declared = scheme.parts(shape)
            parts = {part: self.folder.read(f"{module}.{stored_part(part, scheme)}") for part in declared}
            if scheme.weight.granularity == "tensor":
                parts["scale"] = parts["scale"].reshape(1)  # some store it as a scalar
            if "shape" in parts:
                parts["shape"] = parts["shape"].long()
            packed = PackedTensor(scheme, shape, parts)
        except CheckpointError:
            raise
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.folder.path}: {module}: {error}") from None
        linear = Linear(module, packed)
        if scheme.static:
            linear.activation_scale = self.folder.read(f"{module}.input_scale").reshape(-1).float()
        if self.folder.has(f"{module}.weight_g_idx"):
            self._sort_columns(linear, packed, self.folder.read(f"{module}.weight_g_idx"))
        return linear

    def _sort_columns(self, linear: Linear, packed: PackedTensor, g_idx: Tensor) -> None:
        if bool((g_idx == -1).all()):  # declared and never filled in
            return
        inputs = packed.shape[1]
        permutation = by_group(linear.name, g_idx, inputs, packed.scheme.weight.group_size or inputs)
        if permutation is None:
            return
        codes, scale, zero = affine.decode(packed)
        linear.weight = affine.encode(codes[:, permutation], scale, zero, packed.scheme, packed.shape)
        linear.permutation = permutation

    def _group(self, module: str) -> Group:
        if module in self._groups:
            return self._groups[module]
        for target, compiled in self._patterns.items():
            if compiled.match(module):
                return self._groups[target]
        if "Linear" in self._groups:
            return self._groups["Linear"]
        raise CheckpointError(
            f"{self.folder.path}: {module} is stored quantized, but no target of the quantization_config matches it: "
            f"{', '.join(list(self._groups)[:5])}"
        )


def pattern(text: str, where: str) -> re.Pattern[str]:
    """Compile a pattern from a config, which is matched from a name's beginning. Raises CheckpointError where it could
    take long to match, or is not a regular expression."""
    if problem := _slow(text):
        raise CheckpointError(f"{where}: the pattern {text[:MAX_PATTERN]!r} is not accepted: {problem}")
    try:
        return re.compile(text)
    except re.error as error:
        raise CheckpointError(f"{where}: the pattern {text!r} is not a regular expression: {error}") from None


def _slow(text: str) -> str | None:
    """What could make a pattern slow, or None. Counts a little too much rather than too little."""
    if len(text) > MAX_PATTERN:
        return f"it is longer than {MAX_PATTERN} characters"
    at, repetitions, in_class, previous = 0, 0, False, ""
    while at < len(text):
        char, width = text[at], 1
        if char == "\\":
            char, width = text[at : at + 2], 2
            if char[1:].isdigit():
                return "it refers back to a group"
        elif in_class:
            in_class = char != "]"
            char = "x" if in_class else "]"
        elif char == "[":
            in_class = True
        elif char == "(" and text[at + 1 : at + 2] == "?" and text[at + 2 : at + 3] not in (":", "=", "!", "<"):
            return f"groups that begin with {text[at : at + 3]!r} are not supported"
        elif char in "*+{":
            repetitions += 1
            if previous == ")":
                return "it repeats a group"
        previous, at = char, at + width
    return f"it has more than {MAX_REPETITIONS} repetitions" if repetitions > MAX_REPETITIONS else None


def _check_format(value: Any, inherited: bool, where: str) -> None:
    if value in FORMATS or (value == MIXED and inherited):  # mixed-precision: the tensors tell
        return
    raise CheckpointError(f"{where}: format {value!r} is not one that attar reads: {', '.join(FORMATS)}")


def _read_group(group: Mapping[str, Any], where: str) -> Group:
    if group.get("output_activations"):
        raise CheckpointError(f"{where}: output_activations is set: quantized outputs are not supported")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict):
        raise CheckpointError(f"{where}: needs weights that say how they are quantized")
    if weights.get("dynamic"):
        raise CheckpointError(f"{where}: weights.dynamic is set: weights have fixed scales")
    weight = _read_grid(weights, ("tensor", "channel", "group"), f"{where}: weights")
    if inputs is None:
        return Group(weight, None, False)
    if not isinstance(inputs, dict) or inputs.get("dynamic", False) not in (True, False):
        raise CheckpointError(f"{where}: input_activations must be an object with dynamic true or false")
    static = not inputs.get("dynamic", False)
    known: Sequence[Granularity] = ("tensor",) if static else ("tensor", "token", "group")
    activation = _read_grid(inputs, known, f"{where}: input_activations")
    if static and not activation.symmetric:
        raise CheckpointError(f"{where}: input_activations with a static zero point are not supported")
    return Group(weight, activation, static)


def _read_grid(args: Mapping[str, Any], known: Sequence[Granularity], where: str) -> Grid:
    size, strategy = args.get("group_size"), args.get("strategy")
    if strategy is None:  # older files leave it to the group size
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    granularity = next((word for word in known if word == strategy), None)
    if granularity is None:
        raise CheckpointError(f"{where}: strategy {strategy!r} is not supported here: {', '.join(known)} are")
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    if type(bits) is not int or kind not in ("int", "float") or (kind == "float" and bits != 8):
        raise CheckpointError(
            f"{where}: {kind!r} of {bits!r} bits is not supported: int of 2 to 8, and float of 8, are"
        )
    if granularity == "group" and type(size) is not int:
        raise CheckpointError(f"{where}: group_size must be a number, not {size!r}")
    try:
        return Grid(
            "int" if kind == "int" else "e4m3",
            bits,
            args.get("symmetric", True) is True,
            granularity,
            size if granularity == "group" else None,
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


# Writing


def quantization_config(
    schemes: Mapping[str, Scheme], ignored: Sequence[str], embeddings: Sequence[str] = ()
) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint whose modules are stored in `schemes`, by stored module name.

    `ignored` are the linears that stay dense. One scheme targets the class "Linear", and by name those of the modules
    that are `embeddings`; several name their modules. Raises ValueError where a scheme has no place in the format.
    """
    groups: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        groups.setdefault(scheme, []).append(module)
    formats = {format_of(scheme) for scheme in groups}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else MIXED,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": ["Linear", *embeddings] if len(groups) == 1 else modules,
                "weights": _args(scheme.weight, dynamic=False),
                "input_activations": _args(scheme.activation, not scheme.static) if scheme.activation else None,
                "output_activations": None,
                "format": format_of(scheme),
            }
            for i, (scheme, modules) in enumerate(groups.items())
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def format_of(scheme: Scheme) -> str:
    """The format that stores a scheme. Raises ValueError where none does."""
    if "e5m2" in (scheme.weight.kind, scheme.activation and scheme.activation.kind):
        raise ValueError(f"compressed-tensors has no place for {scheme.name}: its 8-bit float is e4m3, the scheme fp8")
    if scheme.layout == "packed":
        return "pack-quantized"
    if scheme.activation is None:
        return "naive-quantized"
    return "int-quantized" if scheme.weight.kind == "int" else "float-quantized"


def _args(grid: Grid, dynamic: bool) -> dict[str, Any]:
    """Every key spelled out: defaults have changed between versions of the readers."""
    return {
        "num_bits": grid.bits,
        "type": "int" if grid.kind == "int" else "float",
        "symmetric": grid.symmetric,
        "strategy": grid.granularity,
        "group_size": grid.group_size,
        "block_structure": None,
        "dynamic": dynamic,
        "actorder": None,
        "observer": None,
        "observer_kwargs": {},
    }


def declared(module: str, scheme: Scheme, shape: tuple[int, int]) -> dict[str, Part]:
    """Every tensor that module `module` of `shape` (out, in) is stored as; no weight is needed to know."""
    parts = {f"{module}.{stored_part(name, scheme)}": part for name, part in scheme.parts(shape).items()}
    if scheme.static:
        parts[f"{module}.input_scale"] = Part("float32", (1,))
    return parts


def parts_of(module: str, packed: PackedTensor, activation_scale: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors of `declared`: a packed weight, and the scale [1] of static activations."""
    scheme = packed.scheme
    assert (activation_scale is not None) == scheme.static, "a static scheme, and no other, has an activation scale"
    parts = {f"{module}.{stored_part(name, scheme)}": tensor for name, tensor in packed.parts.items()}
    if activation_scale is not None:
        parts[f"{module}.input_scale"] = activation_scale.reshape(1).float()
    return parts
