"""compressed-tensors checkpoints, read and written: the format that vLLM and transformers load.

config.json's `quantization_config` has groups; a group has `targets` (module names, patterns that begin with "re:", or
the class name "Linear") and says how weights and inputs are quantized. The tensors of a module X are

* X.weight_packed int32, X.weight_shape (pack-quantized), or X.weight in int8 or float8 (int-, float-, naive-quantized),
  or X.weight_packed uint8 (mxfp4-, nvfp4-pack-quantized), and X.weight_global_scale of the latter;
* X.weight_scale, and X.weight_zero_point where asymmetric;
* X.input_scale where activations have a static scale, X.input_global_scale where they are NVFP4; X.weight_g_idx where
  GPTQ reordered the columns.

Reading, the tensors say *whether* a module is quantized and the groups say *how*. `ignore` repeats what the tensors
show, and so is not needed; a module that has scales but no group is an error. Of several groups that match, names win
over patterns and patterns over class names, each in alphabetical order: compressed-tensors' own rule.

Asymmetric packed weights, ours and compressed-tensors' own, load in transformers 5.23 only with
`CompressedTensorsConfig(dequantize=True)`; its default road has no place for packed zero points.

`transform_config` says which linears' inputs are rotated at run time: groups of type "hadamard", whose `apply` lists
modules with a location. Of these "input" counts; "weight_input" and "weight_output" are in the weights already. The
matrix of an input is Sylvester's, in blocks of `head_dim` columns where that is given, and is not stored.

Not done: floats of six bits, MXFP8, quantized KV caches, output activations, sparsity, and transforms of other types,
with random numbers, or of outputs, queries and keys. Each is refused by name, for ignoring it would give a model that
runs and answers nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.gptq import by_group
from attar.checkpoints.patterns import pattern
from attar.checkpoints.safetensors import CheckpointError
from attar.checkpoints.scales import activation_scale
from attar.formats import affine
from attar.formats.forms import Form, Fp4, Fp8Blocks
from attar.formats.packed import PackedTensor
from attar.formats.scheme import NVFP4, Granularity, Grid, Layout, Scheme
from attar.kernels.operands import Linear

METHOD = "compressed-tensors"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
FORMATS = ("pack-quantized", *PLAIN, "mxfp4-pack-quantized", "nvfp4-pack-quantized")
MIXED = "mixed-precision"

STORED: Mapping[str, str] = {
    "scale": "weight_scale",
    "zero": "weight_zero_point",
    "shape": "weight_shape",
    "global": "weight_global_scale",
}
"""Names of a PackedTensor's parts in the file, but for its codes."""


def stored_part(part: str, scheme: Scheme) -> str:
    """The name, after the module's, under which a part of a PackedTensor is stored."""
    if part == "codes":
        return "weight_packed" if scheme.layout == "packed" or isinstance(scheme.weight, Fp4) else "weight"
    return STORED[part]


def stored_scale(scheme: Scheme) -> str:
    """The same of the fixed scale of static activations."""
    return "input_global_scale" if scheme.activation == NVFP4 else "input_scale"


# Reading


@dataclass(frozen=True)
class Group:
    """What a config group says of its modules; the rest of the scheme is read off their tensors."""

    weight: Form
    activation: Form | None
    static: bool


