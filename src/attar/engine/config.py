"""What an engine is built with, besides a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.engine.blocks.moves import PeerBlocks, SavedBlocks
from attar.engine.images.tower import VisionTower
from attar.execution import kv_cache
from attar.kv.eviction import Eviction
from attar.kv.schemes import KvScheme
from attar.kv.sparse_prefill import SparsePrefill
from attar.model.decoder import Decoder
from attar.model.sparse_layers import SparseLayers
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import IMAGE_CACHE
from attar.protocol.speculation import MAX_DRAFT_TOKENS
from attar.sampling.drafters.drafter import Drafter
from attar.sampling.pace import Pace


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine: `blocks` blocks of cache, and sequences of at most `context` tokens.

    kv: scheme of the KV cache, by default the lossless one. adapters: names of those that `lora.install` gave the
    decoder, in the order of their numbers. overlaps: whether steps are launched before the tokens of the one before are
    known, and tokens chosen without a look at the logits; by default on a GPU. drafter: the source of drafts of
    speculative decoding, none by default. draft_tokens: drafts of a sequence in each step; None decides by what pays.
    draft_tree: nodes of a sequence's tree of drafts in each step; None where drafts are chains. sparse: which layers
    read few keys in rows of outputs, and how many; None where all read all. prefill: how rows of prompts read few
    keys; None where they read all. sliding_blocks: blocks of layers with a sliding window, which are released behind
    it; by default those have `blocks` too. evictions: policies of KV eviction that requests may name; the first is
    that of requests which name none. tower: what computes the features of images, of which `image_cache` bytes are
    kept; without one, requests have no images. saved: where finished blocks are saved, and fetched from; None: nowhere.
    peer: the engine that computes prompts for this one, or the place where this one does so for others; None: neither.
    """

    blocks: int
    context: int
    limits: SchedulerConfig = field(default_factory=SchedulerConfig)
    eos_ids: frozenset[int] = frozenset()
    kv: KvScheme | None = None
    adapters: tuple[str, ...] = ()
    overlaps: bool | None = None
    drafter: Drafter | None = None
    draft_tokens: int | None = None
    draft_tree: int | None = None
    sparse: SparseLayers | None = None
    prefill: SparsePrefill | None = None
    sliding_blocks: int = 0
    tells_cache: bool = False
    evictions: tuple[Eviction, ...] = ()
    saved: SavedBlocks | None = None
    peer: PeerBlocks | None = None
    tower: VisionTower | None = None
    image_cache: int = IMAGE_CACHE

    def check(self, decoder: Decoder, scheme: KvScheme) -> None:
        """Raise ValueError where settings do not go with a model and its cache's scheme, or with one another."""
        trees, few = self.draft_tree is not None, self.sparse is not None or self.prefill is not None
        kv_cache.check(decoder, scheme)
        if trees:
            kv_cache.check_trees(decoder, scheme)
        if self.sparse is not None:
            self.sparse.settings.check(scheme, decoder.device.type, trees=trees)
        if self.prefill is not None:
            self.prefill.check(decoder.device.type, trees=trees)
        for eviction in self.evictions:
            kv_cache.check_eviction(decoder, scheme, eviction, self.context)
            eviction.check(scheme, trees=trees, sparse=few)
            eviction.check_room(self.blocks)

    def pace(self) -> Pace:
        """Return what decides how many drafts a step has."""
        number = self.draft_tokens if self.draft_tree is None else self.draft_tree
        return Pace(MAX_DRAFT_TOKENS if number is None else number, number is not None, self.limits.max_drafts)
