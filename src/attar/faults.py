"""Fault injection: named points on a request's path at which an exception can be raised on purpose.

A server must survive exceptions in unexpected places: the request must end, once, with an error, and no other request
may be affected. Waiting for such exceptions does not show whether that holds. So every stretch of code that works for
one request has a `point` in it, with a name out of a closed table. Tests arm each name in turn and check all other
requests (`tests/test_faults.py` lists where). An operator can do the same from outside:

    ATTAR_FAULTS=http.parse                        the first request with a body fails
    ATTAR_FAULTS=http.parse:after=10:times=3       the 11th, 12th and 13th
    ATTAR_FAULTS=engine.choice:every=50:times=0    one choice in fifty, for ever
    ATTAR_FAULTS=sse.write:key=4f1c,radix.evict    several; the first only for requests whose id begins with 4f1c

Both processes of a server read the variable, and log a warning that they did. Work done for a whole batch is repeated
one request at a time where it raises (`runner.*`, `sampler.*` but commit, `events.encode`, `engine.pool`,
`engine.prompt_logprobs` and `grammar.mask`). There, one fault is healed, and a second (times=2) is needed to end a
request.
`runner.memory` raises what a device without memory raises, which halves a step, until it raises for a single token.

A name stands for one place: each of these literals occurs once in the source. An armed point that is reached raises
`InjectedFault`, as if the line behind it had failed. With nothing armed, which is the normal case, a point costs one
read of a global.

Not done: faults other than exceptions. Deaths and hangs of whole processes are made with signals, failures of disks and
memory by the operating system; neither needs code here.
"""

from __future__ import annotations

import difflib
import logging
import threading
from dataclasses import dataclass, field

from attar.errors import UserError

POINTS = {
    "http.door": "A request has a name, and may or may not be let in.",
    "http.read_body": "A piece of its body is about to be read.",
    "http.parse": "The body is whole, and about to be parsed.",
    "models.lease": "A request of a server with several models is about to ask for its model.",
    "prompt.tokenize": "A thread turns a text into token ids.",
    "prompt.render": "A thread renders a conversation and turns it into token ids.",
    "prompt.decode": "A thread turns token ids into text, to be echoed.",
    "params.build": "Fields of the body become sampling parameters.",
    "dispatcher.submit": "Prompts and parameters become work for the engine.",
    "client.send": "Its commands are about to be written to the engine's socket.",
    "engine.submit": "The engine takes a request.",
    "engine.choice": "One choice's sampler, detokenizer and stop strings are made.",
    "grammar.compile": "The constraint of a choice is compiled, or copied.",
    "scheduler.add": "A choice is about to enter the queue.",
    "scheduler.admit": "The first of the queue is about to be let in.",
    "radix.match": "The prefix tree is asked for a prompt.",
    "radix.split": "An edge of the prefix tree is about to be split.",
    "radix.evict": "The prefix tree is about to give up blocks of a leaf.",
    "pool.hold": "A sequence is about to hold blocks that exist.",
    "pool.allocate": "A sequence is about to get free blocks.",
    "scheduler.grow": "A running sequence needs another block.",
    "scheduler.preempt": "A running sequence is about to lose its blocks to others.",
    "images.encode": "The vision tower is about to compute a slice of a layer for an image.",
    "runner.copy": "A block of which a prefix is shared is about to be copied.",
    "runner.memory": "A step is about to take memory: it is as if the device had none.",
    "runner.table": "A row of the step's block table is made.",
    "runner.features": "Rows of an image enter a step in place of token ids.",
    "runner.rows": "The model has run, and a sequence's rows of the result are picked out.",
    "runner.replay": "A row of a recorded decode step is made.",
    "engine.prompt_logprobs": "Log probabilities of prompt tokens are worked out.",
    "engine.pool": "Hidden states are pooled for an embedding.",
    "draft.propose": "Drafts of a sequence are made.",
    "sampler.penalties": "Penalties and biases are applied to a row of logits.",
    "sampler.noise": "The seed and index of a row's noise are read.",
    "grammar.mask": "The tokens that a constraint allows next are worked out.",
    "sampler.draw": "A row's token becomes a draw, with its log probabilities.",
    "sampler.commit": "A token is noted as part of the output.",
    "grammar.consume": "A constraint takes the next token.",
    "detokenizer.push": "A token becomes text.",
    "detokenizer.flush": "What the detokenizer held back becomes text.",
    "stops.push": "Text is searched for stop strings.",
    "engine.delta": "A choice's gain becomes an event.",
    "scheduler.commit": "A piece of a prompt was computed, and is to be taken into account.",
    "radix.insert": "The prefix tree is about to gain a leaf.",
    "scheduler.release": "A sequence ends or is preempted, and the prefix tree is to remember what it computed.",
    "engine.vector": "A pooled embedding becomes bytes.",
    "engine.report": "Where a request's time went is summed up.",
    "engine.finish": "A choice's end becomes an event.",
    "events.encode": "An event is about to be written to the server's socket.",
    "client.receive": "An event has come out of the engine's socket.",
    "work.take": "A request's handler takes its events.",
    "metrics.observe": "Events of a request are counted.",
    "why.remember": "What became of a request is kept.",
    "sse.start": "A stream is about to begin.",
    "sse.format": "Something becomes a server-sent event.",
    "sse.write": "Events of a stream are about to be written.",
    "openai.logprobs": "A token of a log probability becomes text.",
    "openai.delta": "An event becomes a chunk of a stream.",
    "openai.usage": "Tokens are summed up for an answer.",
    "openai.whole": "A whole answer is put together.",
    "anthropic.delta": "An event becomes a piece of a stream of /v1/messages.",
    "anthropic.whole": "A whole answer of /v1/messages is put together.",
    "responses.delta": "An event becomes events of a stream of /v1/responses.",
    "responses.store": "An answer of /v1/responses is about to be kept.",
    "responses.whole": "A whole answer of /v1/responses is put together.",
    "llamacpp.delta": "An event becomes a piece of a stream of llama.cpp's /completion.",
    "llamacpp.whole": "A whole answer of llama.cpp's /completion is put together.",
    "embeddings.whole": "Vectors become an answer.",
}
"""Names of all points with what happens there, in the order in which a request passes them."""

