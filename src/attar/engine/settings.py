"""What an engine is started with, as its process reads it: the one value that the server writes to its standard input.

Torch-free: the process that speaks HTTP makes it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from attar.engine.limits import PRESETS, Limits

MAX_ADAPTERS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def parse_adapters(given: Sequence[str], model: str) -> tuple[tuple[str, str], ...]:
    """Names and folders of adapters, each given as NAME=FOLDER, to be served beside `model`.

    Raises ValueError for another form, a name that requests could not ask for or that stands for something already,
    too many, and a folder that holds no adapter.
    """
    if len(given) > MAX_ADAPTERS:
        raise ValueError(f"{len(given)} adapters: at most {MAX_ADAPTERS} are served at a time")
    found: dict[str, str] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals or not folder or not NAME.fullmatch(name):
            raise ValueError(
                f"an adapter is given as NAME=FOLDER, its name of letters, digits and . _ : -, not {each[:160]!r}"
            )
        if name in found or name == model:
            what = "the model's own name" if name == model else "the name of two adapters"
            raise ValueError(f"--adapter {name}: requests ask for one by its name, and this is {what}")
        if not (Path(folder) / "adapter_config.json").is_file():
            raise ValueError(f"--adapter {name}: {folder} holds no adapter_config.json: not a PEFT adapter's folder")
        found[name] = folder
    return tuple(found.items())


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to serve, and with how much of the machine. None: the default, or what fits."""

    model: str
    socket: str
    device: str = "cpu"
    dtype: str | None = None  # float32 on a CPU, bfloat16 elsewhere
    activations: str = "int8g128"
    kv: str | None = None  # a scheme of formats/kv.py
    context: int | None = None
    memory: int | None = None
    max_cached_tokens: int | None = None
    kv_fraction: float | None = None  # of what the model leaves of the memory: what keys and values may take of it
    preset: str | None = None
    policy: str | None = None
    max_running: int | None = None
    max_step_tokens: int | None = None
    max_waiting: int | None = None
    max_delay: float | None = None  # seconds, of the policy `dynamic`
    max_preemptions: int | None = None
    threads: int | None = None
    verify: bool = True
    adapters: tuple[tuple[str, str], ...] = ()  # name and folder of each
    tp: int = 1  # processes that compute each layer together
    pp: int = 1  # stages of layers

    @property
    def computes_in(self) -> str:
        """The name of the dtype."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    def limits(self) -> Limits:
        """The preset with what was set besides. Raises ValueError for an unknown preset, or an impossible number."""
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}: known are {', '.join(PRESETS)}")
        names = ("policy", "max_running", "max_step_tokens", "max_waiting", "max_delay", "max_preemptions")
        changed = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(PRESETS[self.preset] if self.preset else Limits(), **changed)
