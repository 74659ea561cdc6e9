"""Parts of several models: each can start in its own, and together they keep to the memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.errors import UserError
from attar.kv.schemes import scheme
from attar.plan import fit as planning
from attar.plan import sharing
from attar.plan.comparison import Subject
from attar.plan.fit import ENGINE, CacheLimits, Deployment
from attar.plan.steps import StepLimits

SHAPES = ("llama-3.2-1b", "qwen2.5-0.5b")
LIMITS = StepLimits(sequences=4)


def deployed(shape: str) -> Deployment:
    subject = Subject.shape(shape, "w8")
    return Deployment(subject.config, subject.storage, scheme("float32"))


MODELS = {shape: deployed(shape) for shape in SHAPES}


def test_a_model_that_does_not_fit_alone_is_named_with_both_numbers() -> None:
    with pytest.raises(UserError, match=rf"model {SHAPES[0]}: .* GB, but there are 909 MB \(--memory") as caught:
        sharing.share(MODELS, 10**9, LIMITS)
    assert caught.value.code == "memory_insufficient"


@given(st.integers(6 * 10**9, 200 * 10**9), st.sampled_from([None, 256, 4096]))
def test_every_model_starts_in_its_part(memory: int, context: int | None) -> None:
    found = sharing.share(MODELS, memory, LIMITS, context)
    for name, part in found.parts.items():
        started = planning.start(MODELS[name], part.memory, LIMITS, part.context)
        planning.require(started, "its part")
        assert started.context == part.context
        assert ENGINE < part.size <= found.engines
        assert started.memory - started.unused <= part.memory
    assert found.engines + found.server == memory


def test_what_fits_together_shares_the_rest_and_else_each_has_the_least() -> None:
    small, large = (sharing.share(MODELS, memory * 10**9, LIMITS, 1024) for memory in (5, 200))
    middle = sharing.share(MODELS, sum(part.size for part in small.parts.values()) + 10**9, LIMITS, 1024)
    for name in SHAPES:
        assert small.parts[name].size < middle.parts[name].size < large.parts[name].size
    assert sum(part.size for part in middle.parts.values()) <= middle.engines


def test_a_cache_of_a_given_size_is_made_as_it_is_asked_for() -> None:
    found = sharing.share(MODELS, 200 * 10**9, LIMITS, 1024, CacheLimits(max_tokens=4096))
    for name, part in found.parts.items():
        assert planning.start(MODELS[name], part.memory, LIMITS, 1024, CacheLimits(4096)).tokens == 4096
