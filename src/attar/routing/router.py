"""The router: each request goes to the engine where it costs the least, in seconds.

The cost of a request at an engine is the time to compute the part of its prompt that is not cached there, and all
prompts that are queued there before it, and one step for each sequence that decodes beside it:

    (AGAIN * uncached tokens + queued tokens) * seconds a prompt token + choices that run or wait * seconds a step

Uncached tokens count more than once: the request waits for them, and so do those that come after it. Equal costs go to
the engine with the fewest choices, and then to the first. A decision depends on the calls before it and their times
alone.

*Hot spots.* With a popular prefix an engine is always the cheapest while its queue is short, and gets all of its
requests. So the work of each engine is summed up in seconds, older work less (`MEMORY`). An engine with more than
`BALANCE` times the mean, and `SLACK` seconds, gets nothing while another has less. The second engine then computes the
prefix once, and from then on both have it.

*Room.* An engine whose queue has no place for a request is passed over. Where none has one, there is no decision, and
the caller asks again later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from attar.routing.costs import Costs
from attar.routing.prefixes import PrefixIndex

AGAIN = 2.0  # weight of a request's own uncached tokens
MEMORY = 60.0  # seconds after which work counts 1/e
BALANCE = 1.2  # most work of an engine, relative to the mean
SLACK = 5.0  # seconds of work that are no imbalance


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its prompt's number of tokens, the digests of its whole blocks, and its number of choices."""

    tokens: int
    digests: Sequence[int] = ()
    choices: int = 1


@dataclass(slots=True)
class Routed:
    """Where a request is: of `uncached` tokens, `expected` digests count as cached there until it begins."""

    engine: int
    uncached: int
    cached: int
    choices: int
    expected: Sequence[int] = ()
    begun: bool = False


@dataclass(slots=True)
class Load:
    """The load of one engine: `queued` prompt tokens to be computed, `waiting` choices that have not begun, and `rows`,
    all choices. `places` is how many may wait and begin."""

    places: int = 0
    queued: int = 0
    waiting: int = 0
    rows: int = 0
    work: float = 0.0  # decayed seconds, at `worked`
    worked: float = 0.0

    def recent(self, now: float) -> float:
        """Return the work up to `now`, older work less."""
        return self.work * math.exp((self.worked - now) / MEMORY)


@dataclass
class Router:
    """Routes requests to `engines` engines, numbered from 0, whose blocks have `block` tokens."""

    engines: int
    block: int
    costs: Costs = field(default_factory=Costs)
    prefixes: PrefixIndex = field(init=False)
    loads: list[Load] = field(init=False)
    routed: dict[str, Routed] = field(default_factory=dict)
    """Requests that have not ended, by id."""

    def __post_init__(self) -> None:
        self.prefixes = PrefixIndex(self.engines)
        self.loads = [Load() for _ in range(self.engines)]

    def begin(self, engine: int, blocks: int, places: int) -> None:
        """Note that an engine has started, with nothing cached: its cache's blocks, and the choices that may wait."""
        self.prefixes.clear(engine)
        self.prefixes.resize(engine, blocks)
        self.loads[engine].places = places

    def route(
        self, id: str, asked: Asked, among: Collection[int], now: float, avoid: Collection[int] = ()
    ) -> Routed | None:
        """Choose one of the engines `among`, not one to `avoid` while there is another; None where none has room. The
        id must be new."""
        assert id not in self.routed, "routed twice"
        loads, choices, prefill, decode = self.loads, asked.choices, self.costs.prefill, self.costs.decode
        able = [each for each in among if (load := loads[each]).waiting + choices <= load.places]
        if avoid:
            able = [each for each in able if each not in avoid] or able
        if not able:
            return None
        matched, best = self.prefixes.matched(asked.digests, able), (math.inf, 0, able[0])
        for engine in self._balanced(able, among, now):  # a thousand of them: nothing is called here
            load, missing = loads[engine], asked.tokens - matched[engine] * self.block
            seconds = (AGAIN * (missing if missing > 1 else 1) + load.queued) * prefill + load.rows * decode
            if seconds <= best[0]:
                best = min(best, (seconds, load.rows, engine))
        chosen = best[2]
        uncached = max(1, asked.tokens - matched[chosen] * self.block)
        load = self.loads[chosen]
        load.queued += uncached
        load.waiting += asked.choices
        load.rows += asked.choices
        seconds = uncached * prefill + choices * self.costs.output * decode
        load.work, load.worked = load.recent(now) + seconds, now
        noted = self.prefixes.expect(chosen, asked.digests)
        found = Routed(chosen, uncached, asked.tokens - uncached, asked.choices, asked.digests[:noted])
        self.routed[id] = found
        return found

    def begun(self, id: str) -> None:
        """Note a request's first event: its prompt was computed, and its blocks were told of."""
        if (found := self.routed.get(id)) is not None and not found.begun:
            found.begun = True
            load = self.loads[found.engine]
            load.queued -= found.uncached
            load.waiting -= found.choices
            self.prefixes.settle(found.engine, found.expected)
            found.expected = ()

    def ended(self, id: str) -> None:
        """Note that a request has ended, or left its engine; unknown ones are ignored."""
        self.begun(id)
        if (found := self.routed.pop(id, None)) is not None:
            self.loads[found.engine].rows -= found.choices

    def _balanced(self, able: Sequence[int], among: Collection[int], now: float) -> Sequence[int]:
        """Return the engines whose recent work is not far above the mean of all `among`; all, where none is below."""
        loads, exp = self.loads, math.exp
        recent = {  # as `Load.recent`
            each: load.work * exp((load.worked - now) / MEMORY) if (load := loads[each]).work else 0.0 for each in among
        }
        most = BALANCE * sum(recent.values()) / len(recent) + SLACK
        return [each for each in able if recent[each] <= most] or able

    def check(self) -> None:
        """Assert that the loads are those of the requests. Linear: for tests."""
        self.prefixes.check()
        for engine, load in enumerate(self.loads):
            own = [each for each in self.routed.values() if each.engine == engine]
            assert load.rows == sum(each.choices for each in own)
            assert load.waiting == sum(each.choices for each in own if not each.begun)
            assert load.queued == sum(each.uncached for each in own if not each.begun)
            assert load.work >= 0
