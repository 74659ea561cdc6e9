"""Data of the lab's page as one JSON object, the same in a file and from a server. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from attar.plan.gpus import GPUS
from attar.protocol.model_shape import MachineRates, ModelShape


def facts(
    model: ModelShape | None, machine: MachineRates | None, written: str = "", live: bool = False
) -> dict[str, Any]:
    """Return the page's data: a model, a machine, and the GPUs of data sheets. None is what is not known or measured.

    `written`: when, for a file. `live`: whether the page asks a server for more.
    """
    return {
        "live": live, "written": written,
        "model": None if model is None else msgspec.to_builtins(model),
        "machine": None if machine is None else msgspec.to_builtins(machine),
        "gpus": [
            {"name": each.name, "memory": each.memory, "read": each.bandwidth, "bf16": each.operations["bf16"],
             "int8": each.operations["int8"]}
            for each in GPUS.values()
        ],
        "outputs": [], "channels": [], "replay": [], "engine": None, "sequences": None, "steps": [],
    }  # fmt: skip


def output(
    label: str, size: int, bits: float, figures: Mapping[str, tuple[float, float | None, float | None]],
    decode: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Return a compressed output's entry, from its receipt: `figures` are values with the ends of their intervals."""

    def value(name: str, at: int = 0) -> float | None:
        return figures[name][at] if name in figures else None

    return {
        "label": label, "bytes": size, "bits": bits, "kl": value("kl_mean"), "low": value("kl_mean", 1),
        "high": value("kl_mean", 2), "top1": value("top1"), "ear": value("ear"), "decode": decode,
    }  # fmt: skip