class CompressedTensors:
    """The quantized modules of a compressed-tensors checkpoint.

    Raises CheckpointError where the config asks for what is not supported.
    """

    def __init__(self, folder: Folder, config: Mapping[str, Any]) -> None:
        self.folder = folder
        where = f"{folder.path}: quantization_config"
        if config.get("kv_cache_scheme"):
            raise CheckpointError(f"{where}: kv_cache_scheme is set: a quantized KV cache is not supported")
        self._rotations = list(_read_transforms(config.get("transform_config") or {}, f"{where}: transform_config"))
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
        """Whether the module is stored here. Raises CheckpointError where it is not, and its inputs are rotated."""
        held = self.folder.has(f"{module}.weight_scale")
        if not held and any(each.covers(module, dense=True) for each in self._rotations):
            raise CheckpointError(
                f"{self.folder.path}: {module}: transform_config rotates its inputs, which is supported of quantized "
                "linears alone"
            )
        return held

    def scheme_of(self, module: str) -> Scheme:
        """How the module is stored. Raises CheckpointError where no group covers it."""
        group = self._group(module)
        words = isinstance(group.weight, Grid) and self.folder.has(f"{module}.weight_packed")
        layout: Layout = "packed" if words else "plain"
        try:
            scheme = Scheme(group.weight, group.activation, group.static, layout=layout)
            if isinstance(scheme.weight, Fp4):
                return scheme  # whose scales have a dtype of their own
            return scheme.with_scale_dtype(self.folder.info(f"{module}.weight_scale").dtype)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{self.folder.path}: {module}: {error}") from None

    def shape(self, module: str) -> tuple[int, int]:
        """(out, in)."""
        shape: Sequence[int]
        if isinstance(self._group(module).weight, Fp4):
            shape = self.folder.info(f"{module}.weight_packed").shape
            shape = (*shape[:-1], 2 * shape[-1]) if shape else shape
        elif self.folder.has(f"{module}.weight_packed"):
            stored = self.folder.info(f"{module}.weight_shape")
            if stored.shape != (2,) or stored.dtype not in ("int64", "int32"):
                raise CheckpointError(
                    f"{self.folder.path}: {module}.weight_shape must be two whole numbers, outputs and inputs, not "
                    f"{stored.dtype} {list(stored.shape)}"
                )
            shape = self.folder.read(f"{module}.weight_shape").tolist()
        else:
            shape = self.folder.info(f"{module}.weight").shape
        if len(shape) != 2 or not 0 < min(shape) <= max(shape) < 1 << 31:
            raise CheckpointError(f"{self.folder.path}: {module} is quantized but not a matrix: its shape is {shape}")
        return shape[0], shape[1]

    def read(self, module: str) -> Linear:
        """The linear, without its bias. Raises CheckpointError where its tensors do not fit together."""
        scheme, shape = self.scheme_of(module), self.shape(module)
        try:
            declared = scheme.parts(shape)
            parts = {part: self.folder.read(f"{module}.{stored_part(part, scheme)}") for part in declared}
            for part in ("scale", "global"):
                if part in parts and declared[part].shape == (1,):
                    parts[part] = parts[part].reshape(1)  # some store it as a scalar
            if "shape" in parts:
                parts["shape"] = parts["shape"].long()
            packed = PackedTensor(scheme, shape, parts)
        except CheckpointError:
            raise
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.folder.path}: {module}: {error}") from None
        linear = Linear(module, packed, hadamard=self._rotation(module, shape[1]))
        if scheme.static:
            linear.activation_scale = activation_scale(self.folder, f"{module}.{stored_scale(scheme)}")
        if self.folder.has(f"{module}.weight_g_idx"):
            self._sort_columns(linear, packed, self.folder.read(f"{module}.weight_g_idx"))
        return linear

    def _rotation(self, module: str, columns: int) -> int:
        """How many columns of a module's input are rotated together; 0: they are not."""
        sizes = [each.size or columns for each in self._rotations if each.covers(module)]
        if not sizes:
            return 0
        size = sizes[0]
        if len(sizes) > 1 or size & (size - 1) or columns % size:
            raise CheckpointError(
                f"{self.folder.path}: {module}: transform_config rotates its {columns} columns in blocks of "
                f"{' and '.join(map(str, sizes))}: supported is one power of two that divides them"
            )
        return size

    def _sort_columns(self, linear: Linear, packed: PackedTensor, g_idx: Tensor) -> None:
        if bool((g_idx == -1).all()):  # declared and never filled in
            return
        inputs = packed.shape[1]
        permutation = by_group(linear.name, g_idx, inputs, packed.scheme.grid.group_size or inputs)
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


