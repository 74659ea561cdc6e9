"""Reader and writer of compressed-tensors' `transform_config`: the linears whose inputs are rotated at run time.

It has groups of type "hadamard", whose `apply` lists modules with a location. Only "input" counts; "weight_input" and
"weight_output" are in the weights already. The matrix of an input is Sylvester's, in blocks of `head_dim` columns where
that is given, and is not stored. Not done, and refused by name: other types, random numbers, and transforms of outputs,
queries and keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attar.checkpoints.patterns import Patterns
from attar.checkpoints.strict_io import CheckpointError, invalid, unsupported

MAX_ENTRIES = 1000  # of inputs: each is compared with every module
FOLDED = ("weight_input", "weight_output")


@dataclass(frozen=True)
class Rotated:
    """Rotation of the inputs of some modules: one entry of `transform_config`."""

    targets: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]
    ignored: frozenset[str]
    size: int | None  # columns of a block; None: all columns of the module

    def covers(self, module: str, dense: bool = False) -> bool:
        """Return whether inputs of the module are rotated; `Linear` covers quantized modules, not a `dense` one."""
        named = module in self.targets or any(p.match(module) for p in self.patterns)
        return (named or ("Linear" in self.targets and not dense)) and module not in self.ignored


class Rotations:
    """All rotations of a config. Raises CheckpointError where it asks for what is not supported."""

    def __init__(self, config: Any, where: str) -> None:
        self._where = where
        self._entries = tuple(_read(config, where))

    def reach(self, module: str) -> bool:
        """Return whether they would rotate the inputs of a dense module."""
        return any(each.covers(module, dense=True) for each in self._entries)

    def of(self, module: str, columns: int) -> int:
        """Return how many columns of a quantized module's input are rotated together; 0: none. Raises CheckpointError
        where that is not one power of two that divides the columns."""
        sizes = [each.size or columns for each in self._entries if each.covers(module)]
        if not sizes:
            return 0
        size = sizes[0]
        if len(sizes) > 1 or size & (size - 1) or columns % size:
            raise unsupported(
                f"{self._where}: the {columns} columns of {module} are rotated in blocks of "
                f"{' and '.join(map(str, sizes))}: supported is one power of two that divides them"
            )
        return size


def _read(config: Any, where: str) -> Iterator[Rotated]:
    groups = config.get("config_groups", {}) if isinstance(config, dict) else None
    if not isinstance(groups, dict):
        raise invalid(f"{where} must be an object with config_groups")
    patterns, count = Patterns(), 0
    for name, group in groups.items():
        at = f"{where}: {name}"
        if not isinstance(group, dict) or not isinstance(group.get("apply"), list):
            raise invalid(f"{at} must be an object with a list under apply")
        size = group.get("head_dim")
        for entry in group["apply"]:
            location = entry.get("location") if isinstance(entry, dict) else None
            if location in FOLDED:
                continue
            if location != "input":
                raise unsupported(f"{at}: a transform at run time is supported of inputs alone, not {entry!r}")
            if group.get("type") != "hadamard" or group.get("randomize", False) is not False:
                raise unsupported(
                    f"{at}: type {group.get('type')!r} is not supported: supported is hadamard, without randomize"
                )
            if size is not None and (type(size) is not int or size < 1):
                raise invalid(f"{at}: head_dim must be a number, not {size!r}")
            targets, ignored = (_names(entry.get(key, []), f"{at}: {key}") for key in ("targets", "ignore"))
            found = [patterns.compile(each.removeprefix("re:"), at) for each in targets if each.startswith("re:")]
            if (count := count + 1) > MAX_ENTRIES:
                raise CheckpointError(
                    "checkpoint_too_large",
                    f"{at}: more than the {MAX_ENTRIES} rotations that attar accepts in a config",
                )
            yield Rotated(frozenset(targets), tuple(found), frozenset(ignored), size)


def _names(found: Any, where: str) -> tuple[str, ...]:
    names = [found] if isinstance(found, str) else found
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise invalid(f"{where} are names of modules, not {found!r}")
    return tuple(names)


def transform_config(rotated: Mapping[str, int]) -> dict[str, Any]:
    """Return the `transform_config` for block sizes in columns by module: inputs rotated at run time."""
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
