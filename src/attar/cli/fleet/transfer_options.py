"""Options of KV transfer: the disk cache, and prefill apart from decode."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from attar.cli import options
from attar.cli.commands import option
from attar.errors import UserError

if TYPE_CHECKING:
    from attar.server.http.security import Keys

KV_TRANSFER = ("cache_dir", "cache_bytes", "prefill_peer", "peer_key_file", "peer_ca", "peer_cert", "peer_name")


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """Options of an engine whose blocks are saved, or exchanged with another engine."""

    cache_dir: Annotated[Path | None, option(
        "KV transfer", "DIR", "Folder of a disk cache of KV blocks. After a restart the server finds prompts there "
        "that it computed before. The files reveal the prompts.", default="none is kept",
    )] = None  # fmt: skip
    cache_bytes: Annotated[int | None, option(
        "KV transfer", "SIZE", "Limit of all files in --cache-dir, such as 20GB.", parser=options.parse_size,
    )] = None  # fmt: skip
    role: Annotated[options.Role, option(
        "KV transfer", "ROLE", "prefill: compute prompts for servers of the role decode. decode: fetch the KV blocks "
        "of prompts from --prefill-peer, and compute those that do not come. both: no peer.", "--role",
    )] = options.Role.both  # fmt: skip
    prefill_peer: Annotated[str | None, option(
        "KV transfer", "URL", "Address at which the role prefill listens and the role decode connects: unix:PATH in a "
        "folder of mode 700, or tls://HOST:PORT with the options --peer-*.",
    )] = None  # fmt: skip
    peer_key_file: Annotated[list[Path] | None, option(
        "KV transfer", "FILE", "Key that both sides share: 32 random bytes or more, mode 600. A second key is accepted "
        "as well, for rotation.",
    )] = None  # fmt: skip
    peer_ca: Annotated[Path | None, option(
        "KV transfer", "FILE", "Certificate of your own certificate authority, in PEM. No other is trusted.",
    )] = None  # fmt: skip
    peer_cert: Annotated[Path | None, option(
        "KV transfer", "FILE", "This server's certificate and private key in one PEM file, mode 600.",
    )] = None  # fmt: skip
    peer_name: Annotated[str | None, option(
        "KV transfer", "NAME", "Name that the other side's certificate must have.",
        default="of the role decode, the host of --prefill-peer",
    )] = None  # fmt: skip

    def check_transfer(self, unlike: Sequence[str]) -> None:
        """Raise UserError for options that conflict, and for an option without the one that it needs.

        `unlike` are the given options of several processes and of other devices: no KV transfer works with these.
        """
        self._check_disk_cache(unlike)
        self._check_role(unlike)

    def _check_disk_cache(self, unlike: Sequence[str]) -> None:
        if self.cache_dir is None or self.cache_bytes is None:
            if self.cache_dir is not None or self.cache_bytes is not None:
                raise UserError("option_missing", "--cache-dir DIR and --cache-bytes SIZE go together")
            return
        _check_alone("--cache-dir", unlike)

    def _check_role(self, unlike: Sequence[str]) -> None:
        if (self.role is options.Role.both) != (self.prefill_peer is None):
            message = "--role prefill or decode, and --prefill-peer unix:PATH or tls://HOST:PORT, need each other"
            raise UserError("option_missing", message)
        given: dict[str, object] = {
            "--peer-key-file": self.peer_key_file, "--peer-ca": self.peer_ca, "--peer-cert": self.peer_cert,
        }  # fmt: skip
        if self.role is options.Role.prefill or self.peer_name:  # the role decode takes it from the address
            given["--peer-name"] = self.peer_name
        if self.prefill_peer is None or self.prefill_peer.startswith("unix:"):
            if (unused := next((name for name, value in given.items() if value), None)) is not None:
                raise UserError("option_unused", f"{unused} needs --prefill-peer tls://HOST:PORT")
        elif (missing := next((name for name, value in given.items() if not value), None)) is not None:
            message = f"a prefill peer on a network needs TLS and a key: {missing} is missing"
            raise UserError("option_missing", message)
        if self.prefill_peer is not None:
            _check_alone("--role", unlike)
            self._check_peer()

    def transfer(self) -> dict[str, Any]:
        """Return the fields of `Settings` that these options set."""
        paths = {"cache_dir": self.cache_dir, "peer_ca": self.peer_ca, "peer_cert": self.peer_cert}
        return {
            **{name: None if path is None else str(path) for name, path in paths.items()},
            "cache_bytes": self.cache_bytes, "role": self.role.value, "prefill_peer": self.prefill_peer,
            "peer_keys": tuple(map(str, self.peer_key_file or ())), "peer_name": self.peer_name or "",
        }  # fmt: skip

    def with_lasting_salts(self, keys: Keys) -> Keys:
        """Return the keys with salts that a server with this disk cache has again after a restart.

        Raises UserError and OSError for a folder that is not private.
        """
        from attar.transfer.folder import PrivateFolder

        if self.cache_dir is None:
            return keys
        opened = PrivateFolder(self.cache_dir)
        try:
            return dataclasses.replace(keys, secret=opened.secret("salts of API keys"))
        finally:
            opened.close()

    def _check_peer(self) -> None:
        """Raise UserError where the address of --prefill-peer or a file of --peer-* cannot be used, OSError where a
        file is missing."""
        from attar.transfer import credentials
        from attar.transfer.wire import Address

        address = Address.parse(self.prefill_peer or "")
        if address.path is not None:
            address.check(None)
            return
        assert self.peer_ca is not None
        assert self.peer_cert is not None
        credentials.load(self.peer_key_file or (), self.peer_ca, self.peer_cert, self.peer_name or address.host)


def _check_alone(option: str, unlike: Sequence[str]) -> None:
    if unlike:
        message = f"{option} needs one engine in one process on a CPU: not with {unlike[0]}"
        raise UserError("feature_unsupported", message)
