"""The methods that a recipe names, with their options and valid ranges. Pure data, torch-free.

An option that is out of range is rejected here, by its name, before anything runs. `solvers/` describes the methods,
one file each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from attar.compression.recipe.pattern import Pattern

ScaleSearch = Literal["minmax", "mse"]
Order = Literal["natural", "activation"]
ActivationRange = Literal["minmax", "average", "percentile", "mse", "kl"]
"""Ways to choose a fixed activation scale: `minmax` takes the largest magnitude. `average` takes an exponential average
of the largest of each batch, which begins with the first and moves a tenth of the way to each later one. `percentile`
covers all but one value in ten thousand, `mse` has the least rounding error, and `kl` is entropy calibration."""

MOST_DRAWN = 4096  # maximal sequences that a model writes, to calibrate or to tune on


@dataclass(frozen=True, slots=True)
class Rotate:
    """Rotate the residual stream, and the values of each head, by orthogonal matrices folded into the weights."""

    method: ClassVar[str] = "rotate"
    rotation: Literal["hadamard", "orthogonal"] = "hadamard"  # of the stream; hadamard: with random signs
    heads: bool = True  # whether values, and with them the inputs of o, are rotated too
    balance: bool = True  # whether inputs of o and down are scaled first, to balance the channels
    online: bool = False  # whether inputs of down are, at run time: blocks of the largest power of two that fits
    across: bool = False  # whether inputs of o are too, in such blocks, instead of head by head

    def __post_init__(self) -> None:
        _word("rotation", self.rotation, ("hadamard", "orthogonal"))
        _truth("heads", self.heads)
        _truth("balance", self.balance)
        _truth("online", self.online)
        _truth("across", self.across)


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
    rotation_steps: int = 300
    rotation_batch: int = 2048  # rows a step

    def __post_init__(self) -> None:
        QuaRot.__post_init__(self)
        _whole("rotation_steps", self.rotation_steps, 1)
        _whole("rotation_batch", self.rotation_batch, 1)


@dataclass(frozen=True, slots=True)
class SmoothQuant:
    """Divide activations and multiply weights by max|x|^alpha / max|w|^(1 - alpha), channel by channel."""

    method: ClassVar[str] = "smoothquant"
    alpha: float | Literal["search"] | None = None
    """Migration strength; None: the family's own, `smoothquant.ALPHA`; `search`: for each input group the one whose
    rounded linears have the least output error."""
    through: bool = False  # also between linears, up to down and v to o, unlike the paper
    norms: bool = True  # and from norms; without them only between linears

    def __post_init__(self) -> None:
        if isinstance(self.alpha, str) and self.alpha != "search":
            raise ValueError(f"alpha is a number from 0 to 1, or search, not {self.alpha!r}")
        if self.alpha is not None and self.alpha != "search":
            _number("alpha", self.alpha, 0, 1)
        _truth("through", self.through)
        _truth("norms", self.norms)
        if not (self.through or self.norms):
            raise ValueError("norms: false leaves smoothquant nothing to do without through: true")


@dataclass(frozen=True, slots=True)
class SmoothAttention:
    """Divide keys and multiply queries, channel by channel, for KV caches that round keys; and transform values."""

    method: ClassVar[str] = "smoothattention"
    key_alpha: float | None = None  # the power of max|k|, as published 0.5; None: searched, for an int4 cache
    values: bool = True  # whether values are transformed by a matrix a head that the output projection inverts

    def __post_init__(self) -> None:
        if self.key_alpha is not None:
            _number("key_alpha", self.key_alpha, 0, 1)
        _truth("values", self.values)


@dataclass(frozen=True, slots=True)
class Clip:
    """Limit each group's values to the range whose rounding leaves the least output error."""

    method: ClassVar[str] = "clip"


