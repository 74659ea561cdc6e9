"""Lookups by rows that read few keys: the constructed model answers as with all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attar.errors import UserError
from attar.kv.schemes import scheme
from attar.kv.sparse import SparseAttention
from attar.model import sparse_layers
from attar.model.cache import ForwardBatch, KVCache
from attar.model.decoder import Decoder
from attar.model.sparse_layers import SparseLayers
from tests.errors import user_error
from tests.model.lookup_model import FILLER, answer, haystack, lookup_model

LENGTH = 2033
Statistics = list[sparse_layers.KeyStatistics | None]
SIXTEENTH = SparseAttention(share=16, dense_below=0)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return lookup_model()


@pytest.fixture(scope="module")
def means(decoder: Decoder) -> Statistics:
    sample = torch.randint(0, FILLER, (2, 256), generator=torch.Generator().manual_seed(1))
    return sparse_layers.calibrate(decoder, sample)


def filled(decoder: Decoder, ids: Tensor, kv: str = "float32") -> KVCache:
    cache = decoder.cache(LENGTH + 64, scheme=scheme(kv))
    return cache if not len(ids) else run(decoder, cache, ids)


def attach(cache: KVCache, decoder: Decoder, means: Statistics, settings: SparseAttention) -> None:
    sparse_layers.attach(cache.layers, decoder, SparseLayers(settings, means), cache.capacity)


def run(decoder: Decoder, cache: KVCache, ids: Tensor) -> KVCache:
    for piece in ids.split(512):
        decoder.states(piece, ForwardBatch((len(piece),), cache.capacity, cache))
    return cache


@pytest.mark.parametrize("kv", ["float32", "int8"])
def test_lookups_asked_afterwards(decoder: Decoder, means: Statistics, kv: str) -> None:
    ids, needles = haystack(LENGTH)
    assert all(each is not None for each in means)
    cache = filled(decoder, ids[:0], kv)
    attach(cache, decoder, means, SIXTEENTH)
    run(decoder, cache, ids)
    for until in (LENGTH, None):  # few keys, then all
        cache.dense_until = None if until is None else [until]
        for key, *values in needles:
            assert answer(decoder, cache, [key]) == values
            cache.truncate(0, LENGTH)


def test_two_questions_one_after_another(decoder: Decoder, means: Statistics) -> None:
    ids, needles = haystack(LENGTH, 1)
    cache = filled(decoder, ids[:0])
    attach(cache, decoder, means, SIXTEENTH)
    run(decoder, cache, ids)
    cache.dense_until = [LENGTH]
    for key, *values in (needles[0], needles[-1]):
        assert answer(decoder, cache, [key]) == values


def test_rows_do_not_depend_on_their_chunks(decoder: Decoder, means: Statistics) -> None:
    """Rows written and read anew in one call, as after a preemption or as drafts, are what they were alone."""
    ids, needles = haystack(512)
    tail = torch.tensor([*needles[0], *needles[5], *needles[2]])
    outputs = []
    for pieces in (tail.split(1), tail.split(5), (torch.cat((ids[256:], tail)),)):
        cache = filled(decoder, ids[:0])
        attach(cache, decoder, means, SparseAttention(topk=64, dense_below=0))
        cache.dense_until = [512]
        run(decoder, cache, ids[:256] if len(pieces) == 1 else ids)
        logits = [decoder.forward(p, ForwardBatch((len(p),), cache.capacity, cache)) for p in pieces]
        outputs.append(torch.cat(logits)[-len(tail) :])
    for other in outputs[1:]:
        assert (other - outputs[0]).abs().max() <= 1e-3 * outputs[0].abs().max()
        assert torch.equal(other.argmax(-1), outputs[0].argmax(-1))


def test_a_budget_of_all_keys_changes_no_bit(decoder: Decoder, means: Statistics) -> None:
    ids, needles = haystack(512)
    found = []
    for settings in (None, SparseAttention(topk=1024, dense_below=0), SparseAttention(topk=32, dense_below=600)):
        cache = filled(decoder, ids[:0])
        if settings is not None:
            attach(cache, decoder, means, settings)
            cache.dense_until = [0]
        run(decoder, cache, ids)
        step = ForwardBatch((1,), cache.capacity, cache)
        found.append(decoder.forward(torch.tensor(needles[0][:1]), step))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_diffuse_layers_stay_dense(decoder: Decoder) -> None:
    bias = decoder.blocks[1].attention.qkv[0].weight
    assert isinstance(bias, Tensor)
    kept = bias.clone()
    bias.zero_()  # every key has the same score
    sample = torch.randint(0, FILLER, (1, 128), generator=torch.Generator().manual_seed(1))
    dense = [each is None for each in sparse_layers.calibrate(decoder, sample)]
    bias.copy_(kept)
    assert dense == [False, True]


def test_caches_without_one_bit_keys_are_refused(decoder: Decoder, means: Statistics) -> None:
    with user_error("option_conflict"):
        attach(decoder.cache(64, scheme=scheme("int4")), decoder, means, SIXTEENTH)
    assert issubclass(UserError, ValueError)
