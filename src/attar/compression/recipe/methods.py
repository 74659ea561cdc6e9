"""The methods that a recipe names, each with its options and what they may be. Pure data, torch-free.

An option that is out of range is refused here, by its name, before anything runs. What a method does is said where it
is done: in `solvers/`, one file each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from attar.compression.recipe.pattern import Pattern

ScaleSearch = Literal["minmax", "mse"]
Order = Literal["natural", "activation"]
ActivationRange = Literal["minmax", "average", "percentile", "mse", "kl"]
"""What a fixed scale of activations is for: the largest that occurred, an exponential average of the largest of each
batch that begins with the first and moves a tenth of the way to each after it, all but one value in ten thousand, the
range that rounds with the least error, or that of entropy calibration."""

MOST_DRAWN = 4096  # sequences that a model writes, to calibrate or to tune on


@dataclass(frozen=True, slots=True)
class Rotate:
    """Turn the residual stream, and what each head mixes, by orthogonal matrices that are folded into the weights."""

    method: ClassVar[str] = "rotate"
    rotation: Literal["hadamard", "orthogonal"] = "hadamard"  # of the stream: with random signs, or any at random
    heads: bool = True  # whether values, and with them the inputs of o, are rotated too
    balance: bool = True  # whether what o and down read is scaled first, so that no channel is large for nothing
    online: bool = False  # whether the inputs of down are, at run time: in blocks, the largest power of two that fits
    across: bool = False  # whether the inputs of o are too, in such blocks, instead of head by head

    def __post_init__(self) -> None:
        _word("rotation", self.rotation, ("hadamard", "orthogonal"))
        _truth("heads", self.heads)
        _truth("balance", self.balance)
        _truth("online", self.online)
        _truth("across", self.across)


@dataclass(frozen=True, slots=True)
class QuaRot(Rotate):
    """The same, and a Hadamard matrix at run time before down, whose inputs no folded rotation reaches."""

    method: ClassVar[str] = "quarot"
    online: bool = True


@dataclass(frozen=True, slots=True)
class SpinQuant(QuaRot):
    """The same, the folded rotations learned: those in which what linears read stands out least. In a GGUF file they
    are all there is: `online` is false there, unless it is asked for, and then refused."""

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
    """None: the model family's own, `smoothquant.ALPHA`; `search`: of each place the one whose rounded linears put out
    least error."""
    through: bool = False  # also from linear to linear, up to down and v to o, which the paper leaves alone
    norms: bool = True  # and from norms; without them only from linear to linear

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
    """Divide keys and multiply queries, channel by channel, for caches that round keys; and turn values."""

    method: ClassVar[str] = "smoothattention"
    key_alpha: float | None = None  # the power of max|k|, as published 0.5; None: searched, for a cache of int4
    values: bool = True  # whether values are turned as well, by a matrix a head that the output matrix takes back

    def __post_init__(self) -> None:
        if self.key_alpha is not None:
            _number("key_alpha", self.key_alpha, 0, 1)
        _truth("values", self.values)


@dataclass(frozen=True, slots=True)
class Clip:
    """Limit each group's values to the range whose rounding leaves the least error of its outputs."""

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
    """Round column by column; later columns make up for the error of earlier ones on the calibration inputs."""

    method: ClassVar[str] = "gptq"
    needs: ClassVar[Mapping[str, str]] = {"output_damping": "couple", "residual": "correct"}
    """Options that are read only where another is true."""
    block: int = 128  # columns between two lazy updates: speed, not results
    damping: float = 0.01  # fraction of the Hessian's mean diagonal that is added to the diagonal
    order: Order = "activation"
    scale_search: ScaleSearch = "mse"
    static_groups: bool = True  # scales are set before the sweep; false: when it reaches the group, in natural order
    polish: int = 0  # sweeps of coordinate descent over codes, scales and zero points afterwards
    guide: int = 0  # Hessians a linear, of tokens weighted by how the loss minds each one's rows; 0: one, unweighted
    couple: bool = False  # whether rows make up for one another, as far as the loss couples them
    output_damping: float = 0.1  # the same as `damping` for what couples them
    correct: bool = False  # whether to aim at what the original model computes, from the inputs of the compressed one
    residual: float = 0.0  # with it, how much of what is wrong in the residual stream what adds to it makes up for

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
    """GPTQ of weights corrected for what the compressed blocks before have changed, polished."""

    method: ClassVar[str] = "qronos"
    polish: int = 4
    correct: bool = True
    residual: float = 0.5


