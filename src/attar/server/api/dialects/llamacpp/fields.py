"""Fields that bodies of llama.cpp's routes share.

Samplers that this server lacks are accepted where they are off, each with the settings that only it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from attar.protocol.request import MAX_REPETITION, MIN_REPETITION
from attar.server.api.body import Body, Token
from attar.server.api.schemas import (
    MAX_BIASES,
    Bias,
    Fraction,
    Limit,
    Penalty,
    Repetition,
    Seed,
    StopStrings,
    Temperature,
    TopK,
    check_limits,
    check_stops,
)  # fmt: skip
from attar.server.errors import APIError

DEFAULTS: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Sampling parameters of llama.cpp, where a request names none."""

_OWN_ORDER = "Accepted and ignored: filters act in this server's order, and `infill` is none of them."
_NO_CLOCK = "Accepted and ignored: n_predict bounds an answer."
_OFF = "Accepted and ignored: only samplers read it that are off, or a context that shifts."
_WHOLE = "Of prompt and answer: other than 1, only with repeat_last_n = -1, or 0 for none; not with repetition_penalty."
RepeatPenalty = Annotated[float, Meta(ge=MIN_REPETITION, le=MAX_REPETITION, description=_WHOLE)]
LastTokens = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Unread = Annotated[Any, Meta(description=_OFF)]

Banned = Annotated[bool, Meta(description="false: never this token.", extra_json_schema={"const": False})]
BiasText = Annotated[str, Meta(min_length=1, max_length=64)]
Biased = tuple[Token | BiasText, Bias | Banned]
NAMED_BIASES = "NamedBiases"
"""Title of biases by tokens or texts in the OpenAPI document."""
BiasList = Annotated[list[Biased], Meta(max_length=MAX_BIASES, description="Pairs: a token or a text, and its bias.")]
BiasTable = Annotated[dict[BiasText, Bias | Banned], Meta(max_length=MAX_BIASES, title=NAMED_BIASES)]


class NativeSampling(Body, frozen=True, kw_only=True):
    """Sampling fields of llama.cpp's server."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "n_indent": (0,), "typical_p": (1,), "typ_p": (1,), "mirostat": (0,), "dynatemp_range": (0,),
        "xtc_probability": (0,), "dry_multiplier": (0,), "lora": ([],), "top_n_sigma": (-1,),
        "adaptive_target": (-1,), "post_sampling_probs": (False,), "return_progress": (False,), "sse_ping_interval": (),
    }  # fmt: skip

    n_predict: Limit | None = None
    max_tokens: Annotated[Limit, Meta(description="Another name of n_predict: not both.")] | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: RepeatPenalty | None = None
    repeat_last_n: LastTokens | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: BiasTable | BiasList | None = None
    seed: Seed | None = None
    stop: StopStrings | None = None
    stream: bool | None = None
    response_fields: Annotated[list[str], Meta(max_length=64)] | None = None
    timings_per_token: bool | None = None
    return_tokens: bool | None = None
    samplers: Annotated[Any, Meta(description=_OWN_ORDER)] = None
    t_max_prompt_ms: Annotated[Any, Meta(description=_NO_CLOCK)] = None
    t_max_predict_ms: Annotated[Any, Meta(description=_NO_CLOCK)] = None
    n_keep: Unread = None
    n_discard: Unread = None
    min_keep: Unread = None
    dynatemp_exponent: Unread = None
    xtc_threshold: Unread = None
    dry_base: Unread = None
    dry_allowed_length: Unread = None
    dry_penalty_last_n: Unread = None
    dry_sequence_breakers: Unread = None
    mirostat_tau: Unread = None
    mirostat_eta: Unread = None
    adaptive_decay: Unread = None
    backend_sampling: Unread = None

    def __post_init__(self) -> None:
        check_stops(self.stop, "stop")
        check_limits(self.n_predict, {"max_tokens": self.max_tokens})
        if self.repeat_penalty not in (None, 1):
            if self.repeat_last_n not in (-1, 0):
                message = "repeat_penalty: only over all tokens here, so set repeat_last_n = -1"
                raise APIError("unsupported_field", message, "repeat_penalty")
            if self.repetition_penalty is not None:
                raise APIError("invalid_value", "repeat_penalty: not with repetition_penalty", "repeat_penalty")
        for _, bias in self.biases():
            if bias is True:
                raise APIError("invalid_value", "logit_bias: a number, or false for never", "logit_bias")

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None where the request names no limit."""
        return self.max_tokens if self.n_predict is None else self.n_predict

    def repetition(self) -> float | None:
        """Return the penalty of tokens that the prompt or the answer has already; None where it is the default."""
        if self.repeat_penalty in (None, 1):
            return self.repetition_penalty
        return self.repeat_penalty if self.repeat_last_n else 1.0

    def biases(self) -> list[tuple[int | str, float | bool]]:
        """Return tokens and texts, each with its bias; False is never. Keys that are numbers are tokens."""
        given = self.logit_bias
        if isinstance(given, dict):
            return [(int(key) if key.isascii() and key.isdigit() else key, bias) for key, bias in given.items()]
        return list(given or ())
