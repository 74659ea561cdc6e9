"""One engine or several: which decodes more tokens a second on the same cores, by the step-time model. Torch-free.

Each of N replicas has a share of 1/N of the cores, and of the bandwidth that they measured together. So a product or
an attention takes N times as long there as on all cores, but for 1/N of the sequences. Weights are read by every
replica for its own rows, which is what replicas lose. Overheads of a step do not depend on cores, and run side by side,
which is what they gain.
"""

from __future__ import annotations

from dataclasses import dataclass

from attar.plan.rates.step_time import StepModel


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens a second of all `users` sequences together: of one engine on all cores, and of `count` replicas."""

    users: int
    count: int
    one: float
    several: float

    @property
    def one_is_faster(self) -> bool:
        return self.one > self.several


def compare(model: StepModel, count: int, users: int, context: int) -> Comparison:
    """Compare decoding of about `users` sequences of `context` tokens, a multiple of `count`, by a model of all cores.

    Raises ValueError for fewer than two replicas, and for a number of users or tokens below 1.
    """
    if count < 2 or users < 1 or context < 1:
        raise ValueError(f"{count} replicas, {users} users and {context} tokens: 2, 1 and 1 are the least")
    each = -(-users // count)
    whole, part = model.decode(each * count, context), model.decode(each, context)
    seconds = count * (part.products + part.attention) + part.overhead
    return Comparison(each * count, count, each * count / whole.total, each * count / seconds)