@dataclass(frozen=True, slots=True)
class Guided(Gptq):
    """GPTQ in the metric of the loss, polished: needs gradients of the original model, one pass over the text."""

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
    """Zero, column by column, what costs least; later columns make up for the error of earlier ones."""

    method: ClassVar[str] = "sparsegpt"
    block: int = 128  # columns that share a threshold, unless the sparsity is n:m
    damping: float = 0.01

    def __post_init__(self) -> None:
        _Pruning.__post_init__(self)
        _whole("block", self.block, 1)
        _number("damping", self.damping, 0, 1)


@dataclass(frozen=True, slots=True)
class Prune(_Pruning):
    """Search all places of zeros together, then the best weights for them."""

    method: ClassVar[str] = "prune"
    steps: int = 60  # of the search
    damping: float = 0.01
    guide: int = 0  # as of GPTQ
    correct: bool = True  # as of GPTQ

    def __post_init__(self) -> None:
        _Pruning.__post_init__(self)
        _whole("steps", self.steps, 1)
        _number("damping", self.damping, 0, 1)
        _whole("guide", self.guide, 0)
        _truth("correct", self.correct)


Pruning = Magnitude | Wanda | SparseGpt | Prune


@dataclass(frozen=True, slots=True)
class Structured:
    """Leave out whole heads and columns of the feed-forward: so many percent of the weights of the blocks' linears."""

    method: ClassVar[str] = "structured"
    percent: int = 25
    damping: float = 0.01
    correct: bool = True  # as of GPTQ
    scale_search: ScaleSearch = "mse"  # of an output matrix that is rounded

    def __post_init__(self) -> None:
        _whole("percent", self.percent, 1)
        _number("percent", self.percent, 1, 95)
        _truth("correct", self.correct)
        _number("damping", self.damping, 0, 1)
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class AutoRound:
    """Learn, block by block, which way to round each weight and how far to clip, from the block's output."""

    method: ClassVar[str] = "autoround"
    steps: int = 200
    batch: int = 2048  # tokens a step
    scale_search: ScaleSearch = "mse"  # where ranges begin
    correct: bool = True  # whether to aim at the original model's states, or at the block's own output for its inputs

    def __post_init__(self) -> None:
        _whole("steps", self.steps, 1)
        _truth("correct", self.correct)
        _whole("batch", self.batch, 1)
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class Hqq:
    """Round to nearest, on scales and zero points for which few errors are large and most small; reads no text."""

    method: ClassVar[str] = "hqq"
    steps: int = 20
    scale_search: ScaleSearch = "minmax"  # of an output matrix that is rounded

    def __post_init__(self) -> None:
        _whole("steps", self.steps, 0)
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class SqueezeLlm:
    """Tables for each row, by k-means in which a weight counts as the loss minds it: needs gradients, one pass."""

    method: ClassVar[str] = "squeezellm"
    scale_search: ScaleSearch = "mse"  # of an output matrix that is rounded to a grid

    def __post_init__(self) -> None:
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class Tune:
    """After all blocks: train scales, norms and biases, codes frozen, towards the original's predictions."""

    method: ClassVar[str] = "tune"
    epochs: int = 4  # passes over the calibration text, of which at most `tune.TOKENS` tokens are used
    rate: float = 1e-3  # Adam's largest step, relative to the size of each number
    batch: int = 512  # tokens a step
    drawn: int = 0  # sequences that the original model writes, to train on besides

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
    """Tuning on more text than there is to calibrate on, most of it written by the original model itself (as LLM-QAT
    has it, Liu et al. 2023): what it would write is what the compressed model is to be right about."""

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
