"""Settings that an engine is started with: the one value that the server writes to its standard input.

The process that speaks HTTP makes them. It reads the tokenizer once, and an engine that died is started with the same
settings; so they say what the model's files were like then, and an engine refuses to serve others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from attar.protocol.scheduler_config import PRESETS, Limits

HOPELESS, CHANGED = 2, 3
"""Exit statuses of an engine that cannot serve its model, and of one whose files are no longer those of the server."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to serve, and with how much of the machine. None: the default, or what fits."""

    model: str
    socket: str
    device: str = "cpu"
    dtype: str | None = None  # float32 on a CPU, bfloat16 elsewhere
    activations: str = "int8g128"
    kv: str | None = None  # a scheme of kv/schemes.py
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
    name: str = ""  # what requests call the model; empty: its folder's name
    files: dict[str, str] = {}  # fingerprints of what is to be served; empty: whatever is there

    @property
    def computes_in(self) -> str:
        """The name of the dtype."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    @property
    def served_as(self) -> str:
        """What requests call the model."""
        return self.name or Path(self.model).name

    @property
    def folders(self) -> tuple[str, ...]:
        """The model and its adapters: what `files` are the fingerprints of."""
        return (self.model, *(folder for _, folder in self.adapters))

    def limits(self) -> Limits:
        """The preset with what was set besides. Raises ValueError for an unknown preset, or an impossible number."""
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}: known are {', '.join(PRESETS)}")
        names = ("policy", "max_running", "max_step_tokens", "max_waiting", "max_delay", "max_preemptions")
        changed = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(PRESETS[self.preset] if self.preset else Limits(), **changed)
