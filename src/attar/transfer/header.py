"""The header of a block outside an engine: what it says of itself, and the names by which blocks are found.

A block's name is a digest of its own tokens and all tokens before it, of the salt, and of all that its bytes depend on
(`Origin`). So engines of other models, settings or layouts never find it. The name is keyed: it tells nobody which
tokens or which API key a block belongs to. A reader trusts no name. It compares the header with what it expects, the
token ids included.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Self

import msgspec

from attar.protocol.framing import FrameTooLong

PROTOCOL = 3  # version of headers, files and messages: to be raised with any change of them
MAX_HEADER = 64 << 10  # bytes; that of a block of 64 tokens has some 500
NAME = 32  # bytes of a block's name
_ITEM = array("i").itemsize


class BlockMismatch(ValueError):
    """A block is not the one that its reader wants: the message names the field that differs."""


class Origin(msgspec.Struct, frozen=True):
    """All that a block's bytes depend on, but its tokens and its salt.

    model: identity of the model's files. settings: digest of the settings and versions that bits depend on. layout:
    that of the bytes (`block_bytes.layout_id`). tokens: those of a block. size: bytes of a block.
    """

    model: str
    settings: str
    layout: str
    tokens: int
    size: int

    def digest(self) -> bytes:
        """Return 16 bytes that stand for all of it, and for the version of the protocol."""
        told = msgspec.msgpack.encode((PROTOCOL, *msgspec.structs.astuple(self)))
        return hashlib.blake2b(told, digest_size=16, person=b"attar origin").digest()


class BlockHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What precedes a block's bytes. `before` is the name of the block before it, empty for a prompt's first.

    `salt` is a digest of the salt.
    """

    protocol: int
    model: str
    settings: str
    layout: str
    salt: bytes
    before: bytes
    tokens: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, origin: Origin, salt: bytes, before: bytes, tokens: Sequence[int]) -> Self:
        """Make the header of a block."""
        return cls(PROTOCOL, origin.model, origin.settings, origin.layout, salt, before, tuple(tokens), origin.size)

    def check(self, origin: Origin, salt: bytes, before: bytes, tokens: Sequence[int]) -> None:
        """Raise BlockMismatch where this is not the header of the block that is wanted."""
        wanted = self.of(origin, salt, before, tokens)
        for name in self.__struct_fields__:
            if getattr(self, name) != getattr(wanted, name):
                raise BlockMismatch(f"another {name}")

    def encode(self) -> bytes:
        """Return it as bytes. Raises FrameTooLong for more than MAX_HEADER."""
        found = msgspec.msgpack.encode(self)
        if len(found) > MAX_HEADER:
            raise FrameTooLong(f"a header of {len(found)} bytes is longer than {MAX_HEADER}")
        return found

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Self:
        """Return the header of bytes that `encode` made. Raises BlockMismatch for others."""
        if len(data) > MAX_HEADER:
            raise BlockMismatch("a header that is too long")
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError:
            raise BlockMismatch("no header") from None


class Names:
    """The names of an engine's blocks, keyed with a secret."""

    def __init__(self, secret: bytes, origin: Origin) -> None:
        self._key = hashlib.blake2b(origin.digest(), key=secret, digest_size=32, person=b"attar names").digest()
        self._salts = hashlib.blake2b(b"", key=secret, digest_size=32, person=b"attar salts").digest()

    def salt(self, salt: bytes) -> bytes:
        """Return the digest of a salt, 16 bytes."""
        return hashlib.blake2b(salt, key=self._salts, digest_size=16).digest()

    def chain(self, salt: bytes, tokens: array[int], size: int) -> list[bytes]:
        """Return the names of the whole blocks of `size` tokens that `tokens` begin with."""
        found = list[bytes]()
        data, step, last = memoryview(tokens).cast("B"), size * _ITEM, self.salt(salt)
        for at in range(0, len(data) - step + 1, step):
            last = hashlib.blake2b(last + data[at : at + step], key=self._key, digest_size=NAME).digest()
            found.append(last)
        return found