@dataclass(frozen=True)
class Rotated:
    """What one entry of `transform_config` says of the inputs of its modules."""

    targets: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    ignored: tuple[str, ...]
    size: int | None  # columns of a block; None: all that the module has

    def covers(self, module: str, dense: bool = False) -> bool:
        """Whether inputs of the module are rotated; `Linear` means those that are quantized, not one that is dense."""
        named = module in self.targets or any(p.match(module) for p in self.patterns)
        return (named or ("Linear" in self.targets and not dense)) and module not in self.ignored


def _read_transforms(config: Any, where: str) -> Iterator[Rotated]:
    groups = config.get("config_groups", {}) if isinstance(config, dict) else None
    if not isinstance(groups, dict):
        raise CheckpointError(f"{where} must be an object with config_groups")
    for name, group in groups.items():
        at = f"{where}: {name}"
        if not isinstance(group, dict) or not isinstance(group.get("apply"), list):
            raise CheckpointError(f"{at} must be an object with a list under apply")
        size = group.get("head_dim")
        for entry in group["apply"]:
            location = entry.get("location") if isinstance(entry, dict) else None
            if location in ("weight_input", "weight_output"):
                continue
            if location != "input":
                raise CheckpointError(f"{at}: a transform at run time is supported of inputs alone, not {entry!r}")
            if group.get("type") != "hadamard" or group.get("randomize", False) is not False:
                raise CheckpointError(
                    f"{at}: type {group.get('type')!r} is not supported: supported is hadamard, without randomize"
                )
            if size is not None and (type(size) is not int or size < 1):
                raise CheckpointError(f"{at}: head_dim must be a number, not {size!r}")
            targets, ignored = (_names(entry.get(key, []), f"{at}: {key}") for key in ("targets", "ignore"))
            patterns = [pattern(each.removeprefix("re:"), at) for each in targets if each.startswith("re:")]
            yield Rotated(targets, tuple(patterns), ignored, size)


def _names(found: Any, where: str) -> tuple[str, ...]:
    names = [found] if isinstance(found, str) else found
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise CheckpointError(f"{where} are names of modules, not {found!r}")
    return tuple(names)


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
    weight = _read_form(weights, f"{where}: weights") or _read_grid(
        weights, ("tensor", "channel", "group"), f"{where}: weights"
    )
    if inputs is None:
        return Group(weight, None, False)
    if isinstance(inputs, dict) and isinstance(form := _read_form(inputs, f"{where}: input_activations"), Fp4):
        fixed = form == NVFP4
        if inputs.get("dynamic") != ("local" if fixed else True):
            raise CheckpointError(f"{where}: input_activations in {form.name} with fixed scales are not supported")
        return Group(weight, form, fixed)
    if not isinstance(inputs, dict) or inputs.get("dynamic", False) not in (True, False):
        raise CheckpointError(f"{where}: input_activations must be an object with dynamic true or false")
    static = not inputs.get("dynamic", False)
    known: Sequence[Granularity] = ("tensor",) if static else ("tensor", "token", "group")
    activation = _read_grid(inputs, known, f"{where}: input_activations")
    if static and not activation.symmetric:
        raise CheckpointError(f"{where}: input_activations with a static zero point are not supported")
    return Group(weight, activation, static)


