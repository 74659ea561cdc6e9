"""Settings that an engine is started with: the one value that the server writes to the engine's standard input.

Torch-free: the process that speaks HTTP makes it. That process reads the tokenizer once, and restarts a crashed engine
with the same settings. So they include fingerprints of the model's files, and an engine refuses to serve other files.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Self

import msgspec

from attar.errors import UserError
from attar.protocol.scheduler_config import PRESETS, SchedulerConfig
from attar.protocol.speculation import DRAFTERS, FORCED_STEP_DRAFTS, MATCH_FIRST, MAX_STEP_DRAFTS, check_draft

IMAGE_CACHE = 256 << 20  # bytes
BLOCKS_SOCKET = "blocks"  # beside an engine's own socket: where other replicas take over its cached blocks
HOPELESS, CHANGED = 2, 3
"""Exit statuses of an engine that cannot serve its model, and of one whose files differ from the server's."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model to serve, and how much of the machine to use. None stands for the default, or for what fits."""

    model: str
    socket: str
    device: str = "cpu"
    dtype: str | None = None  # float32 on a CPU, bfloat16 elsewhere
    activations: str = "int8g128"
    kv: str | None = None  # a scheme of kv/schemes.py
    context: int | None = None
    memory: int | None = None
    sharers: int = 1  # engines forked from one process: they divide `memory`, and hold the weights once
    max_cached_tokens: int | None = None
    kv_fraction: float | None = None  # fraction of the memory left after the model for the KV cache
    preset: str | None = None
    policy: str | None = None
    max_running: int | None = None
    max_step_tokens: int | None = None
    max_waiting: int | None = None
    max_delay: float | None = None  # seconds, for the policy `dynamic`
    max_preemptions: int | None = None
    threads: int | None = None
    verify: bool = True
    adapters: tuple[tuple[str, str], ...] = ()  # name and folder of each
    tp: int = 1  # processes that compute each layer together
    pp: int = 1  # stages of layers
    draft: str | None = None  # drafter of speculative decoding, or the path of a draft model
    draft_tokens: int | None = None  # drafts of a sequence in each step; None: what pays
    draft_tree: int | None = None  # nodes of a tree of drafts in each step; None: drafts are chains
    sparse_attention: str | None = None  # how many keys rows of outputs read (kv/sparse.py); None: all
    sparse_prefill: str | None = None  # what rows of prompts read (kv/sparse_prefill.py); None: all
    kv_eviction: tuple[str, ...] = ()  # policies that requests may name (kv/eviction.py), the default first
    image_cache: int = IMAGE_CACHE  # bytes of features of images; 0: a model's vision tower is not loaded
    name: str = ""  # what requests call the model; empty: its folder's name
    tells_cache: bool = False  # whether changes of the prefix cache are told (`messages.CachedBlocks`)
    hands_over: bool = False  # whether other engines of this host may take over cached blocks (`messages.TakeOver`)
    cache_dir: str | None = None  # folder of the disk cache; None: there is none
    cache_bytes: int | None = None  # most bytes of its files
    cache_owners: tuple[str, ...] = ("",)  # salts of all API keys, in hexadecimal; that of no key is empty
    role: str = "both"  # or prefill, or decode
    prefill_peer: str | None = None  # address at which an engine of the role prefill answers one of the role decode
    peer_keys: tuple[str, ...] = ()  # files of keys, of which the first makes proofs
    peer_ca: str | None = None  # file of the authority of certificates
    peer_cert: str | None = None  # file of the own certificate and its private key
    peer_name: str = ""  # that the other side's certificate must have; empty: the address's
    files: dict[str, str] = {}  # `fingerprints` of the files to serve; empty: any files
    contents: tuple[str, ...] = ()  # `content_hashes` of `folders`, where other hosts or starts compare them

    @property
    def computes_in(self) -> str:
        """Return the name of the dtype that the model computes in."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    @property
    def served_as(self) -> str:
        """Return the model's name in requests."""
        return self.name or Path(self.model).name

    @property
    def draft_model(self) -> str | None:
        """Return the path of the draft model; None where drafts are made without one."""
        return None if self.draft is None or self.draft in DRAFTERS else self.draft.removeprefix(MATCH_FIRST)

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the model, its adapters and its draft model, whose fingerprints `files` are.
        The order is that of `contents`."""
        return (self.model, *(folder for _, folder in self.adapters), *filter(None, (self.draft_model,)))

    def limits(self) -> SchedulerConfig:
        """Return the preset with the settings that differ from it. Raises ValueError for an unknown preset or drafter,
        or invalid values."""
        check_draft(self.draft, self.draft_tokens, self.draft_tree)
        if self.preset is not None and self.preset not in PRESETS:
            raise UserError("name_unknown", f"unknown preset {self.preset!r}: known are {', '.join(PRESETS)}")
        names = ("policy", "max_running", "max_step_tokens", "max_waiting", "max_delay", "max_preemptions")
        changed = {name: value for name in names if (value := getattr(self, name)) is not None}
        drafts = MAX_STEP_DRAFTS if self.draft else FORCED_STEP_DRAFTS if self.device == "cpu" else 0
        return replace(PRESETS[self.preset] if self.preset else SchedulerConfig(), **changed, max_drafts=drafts)

    def line(self) -> bytes:
        """Return the settings as a line of JSON. Its escapes also write names of files that are no Unicode here, as
        names beyond ASCII are in a locale of another encoding; msgspec's JSON does not."""
        return json.dumps(msgspec.to_builtins(self)).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes) -> Self:
        """Return the settings of a line that `line` made. Raises ValueError for another."""
        return msgspec.convert(json.loads(line), cls)
