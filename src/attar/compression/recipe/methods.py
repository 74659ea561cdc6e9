"""The methods that a recipe names, with their options and valid ranges. Pure data, torch-free.

An option that is out of range is rejected here, by its name, before anything runs. `solvers/` describes the methods,
one file each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, get_args, get_origin, get_type_hints

from attar.compression.recipe.pattern import Pattern
from attar.errors import UserError

ScaleSearch = Literal["minmax", "mse"]
Order = Literal["natural", "activation"]
ActivationRange = Literal["minmax", "average", "percentile", "mse", "kl"]
"""Ways to choose a fixed activation scale: `minmax` takes the largest magnitude. `average` takes an exponential average
of the largest of each batch, which begins with the first and moves a tenth of the way to each later one. `percentile`
covers all but one value in ten thousand, `mse` has the least rounding error, and `kl` is entropy calibration."""

MOST_DRAWN = 4096  # maximal sequences that a model writes, to calibrate or to tune on


def _number(low: float, high: float) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise UserError("method_option_invalid", f"{name} is a number from {low} to {high}, not {value!r}")

    return check


def _whole(low: int) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UserError("method_option_invalid", f"{name} is a whole number of at least {low}, not {value!r}")

    return check


Count = Annotated[int, _whole(0)]
Positive = Annotated[int, _whole(1)]
Fraction = Annotated[float, _number(0, 1)]


class _Options:
    """Options of a method, each checked by its type: a number in a range, true or false, or one word of a Literal."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            if kind is bool and not isinstance(value, bool):
                raise UserError("method_option_invalid", f"{name} is true or false, not {value!r}")
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise UserError("method_option_invalid", f"{name} is one of {', '.join(get_args(kind))}, not {value!r}")
            for check in getattr(kind, "__metadata__", ()):
                check(name, value)


@dataclass(frozen=True, slots=True)
class Rotate(_Options):
    """Rotate the residual stream, and the values of each head, by orthogonal matrices folded into the weights."""

    method: ClassVar[str] = "rotate"
    rotation: Literal["hadamard", "orthogonal"] = "hadamard"  # of the stream; hadamard: with random signs
    heads: bool = True  # whether values, and with them the inputs of o, are rotated too
    balance: bool = True  # whether inputs of o and down are scaled first, to balance the channels
    online: bool = False  # whether inputs of down are, at run time: blocks of the largest power of two that fits
    across: bool = False  # whether inputs of o are too, in such blocks, instead of head by head


@dataclass(frozen=True, slots=True)
class QuaRot(Rotate):
    """Rotate as `Rotate`, and apply a Hadamard matrix at run time before down, whose inputs no folded rotation
    reaches."""

    method: ClassVar[str] = "quarot"
    online: bool = True


@dataclass(frozen=True, slots=True)
class SpinQuant(QuaRot):
    """Learn the folded rotations of `QuaRot`, so that inputs of linears have the fewest outliers. In a GGUF file the
    folded rotations are all there is: `online` is false there, and an error if it is set."""

    method: ClassVar[str] = "spinquant"
    rotation_steps: Positive = 300
    rotation_batch: Positive = 2048  # rows a step


@dataclass(frozen=True, slots=True)
class SmoothQuant(_Options):
    """Divide activations and multiply weights by max|x|^alpha / max|w|^(1 - alpha), channel by channel."""

    method: ClassVar[str] = "smoothquant"
    alpha: float | Literal["search"] | None = None
    """Migration strength; None: the family's own, `smoothquant.ALPHA`; `search`: for each input group the one whose
    rounded linears have the least output error."""
    through: bool = False  # also between linears, up to down and v to o, unlike the paper
    norms: bool = True  # and from norms; without them only between linears

    def __post_init__(self) -> None:
        _Options.__post_init__(self)
        if isinstance(self.alpha, str) and self.alpha != "search":
            raise UserError("method_option_invalid", f"alpha is a number from 0 to 1, or search, not {self.alpha!r}")
        if self.alpha is not None and self.alpha != "search":
            _number(0, 1)("alpha", self.alpha)
        if not (self.through or self.norms):
            raise UserError(
                "recipe_without_effect", "norms: false leaves smoothquant nothing to do without through: true"
            )


@dataclass(frozen=True, slots=True)
class SmoothAttention(_Options):
    """Divide keys and multiply queries, channel by channel, for KV caches that round keys; and transform values."""

    method: ClassVar[str] = "smoothattention"
    key_alpha: float | None = None  # the power of max|k|, as published 0.5; None: searched, for an int4 cache
    values: bool = True  # whether values are transformed by a matrix a head that the output projection inverts

    def __post_init__(self) -> None:
        _Options.__post_init__(self)
        if self.key_alpha is not None:
            _number(0, 1)("key_alpha", self.key_alpha)


