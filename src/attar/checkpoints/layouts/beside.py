"""Quantization settings that do not stand in config.json's `quantization_config`, or stand there and say nothing.

AutoGPTQ, AutoAWQ and SqueezeLLM wrote their settings into a file beside config.json in 2023; transformers moved them
into config.json later. Other libraries leave `quantization_config` in config.json when they merge a model back to 16
bits. So the tensors decide in both cases: settings are looked for beside config.json where they show a quantized
module, and settings are dropped where none is quantized.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from attar.checkpoints.folder import DENSE, Folder, read_config
from attar.checkpoints.layouts import squeezellm

logger = logging.getLogger(__name__)

FILES = ("quantize_config.json", "quant_config.json")
KEY = "quantization_config"
CODES = (".qweight", f".{squeezellm.TABLE}")  # ends of tensors that these libraries' settings are about


def settle(folder: Folder) -> None:
    """Put settings that stand in a file beside config.json into the folder's config, where that has none."""
    found = next((folder.path / name for name in FILES if (folder.path / name).is_file()), None)
    quantized = {end for name in folder.names() for end in CODES if name.endswith(end)}
    if folder.config.get(KEY) is None and found is not None and quantized:
        settings = read_config(found)
        folder.config = {**folder.config, KEY: {"quant_method": _method(settings, quantized), **settings}}


def _method(settings: dict[str, Any], quantized: set[str]) -> str:
    if CODES[1] in quantized:
        return squeezellm.METHOD
    return "awq" if "w_bit" in settings or "zero_point" in settings else "gptq"


def drop_stale(folder: Folder, modules: Iterable[str]) -> None:
    """Take the settings out of the folder's config, with a warning, where none of the linears `modules`, by stored
    name, is stored quantized. Those that rotate inputs at run time stay: they say something of dense weights too."""
    settings = folder.config.get(KEY)
    if settings is None or (isinstance(settings, dict) and settings.get("transform_config")):
        return
    parts: defaultdict[str, set[str]] = defaultdict(set)
    for name in folder.names():
        module, _, part = name.rpartition(".")
        parts[module].add(part)
    if any(_quantized(folder, module, parts) for module in modules):
        return
    folder.config = {key: value for key, value in folder.config.items() if key != KEY}
    logger.warning("%s: no linear is stored quantized, so the config's %s is not used", folder.path, KEY)


def _quantized(folder: Folder, module: str, parts: defaultdict[str, set[str]]) -> bool:
    weight = f"{module}.weight"
    dense = folder.has(weight) and folder.info(weight).dtype in DENSE
    return bool(parts[weight] or parts[module] - ({"weight", "bias"} if dense else {"bias"}))
