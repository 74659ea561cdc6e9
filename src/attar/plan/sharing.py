"""Memory of several models that one server loads and unloads: each one's part of the whole.

The server's process holds every model's tokenizer, loaded or not. The rest is for engines. Each model has a fixed part
of that, so its load is the same whatever else is in memory. The least part holds a KV cache of one full request. Where
all models fit at once, the rest goes to their caches, up to the most that a server makes. Otherwise each has its least
part, so that as many as possible are in memory. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attar.errors import UserError
from attar.plan import fit as planning
from attar.plan.fit import NO_LIMITS, SERVER, TOKENIZER, CacheLimits, Deployment, Fit
from attar.plan.steps import StepLimits


@dataclass(frozen=True, slots=True)
class Part:
    """One model's part of the memory.

    size: bytes of its engine. memory: the limit that its engine is given, which counts the server's process as
    `fit.fit` does. context: tokens of its longest request, which its engine is given too.
    """

    size: int
    memory: int
    context: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """Division of `memory` bytes: `server` for its process, and the rest for engines, by the models' names."""

    memory: int
    server: int
    parts: dict[str, Part]

    @property
    def engines(self) -> int:
        """Return the bytes that engines may take together."""
        return self.memory - self.server


def share(
    models: Mapping[str, Deployment], memory: int, limits: StepLimits, context: int | None = None,
    cache: CacheLimits = NO_LIMITS,
) -> Sharing:  # fmt: skip
    """Divide `memory` among models by name, on CPUs. `context` and `cache` are each model's, as in `fit.start`. Raises
    ValueError, naming the model and both numbers, where one does not fit alone."""
    tokenizers = {name: TOKENIZER * held.config.vocab_size for name, held in models.items()}
    server = SERVER + sum(tokenizers.values())
    least: dict[str, int] = {}
    most: dict[str, int] = {}
    contexts: dict[str, int] = {}
    for name, held in models.items():
        own = SERVER + tokenizers[name]  # what `fit` counts of the server's process
        found = _alone(name, held, memory - server + own, (limits, context, cache))
        taken = found.memory - found.unused - own
        one = taken - found.cache + found.shape.bytes(found.blocks_each)
        least[name], most[name] = (taken if cache.max_tokens is not None else one), taken
        contexts[name] = found.context
    spare, growth = memory - server - sum(least.values()), sum(most.values()) - sum(least.values())
    spare = min(max(0, spare), growth)
    sizes = {name: least[name] + (most[name] - least[name]) * spare // max(1, growth) for name in models}
    return Sharing(memory, server, {
        name: Part(size, size + SERVER + tokenizers[name], contexts[name]) for name, size in sizes.items()
    })  # fmt: skip


def _alone(name: str, held: Deployment, memory: int, asked: tuple[StepLimits, int | None, CacheLimits]) -> Fit:
    """Return the plan of a model that has all the memory but what the server's process holds of the others."""
    try:
        found = planning.start(held, max(0, memory), *asked)
        planning.require(found, "--memory, less the tokenizers of the other models")
    except UserError as error:
        raise UserError(error.code, f"model {name}: {error}") from None
    return found
