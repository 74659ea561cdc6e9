"""What an engine is started with, as its process reads it: the one value that the server writes to its standard input.

Torch-free: the process that speaks HTTP makes it.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from attar.engine.limits import PRESETS, Limits


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to serve, and with how much of the machine. None: the default, or what fits."""

    model: str
    socket: str
    dtype: str = "float32"
    activations: str = "int8g128"
    kv: str | None = None  # a scheme of formats/kv.py
    context: int | None = None
    memory: int | None = None
    max_cached_tokens: int | None = None
    preset: str | None = None
    policy: str | None = None
    max_running: int | None = None
    max_step_tokens: int | None = None
    max_waiting: int | None = None
    threads: int | None = None
    verify: bool = True

    def limits(self) -> Limits:
        """The preset with what was set besides. Raises ValueError for an unknown preset, or an impossible number."""
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}: known are {', '.join(PRESETS)}")
        names = ("policy", "max_running", "max_step_tokens", "max_waiting")
        changed = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(PRESETS[self.preset] if self.preset else Limits(), **changed)
