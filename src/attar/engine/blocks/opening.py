"""What an engine's blocks depend on, as its settings say, and what is checked of their moves before a start."""

from __future__ import annotations

from pathlib import Path

from attar.engine.blocks.moves import PeerBlocks, SavedBlocks
from attar.engine.identity import model_of, settings_of
from attar.errors import UserError
from attar.protocol.settings import BLOCKS_SOCKET, Settings
from attar.transfer import credentials
from attar.transfer.credentials import Credentials
from attar.transfer.folder import PrivateFolder
from attar.transfer.wire import Address


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
        return _replicas_of(settings) if settings.hands_over else None
    check(settings, "--prefill-peer")
    if settings.role not in ("prefill", "decode"):
        raise UserError("option_missing", "--prefill-peer needs --role prefill or --role decode")
    address, serves = Address.parse(settings.prefill_peer), settings.role == "prefill"
    found = credentials_of(settings, address)
    address.check(found)
    return PeerBlocks(address, serves, model_of(settings), settings_of(settings), found)


def _replicas_of(settings: Settings) -> PeerBlocks:
    """Return the place where other replicas take over this engine's blocks."""
    address = Address(Path(settings.socket).with_name(BLOCKS_SOCKET))
    return PeerBlocks(address, True, model_of(settings), settings_of(settings), replicas=True)


def keeps_to_itself(bits: str, sliding: bool, tower: bool) -> str:
    """Return why other replicas cannot take over the blocks of an engine that is asked to hand them over; empty where
    they can. `bits` are those of `Ready`, `sliding` says whether layers have blocks of their own, and `tower` whether
    requests may have images."""
    if not bits:
        return "the bits of an answer may depend on other requests"
    if sliding:
        return "layers with a sliding window have blocks of their own"
    return "ids of images are each engine's own" if tower else ""


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
