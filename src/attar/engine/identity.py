"""What engines compare before they exchange blocks or continue each other's answers: digests of model and settings."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from attar.engine.loader import LoadedModel, without_kernels
from attar.kernels.native import extension
from attar.protocol.settings import Settings
from attar.version import __version__


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


def bits_of(settings: Settings, model: LoadedModel) -> str:
    """Return a digest of all that the bits of an answer depend on, but the request: versions, instruction set, model
    and settings. Folders may differ: files count by `Settings.contents`, without it by name, size, date and samples.
    Empty where bits depend on what else runs: on GPUs, in several processes, and by the reference."""
    if settings.device != "cpu" or model.executor is not None or without_kernels(model.decoder):
        return ""
    marks = [(Path(path).name, mark) for path, mark in settings.files.items()]  # in the order of the folders
    files = settings.contents or marks
    same = replace(
        _plain(settings), socket="", memory=None, threads=None, preset=None, policy=None, name="",
        tells_cache=False,
        **({} if not files else {
            "files": {}, "contents": (), "model": "", "adapters": tuple((name, "") for name, _ in settings.adapters),
            "draft": settings.draft and ("model" if settings.draft_model else settings.draft),
        }),
    )  # fmt: skip
    told = (__version__, str(torch.__version__), extension.cpu_level(), files, msgspec.to_builtins(same))
    return hashlib.blake2b(msgspec.json.encode(told, order="sorted"), digest_size=16).hexdigest()


def _plain(settings: Settings) -> Settings:
    """Return settings without those of KV transfer, handover and the disk cache, on which no bits depend."""
    return replace(
        settings, cache_dir=None, cache_bytes=None, cache_owners=(), role="both", prefill_peer=None, peer_keys=(),
        peer_ca=None, peer_cert=None, peer_name="", hands_over=False,
    )  # fmt: skip
