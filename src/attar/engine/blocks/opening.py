"""What an engine's blocks depend on, as its settings say, and what is checked of their moves before a start."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from attar.engine.blocks.moves import PeerBlocks, SavedBlocks
from attar.errors import UserError
from attar.kernels.native import extension
from attar.protocol.settings import Settings
from attar.transfer import credentials
from attar.transfer.credentials import Credentials
from attar.transfer.folder import PrivateFolder
from attar.transfer.wire import Address
from attar.version import __version__


def open_saved(settings: Settings) -> SavedBlocks | None:
    """Open and lock the folder of the disk cache of `settings`; None where they have none.

    Raises UserError for settings that it does not go with, and as `PrivateFolder`; OSError where the folder cannot be
    made.
    """
    if settings.cache_dir is None:
        return None
    check(settings, "--cache-dir")
    if settings.cache_bytes is None:
        raise UserError("option_missing", "--cache-dir needs --cache-bytes, the most that its files may take")
    folder = PrivateFolder(Path(settings.cache_dir))
    try:
        folder.lock()
        owners = tuple(map(bytes.fromhex, settings.cache_owners))
        return SavedBlocks(folder, settings.cache_bytes, owners, model_of(settings), settings_of(settings))
    except BaseException:  # whatever it is: nobody else gives up the folder and its lock
        folder.close()
        raise


def peer_of(settings: Settings) -> PeerBlocks | None:
    """Return the engine that blocks are exchanged with; None where there is none.

    Raises UserError for settings that this does not go with, and as `Address.parse`, `Address.check` and
    `credentials.load`; OSError for a file or folder that is not there.
    """
    if settings.prefill_peer is None:
        return None
    check(settings, "--prefill-peer")
    if settings.role not in ("prefill", "decode"):
        raise UserError("option_missing", "--prefill-peer needs --role prefill or --role decode")
    address, serves = Address.parse(settings.prefill_peer), settings.role == "prefill"
    found = credentials_of(settings, address)
    address.check(found)
    return PeerBlocks(address, serves, model_of(settings), settings_of(settings), found)


def credentials_of(settings: Settings, address: Address) -> Credentials | None:
    """Return the credentials of settings; None for a Unix socket. Raises UserError where some are missing, and as
    `credentials.load`; OSError for a file that is not there."""
    if address.path is not None:
        return None
    keys, authority, certificate = settings.peer_keys, settings.peer_ca, settings.peer_cert
    if not keys or authority is None or certificate is None or (settings.role == "prefill" and not settings.peer_name):
        address.check(None)
    assert authority is not None
    assert certificate is not None
    name = settings.peer_name or address.host
    return credentials.load(tuple(map(Path, keys)), Path(authority), Path(certificate), name)


def check(settings: Settings, option: str) -> None:
    """Raise UserError where the bits of a block depend on what else runs: on GPUs, and in several processes."""
    where = f"{option} is for a model in one process on a CPU"
    if settings.device != "cpu":
        raise UserError("feature_unsupported", f"{where}, not for --device {settings.device}")
    if settings.tp * settings.pp > 1:
        raise UserError("feature_unsupported", f"{where}, not for --tp and --pp")


def model_of(settings: Settings) -> str:
    """Return a digest of the contents of the model's and the adapters' files, or of their fingerprints where the
    settings have no contents."""
    told = msgspec.json.encode(settings.contents[: 1 + len(settings.adapters)] or settings.files, order="sorted")
    return hashlib.blake2b(told, digest_size=16).hexdigest()


def settings_of(settings: Settings) -> str:
    """Return a digest of versions, instruction set, and all settings that the bits of keys and values depend on.

    Those of the scheduler, of speculation and of sampling are not among them.
    """
    told = (
        __version__, str(torch.__version__), extension.cpu_level(), settings.computes_in, settings.activations,
        settings.kv, settings.context, [name for name, _ in settings.adapters], settings.sparse_attention,
        settings.sparse_prefill,
    )  # fmt: skip
    return hashlib.blake2b(msgspec.json.encode(told), digest_size=16).hexdigest()


def plain(settings: Settings) -> Settings:
    """Return settings without those of KV transfer and the disk cache, on which no bits depend."""
    return replace(
        settings, cache_dir=None, cache_bytes=None, cache_owners=(), role="both", prefill_peer=None, peer_keys=(),
        peer_ca=None, peer_cert=None, peer_name="",
    )  # fmt: skip
