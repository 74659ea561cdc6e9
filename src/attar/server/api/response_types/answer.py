"""The base of the shapes of answers."""

from __future__ import annotations

from msgspec import Struct


class Answer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the parts of an answer."""
