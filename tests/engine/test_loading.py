"""What fits, from settings: before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from attar.engine.limits import Limits
from attar.engine.loading import fit, kv_name
from attar.engine.settings import Settings
from attar.formats.scheme import Scheme
from attar.model.shapes import shape
from attar.plan.costs import Storage
from attar.plan.fit import Fit

CONFIG = shape("llama-3.2-1b")
STORAGE = Storage(Scheme.parse("w4g128").with_scale_dtype("bfloat16"), Scheme.parse("w8").with_scale_dtype("bfloat16"))
GB = 10**9
SETTINGS = Settings("model", "socket", memory=8 * GB)


def found(limits: Limits | None = None, **changed: object) -> Fit:
    return fit(msgspec.structs.replace(SETTINGS, **changed), CONFIG, STORAGE, limits or Limits(), 2)


def test_without_a_context_requests_may_be_as_long_as_the_cache() -> None:
    made = found()
    assert made.context == made.tokens < CONFIG.context
    assert made.requests == 1
    assert 0 <= made.unused < made.memory / 100  # a shorter context makes the largest step a little smaller


def test_a_context_that_fits_several_times_is_kept() -> None:
    made = found(context=4096)
    assert made.context == 4096
    assert made.requests > 1


def test_the_cache_is_no_larger_than_all_requests_together() -> None:
    made = found(Limits(max_running=2, max_step_tokens=64), context=1024)
    assert made.tokens == 2 * 1024
    assert made.unused > GB


def test_a_size_that_was_given_is_taken() -> None:
    assert found(context=1024, max_cached_tokens=5000).tokens == 5056  # whole blocks


def test_smaller_numbers_hold_more_tokens() -> None:
    tokens = [found(context=8192, kv=kv).tokens for kv in ("float32", "bfloat16", "int8", "klt4", "int4", "klt2")]
    assert tokens == sorted(tokens)


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"memory": GB}, "too little"),
        ({"context": 10**6}, "past the 131,072 positions"),
        ({"context": 131072}, "less than one request"),
        ({"context": 4096, "max_cached_tokens": 10**7}, "too little"),
        ({"kv": "int5"}, "kivi2, klt2, not 'int5'"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        found(**changed)


def test_keys_and_values_lose_nothing_by_default() -> None:
    assert kv_name(SETTINGS) == "float32"
    assert kv_name(msgspec.structs.replace(SETTINGS, dtype="bfloat16")) == "bfloat16"
    assert kv_name(msgspec.structs.replace(SETTINGS, kv="int8")) == "int8"


def test_a_longer_context_is_never_more_requests() -> None:
    counts = [found(context=context).requests for context in (512, 1024, 4096, 16384)]
    assert counts == sorted(counts, reverse=True)
    assert replace(found(context=512), blocks=0).requests == 0
