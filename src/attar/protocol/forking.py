"""Messages between a server and the process that forks its engines (`engine/fork_server.py`): JSON, each one datagram.

A descriptor comes with `Load` and `Start`: a pipe with the settings as a line. An engine keeps it as its standard
input, whose end tells it that the server has gone.
"""

from __future__ import annotations

import msgspec

MAX_MESSAGE = 1 << 16  # bytes: a processor's number takes at most 8


class Load(msgspec.Struct, frozen=True, tag=True):
    """To the process, first of all: load a model by the settings that follow."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """To the process: fork an engine, by a number that was not used, on these processors."""

    number: int
    cores: tuple[int, ...]


class Kill(msgspec.Struct, frozen=True, tag=True):
    """To the process: kill an engine, if it still runs."""

    number: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """To the server: the model is loaded."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """To the server: an engine has ended with this status, negative for a signal."""

    number: int
    status: int


encode = msgspec.json.Encoder().encode
decode_order = msgspec.json.Decoder(Load | Start | Kill).decode
decode_report = msgspec.json.Decoder(Loaded | Ended).decode