def _read_form(args: Mapping[str, Any], where: str) -> Form | None:
    """What is no grid: block scales and four-bit floats. None for all that may be one."""
    bits, kind, strategy, size = (args.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
    if strategy == "block":
        structure = args.get("block_structure")
        if (kind, bits, structure) != ("float", 8, [Fp8Blocks.size] * 2):
            raise CheckpointError(
                f"{where}: strategy 'block' is supported for float of 8 bits in blocks of 128 by 128, not {kind!r} of "
                f"{bits!r} bits in blocks {structure!r}"
            )
        return Fp8Blocks()
    if (kind, bits) != ("float", 4):
        return None
    known = next((form for form in (NVFP4, Fp4("mxfp4")) if _strategy(form) == (strategy, size)), None)
    if known is None or args.get("symmetric", True) is not True:
        raise CheckpointError(
            f"{where}: 'float' of 4 bits is supported as NVFP4 (tensor_group of 16) and MXFP4 (group of 32), "
            f"symmetric, not as {strategy!r} of {size!r}"
        )
    return known


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


def against(schemes: Collection[Scheme]) -> str | None:
    """See `libraries.Library`."""
    try:
        for scheme in schemes:
            format_of(scheme)
    except ValueError as error:
        return str(error)
    return None


def quantization_config(
    schemes: Mapping[str, Scheme],
    ignored: Sequence[str],
    embeddings: Sequence[str] = (),
    shapes: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """See `libraries.Library`. One scheme targets the class "Linear", and by name those of the modules that are
    `embeddings`; several name their modules. Raises ValueError where a scheme has no place in the format."""
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
                "input_activations": _args(scheme.activation, _dynamic(scheme)) if scheme.activation else None,
                "output_activations": None,
                "format": format_of(scheme),
            }
            for i, (scheme, modules) in enumerate(groups.items())
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def transform_config(rotated: Mapping[str, int]) -> dict[str, Any]:
    """The `transform_config` of modules whose inputs are rotated at run time, by name with the columns of a block."""
    sizes: dict[int, list[str]] = {}
    for module, size in rotated.items():
        sizes.setdefault(size, []).append(module)

    def apply(modules: list[str], location: str) -> dict[str, Any]:
        return {"targets": modules, "location": location, "inverse": location == "weight_input", "ignore": []}

    groups = {
        f"R4_{size}": {
            "type": "hadamard",
            "apply": [apply(modules, "input"), apply(modules, "weight_input")],
            "randomize": False,
            "requires_grad": False,
            "head_dim": size,
            "precision": "torch.float32",
        }
        for size, modules in sizes.items()
    }
    return {"config_groups": groups}


def format_of(scheme: Scheme) -> str:
    """The format that stores a scheme. Raises ValueError where none does."""
    if isinstance(scheme.weight, Fp4):
        return f"{scheme.weight.name}-pack-quantized"
    if not isinstance(scheme.weight, Grid | Fp8Blocks):
        raise ValueError(f"compressed-tensors has no place for {scheme.name}")
    if "e5m2" in (scheme.weight.kind, scheme.activation and scheme.activation.kind):
        raise ValueError(f"compressed-tensors has no place for {scheme.name}: its 8-bit float is e4m3, the scheme fp8")
    if scheme.layout == "packed":
        return "pack-quantized"
    if scheme.activation is None:
        return "naive-quantized"
    return "int-quantized" if scheme.weight.kind == "int" else "float-quantized"


def _dynamic(scheme: Scheme) -> bool | str:
    return "local" if scheme.activation == NVFP4 else not scheme.static


def _args(form: Form, dynamic: bool | str) -> dict[str, Any]:
    """Every key spelled out: defaults have changed between versions of the readers."""
    args: dict[str, Any] = {"block_structure": None, "dynamic": dynamic}
    args |= {"actorder": None, "observer": None, "observer_kwargs": {}}
    if isinstance(form, Grid):
        kind = "int" if form.kind == "int" else "float"
        strategy: str = form.granularity
        return _numbers(form.bits, kind, strategy, form.group_size, form.symmetric) | args
    if isinstance(form, Fp8Blocks):
        return _numbers(8, "float", "block", None) | args | {"block_structure": [form.size, form.size]}
    assert isinstance(form, Fp4), form
    scale = "torch.uint8" if form.name == "mxfp4" else "torch.float8_e4m3fn"
    return _numbers(4, "float", *_strategy(form)) | args | {"scale_dtype": scale, "zp_dtype": scale}


def _strategy(form: Fp4) -> tuple[str, int]:
    return "group" if form.name == "mxfp4" else "tensor_group", form.group


def _numbers(bits: int, kind: str, strategy: str, size: int | None, symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "group_size": size}
