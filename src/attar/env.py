"""Environment flags of attar, typed, in one table: the fields of `Env`.

A flag is `ATTAR_` and the field's name in capitals. Flags hold what applies to a whole process and has no place in a
function's arguments: which kernels run, where tests find data. An invalid value is an error. So is a name that starts
with `ATTAR_` and is not in the table, because a misspelt flag that is silently ignored costs an afternoon. An empty
value means that the flag is not set.

This module does not import torch. The environment is read once, at the first `get()`.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from attar.errors import UserError

PREFIX = "ATTAR_"

Cpu = Literal["portable", "neon", "avx2", "avxvnni", "avx512", "amx"]
Kernels = Literal["ref"]


@dataclass(frozen=True, slots=True)
class Env:
    """Values of the flags. Each flag is optional: its type gives the allowed values, None stands for an unset flag."""

    cpu: Cpu | None = field(default=None, metadata={
        "doc": "Instruction set level of the CPU kernels; an error where the machine cannot run it. "
        "Default: the highest it can.",
    })  # fmt: skip
    kernels: Kernels | None = field(default=None, metadata={
        "doc": "`ref` makes every operation run its readable PyTorch reference. "
        "Default: the first backend with no reason against it.",
    })  # fmt: skip
    api_key: str | None = field(default=None, metadata={
        "doc": "Key that `attar serve` asks of its clients, 32 characters or more; `--api-key-file` takes several.",
        "secret": True,
    })  # fmt: skip
    faults: str | None = field(default=None, metadata={
        "doc": "Makes requests fail on purpose, at the named points of `attar/faults.py`: "
        "NAME[:after=N][:times=N][:every=N][:key=PREFIX],...",
    })  # fmt: skip
    cache: Path | None = field(default=None, metadata={
        "doc": "Folder where measured rates of this machine are kept. Default: `attar` in XDG_CACHE_HOME or ~/.cache.",
    })  # fmt: skip
    test_data: Path | None = field(default=None, metadata={
        "doc": "Folder of the models and texts that tests use. Default: `shared` beside the repository.",
    })  # fmt: skip
    real_models: Path | None = field(default=None, metadata={
        "doc": "Folder of the real models that tests and benches read. Default: these tests are skipped.",
    })  # fmt: skip


@functools.cache
def get() -> Env:
    """Return the flags of this process, read once. Raises ValueError for an invalid value or an unknown name."""
    return read(os.environ)


def read(environ: Mapping[str, str]) -> Env:
    """Return the flags in `environ`. Raises ValueError that names the valid values or the nearest names."""
    kinds = {flag_name(name): kind for name, kind in _kinds().items()}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in kinds:
            known = [kind.removeprefix(PREFIX) for kind in kinds]
            near = difflib.get_close_matches(name.removeprefix(PREFIX), known) or known
            message = f"unknown environment flag {name}: did you mean {' or '.join(map(flag_name, near))}?"
            raise UserError("name_unknown", message)
    given = {name: _parse(name, kind, environ[name]) for name, kind in kinds.items() if environ.get(name)}
    return Env(**{name.removeprefix(PREFIX).lower(): value for name, value in given.items()})


def flag_name(field_name: str) -> str:
    """Return the environment variable of a field of `Env`."""
    return PREFIX + field_name.upper()


def table(flags: Env) -> list[dict[str, str | None]]:
    """Return name, type, value (None: not set) and documentation of each flag, for display."""
    return [
        {
            "name": flag_name(f.name),
            "type": "|".join(get_args(kind)) if get_origin(kind) is Literal else kind.__name__.lower(),
            "value": _shown(f, getattr(flags, f.name)),
            "doc": f.metadata["doc"],
        }
        for f, kind in zip(fields(Env), _kinds().values(), strict=True)
    ]


def _shown(flag: Field[Any], value: object) -> str | None:
    if value is None:
        return None
    return "(set)" if "secret" in flag.metadata else str(value)


def _kinds() -> dict[str, Any]:
    """Map each field's name to the type of its value: a Literal of words, or a class to construct from the text."""
    hints = get_type_hints(Env)
    return {f.name: next(kind for kind in get_args(hints[f.name]) if kind is not NoneType) for f in fields(Env)}


def _parse(flag: str, kind: Any, text: str) -> Any:
    if get_origin(kind) is not Literal:
        return kind(text)
    words = get_args(kind)
    if text not in words:
        message = f"{flag}={text!r} is not a value of this flag: it takes {' or '.join(words)}"
        raise UserError("option_malformed", message)
    return text