logger = logging.getLogger(__name__)


class InjectedFault(RuntimeError):
    """An exception raised by an armed point, and by nothing else."""


@dataclass(eq=False, slots=True)
class Fault:
    """One planned fault at the point `name`.

    Hits are counted for requests whose key begins with `key`. After the first `after` hits, every `every`-th raises,
    `times` times in all (0: for ever). A point's key is the id of its request or sequence where the code knows it, else
    empty. Raises ValueError for an unknown name and for counts that can never be met.
    """

    name: str
    after: int = 0
    times: int = 1
    every: int = 1
    key: str = ""
    hits: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.name not in POINTS:
            near = difflib.get_close_matches(self.name, POINTS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError("name_unknown", f"unknown fault point {self.name!r}{hint}: known are {', '.join(POINTS)}")
        if self.after < 0 or self.times < 0 or self.every < 1:
            message = f"fault {self.name}: after and times are at least 0, every at least 1"
            raise UserError("option_out_of_range", message)

    def due(self, key: str) -> bool:
        """Count a hit and return whether it must raise."""
        if not key.startswith(self.key):
            return False
        self.hits += 1
        late = self.hits - self.after - 1
        if late < 0 or late % self.every or (self.times and self.fired == self.times):
            return False
        self.fired += 1
        return True


_armed: dict[str, list[Fault]] | None = None
_lock = threading.Lock()  # points are passed in threads, too


def point(name: str, key: str = "") -> None:
    """Mark a place that can be made to fail for the request called `key`. Raises InjectedFault where it is armed."""
    if _armed is not None:
        _pass(name, key)


def _pass(name: str, key: str) -> None:
    assert name in POINTS, f"{name} is not in the table of points"
    armed = _armed or {}
    with _lock:
        due = [fault for fault in armed.get(name, ()) if fault.due(key)]
    if due:
        raise InjectedFault(f"injected at {name}" + (f" for {key}" if key else ""))


def arm(*faults: Fault) -> None:
    """Arm these faults and no others; without any, disarm all. Their counts continue from their present state."""
    global _armed
    armed: dict[str, list[Fault]] = {}
    for fault in faults:
        armed.setdefault(fault.name, []).append(fault)
    _armed = armed or None


def arm_from(text: str | None) -> None:
    """Arm the faults in `text`, the value of ATTAR_FAULTS, if there is one. Raises ValueError where it does not
    parse."""
    if not text:
        return
    arm(*parse(text))
    logger.warning("FAULTS ARE ARMED: requests will fail on purpose (ATTAR_FAULTS=%s)", text)


def parse(text: str) -> list[Fault]:
    """Parse `NAME[:after=N][:times=N][:every=N][:key=PREFIX],...`. Raises ValueError where it does not parse."""
    faults = []
    for item in text.split(","):
        name, *settings = item.strip().split(":")
        key, counts = "", {}
        for setting in settings:
            what, _, value = setting.partition("=")
            if what == "key" and value:
                key = value
            elif what in ("after", "times", "every") and value.isdecimal():
                counts[what] = int(value)
            else:
                message = f"fault {name}: {setting!r} is not after=N, times=N, every=N or key=PREFIX"
                raise UserError("option_malformed", message)
        faults.append(Fault(name, key=key, **counts))
    return faults
