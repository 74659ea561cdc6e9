"""Reader and writer of compressed-tensors' `config_groups`: how the modules of each group are quantized.

A group has `targets` (module names, patterns that begin with "re:", or the class name "Linear") and says how weights
and inputs are quantized, in one of the library's formats. Where several groups match a module, names win over patterns
and patterns over class names, each in alphabetical order: compressed-tensors' own rule.

Not done: floats of six bits, MXFP8, and output activations. Each is refused by name, because ignoring it would give a
model that runs and answers nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attar.checkpoints.patterns import Patterns
from attar.checkpoints.strict_io import invalid, naming, unsupported
from attar.errors import UserError
from attar.formats.scheme import NVFP4, Granularity, Grid, Scheme
from attar.formats.weight_formats import Fp4, Fp8Blocks, WeightFormat

PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
MARLIN = "marlin-24"
FORMATS = ("pack-quantized", *PLAIN, "mxfp4-pack-quantized", "nvfp4-pack-quantized", MARLIN)
MIXED = "mixed-precision"


# Reading


@dataclass(frozen=True)
class Group:
    """Settings of a config group for its modules; the tensors give the rest of the scheme."""

    weight: WeightFormat
    activation: WeightFormat | None
    static: bool


class Groups:
    """Groups of a config, by their targets. Raises CheckpointError where one asks for what is not supported."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._where = where
        self._of: dict[str, Group] = {}
        patterns, compiled = Patterns(), dict[str, re.Pattern[str]]()
        for name, group in config["config_groups"].items():
            at = f"{where}: {name}"
            if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
                raise invalid(f"{at} must be an object with targets")
            _check_format(group.get("format") or config.get("format"), group.get("format") is None, at)
            read = _read_group(group, at)
            for target in group["targets"]:
                if not isinstance(target, str):
                    raise invalid(f"{at}: a target is a string, not {target!r}")
                self._of[target] = read
                if target.startswith("re:"):
                    compiled[target] = patterns.compile(target.removeprefix("re:"), at)
        self._patterns = dict(sorted(compiled.items()))

    def of(self, module: str) -> Group:
        """Return the group of a module that is stored quantized. Raises CheckpointError where none covers it."""
        if module in self._of:
            return self._of[module]
        for target, compiled in self._patterns.items():
            if compiled.match(module):
                return self._of[target]
        if "Linear" in self._of:
            return self._of["Linear"]
        raise invalid(
            f"{self._where}: {module} is stored quantized, but no target of the groups matches it: "
            f"{', '.join(list(self._of)[:5])}"
        )


def _check_format(value: Any, inherited: bool, where: str) -> None:
    if value in FORMATS or (value == MIXED and inherited):  # mixed-precision: the tensors decide
        return
    raise unsupported(f"{where}: format {value!r} is not one that attar reads: {', '.join(FORMATS)}")


def _read_group(group: Mapping[str, Any], where: str) -> Group:
    if group.get("output_activations"):
        raise unsupported(f"{where}: output_activations is set: quantized outputs are not supported")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, dict):
        raise invalid(f"{where}: needs weights that say how they are quantized")
    if weights.get("dynamic"):
        raise unsupported(f"{where}: weights.dynamic is set: weights have fixed scales")
    weight = _read_form(weights, f"{where}: weights") or _read_grid(
        weights, ("tensor", "channel", "group"), f"{where}: weights"
    )
    if inputs is None:
        return Group(weight, None, False)
    if isinstance(inputs, dict) and isinstance(form := _read_form(inputs, f"{where}: input_activations"), Fp4):
        fixed = form == NVFP4
        if inputs.get("dynamic") != ("local" if fixed else True):
            raise unsupported(f"{where}: input_activations in {form.name} with fixed scales are not supported")
        return Group(weight, form, fixed)
    if not isinstance(inputs, dict) or inputs.get("dynamic", False) not in (True, False):
        raise invalid(f"{where}: input_activations must be an object with dynamic true or false")
    static = not inputs.get("dynamic", False)
    known: Sequence[Granularity] = ("tensor",) if static else ("tensor", "token", "group")
    activation = _read_grid(inputs, known, f"{where}: input_activations")
    if static and not activation.symmetric:
        raise unsupported(f"{where}: input_activations with a static zero point are not supported")
    return Group(weight, activation, static)


