"""The sampling parameters that a model recommends, from its folder or its GGUF file. Torch-free."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from attar.checkpoints.folder import GENERATION, read_config
from attar.checkpoints.gguf.file import GgufFile
from attar.checkpoints.strict_io import naming
from attar.checkpoints.vocabulary import is_gguf
from attar.errors import UserError
from attar.protocol.request import SamplingParams

_NAMES = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_GGUF = "general.sampling."
_GGUF_NAMES = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "penalty_alpha": 0, "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1, "bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [],
    "mirostat": 0, "xtc_probability": 0,
}  # fmt: skip
"""Settings that attar lacks, with their values that change nothing."""

logger = logging.getLogger(__name__)


def sampling(path: Path) -> dict[str, Any]:
    """Return the parameters of `SamplingParams` that the model at `path` recommends.

    `do_sample: false` is temperature 0, as in transformers. Settings that attar lacks are named in a warning. Raises
    ValueError where the model recommends nothing, or a value is out of range.
    """
    found = _read(path)
    missing = [name for name, value in _NEUTRAL.items() if found.get(name) not in (None, value)]
    if missing:
        logger.warning("%s: not supported, and ignored: %s", path, ", ".join(missing))
    names = _GGUF_NAMES if is_gguf(path) else _NAMES
    given = {own: found[name] for name, own in names.items() if found.get(name) is not None}
    if found.get("do_sample") is False:
        given["temperature"] = 0
    if not given:
        raise UserError("config_invalid", f"{path} recommends no sampling parameters: leave out --generation-config")
    with naming(path):
        SamplingParams(**given)
    return given


def _read(path: Path) -> dict[str, Any]:
    """Return what the model says of sampling, by the names of its file."""
    if is_gguf(path):
        metadata = GgufFile(path).metadata
        return {key.removeprefix(_GGUF): value for key, value in metadata.items() if key.startswith(_GGUF)}
    return read_config(path / GENERATION) if (path / GENERATION).exists() else {}
