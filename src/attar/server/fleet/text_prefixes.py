"""What hosts have cached, guessed from texts: for servers that tell nothing of their caches.

A prompt's text is cut into pieces of PIECE bytes, and each piece's digest includes all before it, as in
`protocol/block_digests.py`. A host that has begun an answer counts as having the prompt's pieces. Those that were not
used for longest are forgotten. Texts are the bytes of the request's fields, so no template is needed. Requests
of different keys and models have nothing in common.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from attar.routing.router import Asked, Router

PIECE = 512  # bytes
BYTES_A_TOKEN = 4  # about
PIECES = 32_768  # that are remembered of a host: some four million tokens
PLACES = 1 << 16  # choices of a host: it refuses by itself what it has no room for


class PromptBody(msgspec.Struct):
    """Fields of a request that a router reads; hosts read the rest."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")

    def asked(self, salt: bytes) -> Asked:
        """Return what the router needs to know of the request of a key, or its salt."""
        model = hashlib.blake2b((self.model or "").encode("utf-8", "surrogatepass"), digest_size=16).digest()
        key = hashlib.blake2b(salt + model, digest_size=32, person=b"attar texts").digest()
        text = b"".join(bytes(each) for each in (self.tools, self.system, self.messages, self.prompt, self.input))
        return Asked(max(1, len(text) // BYTES_A_TOKEN), chain(key, text), max(1, min(self.n or 1, PLACES)))


def chain(key: bytes, text: bytes) -> array[int]:
    """Return the digests of the whole pieces that a text begins with."""
    found, last, view = array("Q"), b"", memoryview(text)
    for at in range(0, len(text) - PIECE + 1, PIECE):
        hashed = hashlib.blake2b(last, digest_size=8, key=key)
        hashed.update(view[at : at + PIECE])
        last = hashed.digest()
        found.append(int.from_bytes(last, "little"))
    return found


class TextRouter:
    """A router over hosts that tell nothing; `router` decides."""

    def __init__(self, hosts: int) -> None:
        self.router = Router(hosts, PIECE // BYTES_A_TOKEN)
        self._recent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(hosts)]
        for host in range(hosts):
            self.forget(host)

    def forget(self, host: int) -> None:
        """Forget what a host has cached: its process has ended."""
        self._recent[host].clear()
        self.router.begin(host, PIECES, PLACES)

    def begun(self, id: str, host: int, digests: Iterable[int]) -> None:
        """Note that a host has begun the answer to a prompt, whose pieces it has cached now."""
        self.router.begun(id)
        recent, new = self._recent[host], list[int]()
        for digest in digests:
            if digest not in recent:
                new.append(digest)
            recent[digest] = None
            recent.move_to_end(digest)
        old = [recent.popitem(last=False)[0] for _ in range(max(0, len(recent) - PIECES))]
        self.router.prefixes.evicted(host, old)
        self.router.prefixes.stored(host, new)