def _read_form(args: Mapping[str, Any], where: str) -> WeightFormat | None:
    """Return a form other than a grid: block scales and four-bit floats. None for others, which may be a grid."""
    bits, kind, strategy, size = (args.get(key) for key in ("num_bits", "type", "strategy", "group_size"))
    if strategy == "block":
        structure = args.get("block_structure")
        if (kind, bits, structure) != ("float", 8, [Fp8Blocks.size] * 2):
            raise unsupported(
                f"{where}: strategy 'block' is supported for float of 8 bits in blocks of 128 by 128, not {kind!r} of "
                f"{bits!r} bits in blocks {structure!r}"
            )
        return Fp8Blocks()
    if (kind, bits) != ("float", 4):
        return None
    known = next((form for form in (NVFP4, Fp4("mxfp4")) if _strategy(form) == (strategy, size)), None)
    if known is None or args.get("symmetric", True) is not True:
        raise unsupported(
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
        raise unsupported(f"{where}: strategy {strategy!r} is not supported here: {', '.join(known)} are")
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    if type(bits) is not int or kind not in ("int", "float") or (kind == "float" and bits != 8):
        raise unsupported(f"{where}: {kind!r} of {bits!r} bits is not supported: int of 2 to 8, and float of 8, are")
    if granularity == "group" and type(size) is not int:
        raise invalid(f"{where}: group_size must be a number, not {size!r}")
    with naming(where, "quantization_invalid"):
        symmetric, size = args.get("symmetric", True) is True, size if granularity == "group" else None
        return Grid("int" if kind == "int" else "e4m3", bits, symmetric, granularity, size)


# Writing


def config_groups(schemes: Mapping[str, Scheme], embeddings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the groups of modules with these schemes, by name. Raises ValueError as `format_of`.

    One scheme targets the class "Linear", and by name the modules that are `embeddings`; several schemes name their
    modules.
    """
    groups: dict[Scheme, list[str]] = {}
    for module, scheme in schemes.items():
        groups.setdefault(scheme, []).append(module)
    return {
        f"group_{i}": {
            "targets": ["Linear", *embeddings] if len(groups) == 1 else modules,
            "weights": _args(scheme.weight, dynamic=False),
            "input_activations": _args(scheme.activation, _dynamic(scheme)) if scheme.activation else None,
            "output_activations": None,
            "format": format_of(scheme),
        }
        for i, (scheme, modules) in enumerate(groups.items())
    }


def format_of(scheme: Scheme) -> str:
    """Return the format that stores a scheme. Raises ValueError where none does."""
    if isinstance(scheme.weight, Fp4):
        return f"{scheme.weight.name}-pack-quantized"
    if not isinstance(scheme.weight, Grid | Fp8Blocks):
        raise UserError("scheme_unsupported", f"compressed-tensors has no place for {scheme.name}")
    if "e5m2" in (scheme.weight.kind, scheme.activation and scheme.activation.kind):
        raise UserError(
            "scheme_unsupported",
            f"compressed-tensors has no place for {scheme.name}: its 8-bit float is e4m3, the scheme fp8",
        )
    if scheme.layout == "packed":
        return "pack-quantized"
    if scheme.activation is None:
        return "naive-quantized"
    return "int-quantized" if scheme.weight.kind == "int" else "float-quantized"


def _dynamic(scheme: Scheme) -> bool | str:
    return "local" if scheme.activation == NVFP4 else not scheme.static


def _args(form: WeightFormat, dynamic: bool | str) -> dict[str, Any]:
    """Return the arguments of a form with every key spelled out: defaults have changed between versions of the
    readers."""
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