@dataclass(frozen=True, slots=True)
class Clip(_Options):
    """Limit each group's values to the range whose rounding leaves the least output error."""

    method: ClassVar[str] = "clip"


@dataclass(frozen=True, slots=True)
class Awq(_Options):
    """Search, group of linears by group, the power of mean|x| to scale weight columns by; then, how far to clip."""

    method: ClassVar[str] = "awq"
    points: Annotated[int, _whole(2)] = 20  # alphas tried, 0 and 1 among them
    clip: bool = True


@dataclass(frozen=True, slots=True)
class Rtn(_Options):
    """Round every weight to the nearest code."""

    method: ClassVar[str] = "rtn"
    scale_search: ScaleSearch = "minmax"


@dataclass(frozen=True, slots=True)
class Gptq(_Options):
    """Round column by column; later columns compensate for the error of earlier ones on the calibration inputs."""

    method: ClassVar[str] = "gptq"
    needs: ClassVar[Mapping[str, str]] = {"output_damping": "couple", "residual": "correct"}
    """Options that are read only where another is true."""
    block: Positive = 128  # columns between two lazy updates: speed, not results
    damping: Fraction = 0.01  # fraction of the Hessian's mean diagonal that is added to the diagonal
    order: Order = "activation"
    scale_search: ScaleSearch = "mse"
    static_groups: bool = True  # scales are set before the sweep; false: when it reaches the group, in natural order
    polish: Count = 0  # sweeps of coordinate descent over codes, scales and zero points afterwards
    guide: Count = 0  # gradient-weighted Hessians a linear; 0: one, unweighted
    couple: bool = False  # whether rows compensate for one another, as the loss couples them
    output_damping: Annotated[float, _number(0, 100)] = 0.1  # `damping` of the matrix that couples them
    correct: bool = False  # whether targets are the original model's outputs, from the compressed one's inputs
    residual: Fraction = 0.0  # with `correct`: fraction of the residual stream's error to correct

    def __post_init__(self) -> None:
        _Options.__post_init__(self)
        if self.couple and (self.guide > 1 or not self.static_groups):
            raise UserError(
                "recipe_conflict", "couple: true needs one Hessian for all rows, guide: 0 or 1, and static_groups: true"
            )
        if not self.static_groups and self.order == "activation":
            raise UserError(
                "recipe_conflict",
                "static_groups: false needs order: natural, since activation order visits groups in pieces",
            )


@dataclass(frozen=True, slots=True)
class Qronos(Gptq):
    """Apply GPTQ, polished, to weights corrected for what the compressed blocks before have changed."""

    method: ClassVar[str] = "qronos"
    polish: Count = 4
    correct: bool = True
    residual: Fraction = 0.5


@dataclass(frozen=True, slots=True)
class Guided(Gptq):
    """Apply GPTQ in the metric of the loss, polished; needs one pass of gradients of the original model over the
    text."""

    method: ClassVar[str] = "guided"
    polish: Count = 4
    couple: bool = True
    correct: bool = True
    residual: Fraction = 0.5


@dataclass(frozen=True, slots=True)
class _Pruning(_Options):
    """Make `sparsity` of the weights zero, and round the others where the recipe has a scheme."""

    sparsity: str = "s50"
    scale_search: ScaleSearch = "mse"

    def __post_init__(self) -> None:
        _Options.__post_init__(self)
        if not isinstance(self.sparsity, str):
            raise UserError(
                "method_option_invalid", f"sparsity is a word such as s50 or 2:4, in quotes, not {self.sparsity!r}"
            )
        Pattern.parse(self.sparsity)

    @property
    def pattern(self) -> Pattern:
        return Pattern.parse(self.sparsity)


@dataclass(frozen=True, slots=True)
class Magnitude(_Pruning):
    """Zero the smallest weights."""

    method: ClassVar[str] = "magnitude"


@dataclass(frozen=True, slots=True)
class Wanda(_Pruning):
    """Zero the smallest products of a weight and the norm of its input, row by row."""

    method: ClassVar[str] = "wanda"


@dataclass(frozen=True, slots=True)
class SparseGpt(_Pruning):
    """Zero the weights that cost least, column by column; later columns compensate for the error of earlier ones."""

    method: ClassVar[str] = "sparsegpt"
    block: Positive = 128  # columns that share a threshold, unless the sparsity is n:m
    damping: Fraction = 0.01


