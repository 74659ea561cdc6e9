"""An engine around a small model, and what requests get from it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from attar.engine.config import EngineConfig
from attar.engine.engine import Engine
from attar.kernels import dispatch
from attar.kv.schemes import SCHEMES
from attar.model.decoder import Decoder
from attar.protocol.messages import Delta, Embed, Embedding, Event, Failed, Finished, PromptLogprobs, Submit
from attar.protocol.scheduler_config import SchedulerConfig

CONTEXT = 192
ROOM = 40  # blocks: enough for every request of a test at once
TIGHT = 5  # blocks: requests have to give way to each other


@pytest.fixture(scope="module")
def decoder(tiny_decoder: Callable[..., Decoder]) -> Decoder:
    """A quantized model in the native kernels' layout."""
    store = dispatch.store("int8g32")
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    return tiny_decoder(scheme="w4g32", store=store)


def make_engine(decoder: Decoder, blocks: int = ROOM, limits: SchedulerConfig | None = None, **how: Any) -> Engine:
    """An engine of small steps; `how` is `EngineConfig`'s, where `kv` is a name, and `Engine`'s."""
    fields = {
        name: how.pop(name)
        for name in (
            "eos_ids",
            "adapters",
            "overlaps",
            "drafter",
            "draft_tokens",
            "draft_tree",
            "sparse",
            "prefill",
            "sliding_blocks",
            "evictions",
            "saved",
            "peer",
            "tower",
            "image_cache",
        )
        if name in how
    }
    kv, context, tokenizer = how.pop("kv", None), how.pop("context", CONTEXT), how.pop("tokenizer", None)
    kv, limits = None if kv is None else SCHEMES[kv], limits or SchedulerConfig(max_step_tokens=48)
    return Engine(decoder, tokenizer, EngineConfig(blocks, context, limits, kv=kv, **fields), **how)


def ask(made: Engine, asks: Iterable[Submit | Embed]) -> None:
    for each in asks:
        made.submit(each) if isinstance(each, Submit) else made.embed(each)


def run(made: Engine, asks: Iterable[Submit | Embed] = (), steps: int = 4000) -> list[Event]:
    """The events of as many steps as it takes. Nothing is held in the end."""
    ask(made, asks)
    events: list[Event] = []
    for _ in range(steps):
        events += made.step()
        if made.idle:
            break
    assert made.idle, "it does not come to an end"
    while made.moves is not None and made.moves.under_way:  # blocks that are being saved
        made.moves.wait()
        made.moves.settle()
    made.scheduler.check()
    made.pool.check()
    assert made.pool.active == 0
    return events


def run_as_they_come(made: Engine, asks: Iterable[Submit | Embed], draw: random.Random) -> list[Event]:
    """The events of requests that come one after another while others run, to the end of all."""
    events: list[Event] = []
    waiting = list(asks)
    while waiting or not made.idle:
        while waiting and draw.random() < 0.4:
            ask(made, [waiting.pop(0)])
        events += made.step()
    return events


Answers = dict[tuple[str, int], list[object]]


def answers(events: Iterable[Event]) -> Answers:
    """Tokens and log probabilities of every choice, and how it ended."""
    found: Answers = defaultdict(list)
    for event in events:
        if isinstance(event, Delta):
            found[event.id, event.choice] += [event.token_ids, event.logprobs]
        elif isinstance(event, Finished):
            found[event.id, event.choice].append((event.reason, event.completion_tokens))
        elif isinstance(event, PromptLogprobs):
            found[event.id, -1].append(event.logprobs)
        elif isinstance(event, Embedding):
            found[event.id, 0].append(event.vector)
        elif isinstance(event, Failed):
            found[event.id, 0].append(event.code)
    return dict(found)