@dataclass(frozen=True, slots=True)
class Awq:
    """Search, group of linears by group, the power of mean|x| to scale weight columns by; then, how far to clip."""

    method: ClassVar[str] = "awq"
    points: int = 20  # alphas tried, 0 and 1 among them
    clip: bool = True

    def __post_init__(self) -> None:
        _whole("points", self.points, 2)
        _truth("clip", self.clip)


@dataclass(frozen=True, slots=True)
class Rtn:
    """Round every weight to the nearest code."""

    method: ClassVar[str] = "rtn"
    scale_search: ScaleSearch = "minmax"

    def __post_init__(self) -> None:
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class Gptq:
    """Round column by column; later columns compensate for the error of earlier ones on the calibration inputs."""

    method: ClassVar[str] = "gptq"
    needs: ClassVar[Mapping[str, str]] = {"output_damping": "couple", "residual": "correct"}
    """Options that are read only where another is true."""
    block: int = 128  # columns between two lazy updates: speed, not results
    damping: float = 0.01  # fraction of the Hessian's mean diagonal that is added to the diagonal
    order: Order = "activation"
    scale_search: ScaleSearch = "mse"
    static_groups: bool = True  # scales are set before the sweep; false: when it reaches the group, in natural order
    polish: int = 0  # sweeps of coordinate descent over codes, scales and zero points afterwards
    guide: int = 0  # gradient-weighted Hessians a linear; 0: one, unweighted
    couple: bool = False  # whether rows compensate for one another, as the loss couples them
    output_damping: float = 0.1  # `damping` of the matrix that couples them
    correct: bool = False  # whether targets are the original model's outputs, from the compressed one's inputs
    residual: float = 0.0  # with `correct`: fraction of the residual stream's error to correct

    def __post_init__(self) -> None:
        _whole("block", self.block, 1)
        _whole("polish", self.polish, 0)
        _whole("guide", self.guide, 0)
        _truth("couple", self.couple)
        _number("output_damping", self.output_damping, 0, 100)
        _truth("correct", self.correct)
        _number("residual", self.residual, 0, 1)
        if self.couple and (self.guide > 1 or not self.static_groups):
            raise ValueError("couple: true needs one Hessian for all rows, guide: 0 or 1, and static_groups: true")
        _number("damping", self.damping, 0, 1)
        _word("order", self.order, ("natural", "activation"))
        _word("scale_search", self.scale_search, ("minmax", "mse"))
        _truth("static_groups", self.static_groups)
        if not self.static_groups and self.order == "activation":
            raise ValueError(
                "static_groups: false needs order: natural, since activation order visits groups in pieces"
            )


@dataclass(frozen=True, slots=True)
class Qronos(Gptq):
    """Apply GPTQ, polished, to weights corrected for what the compressed blocks before have changed."""

    method: ClassVar[str] = "qronos"
    polish: int = 4
    correct: bool = True
    residual: float = 0.5


@dataclass(frozen=True, slots=True)
class Guided(Gptq):
    """Apply GPTQ in the metric of the loss, polished; needs one pass of gradients of the original model over the
    text."""

    method: ClassVar[str] = "guided"
    polish: int = 4
    couple: bool = True
    correct: bool = True
    residual: float = 0.5


@dataclass(frozen=True, slots=True)
class _Pruning:
    """Make `sparsity` of the weights zero, and round the others where the recipe has a scheme."""

    sparsity: str = "s50"
    scale_search: ScaleSearch = "mse"

    def __post_init__(self) -> None:
        if not isinstance(self.sparsity, str):
            raise ValueError(f"sparsity is a word such as s50 or 2:4, in quotes, not {self.sparsity!r}")
        Pattern.parse(self.sparsity)
        _word("scale_search", self.scale_search, ("minmax", "mse"))

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
    block: int = 128  # columns that share a threshold, unless the sparsity is n:m
    damping: float = 0.01

    def __post_init__(self) -> None:
        _Pruning.__post_init__(self)
        _whole("block", self.block, 1)
        _number("damping", self.damping, 0, 1)


