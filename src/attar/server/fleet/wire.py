"""What a router and its hosts exchange over HTTP: four routes below /internal, which only a router key opens.

    GET  /internal/hello         the host's greeting, as JSON
    GET  /internal/tokenizer     its tokenizer and chat templates, as JSON
    GET  /internal/events        state and changes of the prefix cache, as a stream of frames without end
    POST /internal/requests      one request of the engine (`messages.Submit`, `Embed`) as JSON; its events as frames

A request carries token ids, and the API key of its client. The host checks that key, and makes the cache's salt of it:
a router cannot choose one. A request that another host has begun carries the tokens so far in `Submit.generated`.

Frames are those of `protocol/framing.py`, of msgpack. Their lengths are checked before anything is stored.
"""

from __future__ import annotations

from typing import Any

import msgspec

from attar.protocol.framing import frame
from attar.protocol.messages import MAX_FRAME
from attar.server.engine_client.connection import Event

PROTOCOL = 1
PATHS = "/internal/"
HELLO, TOKENIZER, EVENTS, REQUESTS = (PATHS + name for name in ("hello", "tokenizer", "events", "requests"))
KEY_HEADER = b"x-attar-router-key"
BEAT_SECONDS = 0.5  # between two frames of events, at most, while the host's engine is heard
MAX_TOKENIZER = 64 << 20  # bytes
FRAMES = "application/octet-stream"


class Greeting(msgspec.Struct, frozen=True):
    """What a host is: a router sends requests to hosts of equal greetings alone."""

    protocol: int
    version: str
    keyed: bool  # whether clients need API keys
    tokenizer: str  # digest of what /internal/tokenizer answers
    aliases: tuple[str, ...] = ()
    sampling: dict[str, Any] = {}  # parameters of requests that do not name them
    reasoning: bool | None = None
    template_date: str | None = None


class TokenizerFiles(msgspec.Struct, frozen=True):
    """A tokenizer: its tokenizer.json, special tokens, and chat templates."""

    backend: str
    bos_token: str | None
    eos_token: str | None
    eos_ids: tuple[int, ...]
    chat_templates: dict[str, str]


class Told(msgspec.Struct, frozen=True):
    """One frame of /internal/events. `events` lead to change `seq` of the cache of the engine `epoch`.

    The first frame of a stream has the engine's `Ready`. Where it is not `resumed`, the frame has all cached blocks;
    else those changes that the router lacks. `draining`: the host ends, and takes no more requests; nothing follows.
    """

    epoch: str
    seq: int
    events: list[Event] = []
    resumed: bool = False
    draining: bool = False


def framed(value: Any) -> bytes:
    """Return a value as one frame. Raises FrameTooLong beyond MAX_FRAME bytes."""
    return frame(msgspec.msgpack.encode(value), MAX_FRAME)
