"""The body of llama.cpp's /infill: the text between a prefix and a suffix, as editors ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta, Struct

from attar.server.api.body import Ignored
from attar.server.api.dialects.llamacpp.fields import NativeSampling

MAX_FILES = 256


class File(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Another file of the repository."""

    text: str
    filename: Annotated[str, Meta(max_length=1024)] = "tmp"
    time: Ignored = None


class InfillBody(NativeSampling, frozen=True, kw_only=True):
    """Body of /infill. `prompt` is the beginning of the text asked for."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {**NativeSampling.neutral, "grammar": ("",), "n_probs": (0,)}

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[File], Meta(max_length=MAX_FILES)] | None = None
    prompt: str | None = None