@dataclass(frozen=True, slots=True)
class Prune(_Pruning):
    """Search the positions of all zeros together, then the best weights for them."""

    method: ClassVar[str] = "prune"
    steps: Positive = 60  # steps of the search
    damping: Fraction = 0.01
    guide: Count = 0  # as for GPTQ
    correct: bool = True  # as for GPTQ


Pruning = Magnitude | Wanda | SparseGpt | Prune


@dataclass(frozen=True, slots=True)
class Structured(_Options):
    """Remove whole heads and columns of the feed-forward: so many percent of the weights of the blocks' linears."""

    method: ClassVar[str] = "structured"
    percent: Annotated[int, _whole(1), _number(1, 95)] = 25
    damping: Fraction = 0.01
    correct: bool = True  # as for GPTQ
    scale_search: ScaleSearch = "mse"  # of a rounded LM head


@dataclass(frozen=True, slots=True)
class AutoRound(_Options):
    """Learn the rounding direction of each weight and the clipping of each range, block by block, from the block's
    output."""

    method: ClassVar[str] = "autoround"
    steps: Positive = 200
    batch: Positive = 2048  # tokens a step
    scale_search: ScaleSearch = "mse"  # initial ranges
    correct: bool = True  # whether targets are from the original's states, else the block's own output


@dataclass(frozen=True, slots=True)
class Hqq(_Options):
    """Round to nearest, on scales and zero points that make few errors large and most small; reads no text."""

    method: ClassVar[str] = "hqq"
    steps: Count = 20
    scale_search: ScaleSearch = "minmax"  # of a rounded LM head


@dataclass(frozen=True, slots=True)
class SqueezeLlm(_Options):
    """Fit lookup tables for each row, by k-means weighted by the loss; needs gradients, one pass."""

    method: ClassVar[str] = "squeezellm"
    scale_search: ScaleSearch = "mse"  # of an LM head that is rounded to a grid


@dataclass(frozen=True, slots=True)
class Tune(_Options):
    """Train scales, norms and biases after all blocks, with codes frozen, towards the original's predictions."""

    method: ClassVar[str] = "tune"
    epochs: Positive = 4  # passes over the calibration text, of which at most `tune.TOKENS` tokens are used
    rate: Annotated[float, _number(0, 0.1)] = 1e-3  # Adam's largest step, relative to the size of each number
    batch: Positive = 512  # tokens a step
    drawn: Count = 0  # additional sequences, written by the original, to train on

    def __post_init__(self) -> None:
        _Options.__post_init__(self)
        if self.epochs > 10:
            raise UserError(
                "method_option_invalid", "epochs is at most 10: more would fit the calibration text, not the model"
            )
        if self.drawn > MOST_DRAWN:
            raise UserError(
                "method_option_invalid",
                f"drawn is at most {MOST_DRAWN} sequences: more would be training, not compression",
            )


@dataclass(frozen=True, slots=True)
class Distill(Tune):
    """Tune on more text than is given, most of it written by the original model (LLM-QAT, Liu et al. 2023). The
    compressed model is to predict what the original would write."""

    method: ClassVar[str] = "distill"
    epochs: Positive = 2
    rate: Annotated[float, _number(0, 0.1)] = 3e-4
    drawn: Count = 512


Pass = SmoothQuant | SmoothAttention | Clip | Awq | Rtn | Gptq | AutoRound | Hqq | SqueezeLlm | Pruning | Structured

ROTATIONS: Mapping[str, type[Rotate]] = {c.method: c for c in (Rotate, QuaRot, SpinQuant)}
TRANSFORMS: Mapping[str, type[SmoothQuant | SmoothAttention | Clip | Awq]] = {
    c.method: c for c in (SmoothQuant, SmoothAttention, Clip, Awq)
}
ROUNDINGS: Mapping[str, type[Rtn | Gptq | AutoRound | Hqq | SqueezeLlm]] = {
    c.method: c for c in (Rtn, Gptq, Qronos, Guided, AutoRound, Hqq, SqueezeLlm)
}
TUNINGS: Mapping[str, type[Tune]] = {c.method: c for c in (Tune, Distill)}
PRUNINGS: Mapping[str, type[Pruning]] = {c.method: c for c in (Magnitude, Wanda, SparseGpt, Prune)}
METHODS: Mapping[str, type[Pass]] = {**TRANSFORMS, **ROUNDINGS, **PRUNINGS, Structured.method: Structured}