@dataclass(frozen=True, slots=True)
class Prune(_Pruning):
    """Search the positions of all zeros together, then the best weights for them."""

    method: ClassVar[str] = "prune"
    steps: int = 60  # steps of the search
    damping: float = 0.01
    guide: int = 0  # as for GPTQ
    correct: bool = True  # as for GPTQ

    def __post_init__(self) -> None:
        _Pruning.__post_init__(self)
        _whole("steps", self.steps, 1)
        _number("damping", self.damping, 0, 1)
        _whole("guide", self.guide, 0)
        _truth("correct", self.correct)


Pruning = Magnitude | Wanda | SparseGpt | Prune


@dataclass(frozen=True, slots=True)
class Structured:
    """Remove whole heads and columns of the feed-forward: so many percent of the weights of the blocks' linears."""

    method: ClassVar[str] = "structured"
    percent: int = 25
    damping: float = 0.01
    correct: bool = True  # as for GPTQ
    scale_search: ScaleSearch = "mse"  # of a rounded LM head

    def __post_init__(self) -> None:
        _whole("percent", self.percent, 1)
        _number("percent", self.percent, 1, 95)
        _truth("correct", self.correct)
        _number("damping", self.damping, 0, 1)
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class AutoRound:
    """Learn the rounding direction of each weight and the clipping of each range, block by block, from the block's
    output."""

    method: ClassVar[str] = "autoround"
    steps: int = 200
    batch: int = 2048  # tokens a step
    scale_search: ScaleSearch = "mse"  # initial ranges
    correct: bool = True  # whether targets are from the original's states, else the block's own output

    def __post_init__(self) -> None:
        _whole("steps", self.steps, 1)
        _truth("correct", self.correct)
        _whole("batch", self.batch, 1)
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class Hqq:
    """Round to nearest, on scales and zero points that make few errors large and most small; reads no text."""

    method: ClassVar[str] = "hqq"
    steps: int = 20
    scale_search: ScaleSearch = "minmax"  # of a rounded LM head

    def __post_init__(self) -> None:
        _whole("steps", self.steps, 0)
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class SqueezeLlm:
    """Fit lookup tables for each row, by k-means weighted by the loss; needs gradients, one pass."""

    method: ClassVar[str] = "squeezellm"
    scale_search: ScaleSearch = "mse"  # of an LM head that is rounded to a grid

    def __post_init__(self) -> None:
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class Tune:
    """Train scales, norms and biases after all blocks, with codes frozen, towards the original's predictions."""

    method: ClassVar[str] = "tune"
    epochs: int = 4  # passes over the calibration text, of which at most `tune.TOKENS` tokens are used
    rate: float = 1e-3  # Adam's largest step, relative to the size of each number
    batch: int = 512  # tokens a step
    drawn: int = 0  # additional sequences, written by the original, to train on

    def __post_init__(self) -> None:
        _whole("epochs", self.epochs, 1)
        if self.epochs > 10:
            raise ValueError("epochs is at most 10: more would fit the calibration text, not the model")
        _number("rate", self.rate, 0, 0.1)
        _whole("batch", self.batch, 1)
        _whole("drawn", self.drawn, 0)
        if self.drawn > MOST_DRAWN:
            raise ValueError(f"drawn is at most {MOST_DRAWN} sequences: more would be training, not compression")


@dataclass(frozen=True, slots=True)
class Distill(Tune):
    """Tune on more text than is given, most of it written by the original model (LLM-QAT, Liu et al. 2023). The
    compressed model is to predict what the original would write."""

    method: ClassVar[str] = "distill"
    epochs: int = 2
    rate: float = 3e-4
    drawn: int = 512


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


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} is a number from {low} to {high}, not {value!r}")


def _whole(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is a whole number of at least {low}, not {value!r}")


def _truth(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is true or false, not {value!r}")


def _word(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
