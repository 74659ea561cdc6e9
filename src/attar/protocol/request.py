"""Request parameters and results: `SamplingParams` and `Completion`. Plain values, no torch.

Ranges follow OpenAI's API where it has the parameter, else vLLM's. Every value is checked when it is made, so that the
sampler can trust it: a bool is no integer, NaN is no number, and an error names the range.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from attar.errors import UserError
from attar.protocol.speculation import MAX_DRAFT_TOKENS

FinishReason = Literal["stop", "length"]

MAX_STOPS = 16
MAX_STOP_BYTES = 1024  # 256 characters of any kind
MAX_LOGPROBS = 20
MAX_NAMED_LOGPROBS = 128
MAX_ALLOWED = 1024
MAX_VISIBLE = 64
MAX_BIASES = 1024
MAX_BIAS = 100.0
MAX_SEED = 2**64 - 1
MIN_REPETITION, MAX_REPETITION = 0.01, 100.0  # a penalty that is nearly 0 makes a logit of any size infinite


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling. The defaults sample from the model's own distribution.

    The order in which they act, and the formulas, are in `sampling/sampler.py`. Raises ValueError for a value out of
    range.

    max_tokens: most new tokens, >= 0.
    min_tokens: no EOS or stop token is sampled, and no stop string sought, in so many first tokens; 0 for none. The end
        of max_tokens, or of the context, may come before.
    temperature: >= 0; 0 takes the most probable token, after penalties.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the fewest most probable tokens whose probabilities sum to at least this; in (0, 1], 1 keeps all.
    min_p: keep tokens at least this probable relative to the most probable one; in [0, 1], 0 keeps all.
    repetition_penalty: in [0.01, 100]; above 1 makes tokens of prompt and output less probable (1 is off).
    presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logits of tokens of the output, once, or once
        per occurrence.
    stop: a string or several that end the text; they are not part of it. One may be a special token, which no text
        shows. At most 16 of 1024 UTF-8 bytes each.
    stop_token_ids: tokens that end the text, besides the model's own EOS tokens.
    ignore_eos: generate past the model's EOS tokens.
    seed: 0 to 2^64 - 1; the same seed gives the same text, whatever else runs. None takes a random one (see `seeded`).
    logprobs: None for none; k for each token's log probability and those of the k most probable tokens, k <= 20.
    logprob_token_ids: up to 128 tokens whose log probabilities are given in place of the most probable ones.
    prompt_logprobs: None or k, for the tokens of the prompt after its first.
    logit_bias: numbers in [-100, 100] that are added to the logits of these tokens, 1024 at most.
    allowed_token_ids: up to 1024 tokens, of which alone the output consists; none allow all. An EOS token is one of
        them only where it is given.
    draft_tokens: most drafts of speculative decoding in a step, 0 to 16; None for as many as pay. On CPUs they change
        no text.
    trust_forced: take tokens that a constraint forces, spelled as the tokenizer does, whatever the model draws in their
        place. Steps are fewer, and texts may differ. Not with logprobs, which tell of drawn tokens.
    kv_eviction: the policy of KV eviction, one that the server or LLM offers; `none` keeps every key, and None takes
        the first that is offered.
    visible_token_ids: up to 64 special tokens that the text shows, such as markers of tool calls; it shows no others.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: Sequence[int] = ()
    draft_tokens: int | None = None
    trust_forced: bool = False
    kv_eviction: str | None = None
    visible_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 0)
        _integer("min_tokens", self.min_tokens, 0)
        _number("temperature", self.temperature, 0.0)
        _integer("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for name in ("ignore_eos", "trust_forced"):
            if not isinstance(getattr(self, name), bool):
                raise UserError("option_malformed", f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.kv_eviction is not None and not isinstance(self.kv_eviction, str):
            raise UserError("option_malformed", f"kv_eviction must be a string, not {self.kv_eviction!r}")
        if self.trust_forced and (self.logprobs is not None or self.logprob_token_ids):
            raise UserError("option_conflict", "trust_forced: not with logprobs, which tell of drawn tokens")
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.draft_tokens is not None:
            _integer("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        # Lists are accepted and stored as tuples: the value is frozen, hashable, and the caller's list may change.
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _tokens("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logprob_token_ids", _tokens("logprob_token_ids", self.logprob_token_ids))
        if len(self.logprob_token_ids) > MAX_NAMED_LOGPROBS:
            message = f"logprob_token_ids: at most {MAX_NAMED_LOGPROBS}, not {len(self.logprob_token_ids)}"
            raise UserError("option_out_of_range", message)
        object.__setattr__(self, "allowed_token_ids", _tokens("allowed_token_ids", self.allowed_token_ids))
        if len(self.allowed_token_ids) > MAX_ALLOWED:
            message = f"allowed_token_ids: at most {MAX_ALLOWED}, not {len(self.allowed_token_ids)}"
            raise UserError("option_out_of_range", message)
        object.__setattr__(self, "visible_token_ids", _tokens("visible_token_ids", self.visible_token_ids))
        if len(self.visible_token_ids) > MAX_VISIBLE:
            message = f"visible_token_ids: at most {MAX_VISIBLE}, not {len(self.visible_token_ids)}"
            raise UserError("option_out_of_range", message)
        if self.logprob_token_ids and self.logprobs:
            raise UserError(
                "option_conflict", "logprob_token_ids are in place of the most probable tokens: no logprobs"
            )
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    def seeded(self) -> SamplingParams:
        """Return these parameters with a seed: their own, or one from the operating system. Called once for each
        prompt."""
        return replace(self, seed=int.from_bytes(os.urandom(8), "little")) if self.seed is None else self


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log probability of one token under the model itself, before penalties, temperature and filters.

    `top` holds the k most probable tokens with theirs, best first, equals in order of id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON text, incomplete where the answer broke off within it."""

    id: str
    name: str
    arguments: str

    @property
    def complete(self) -> bool:
        """Whether the arguments are a JSON object."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except ValueError:
            return False

    def message_form(self) -> dict[str, Any]:
        """Return the call as an assistant's message has it, in OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt.

    `finish_reason` is `stop` (an EOS or stop token, or a stop string) or `length` (max_tokens, or the context is full).
    `token_ids` include the token that ended the text; `text` does not show it. `seed` is the one that was used.
    `prompt_logprobs` belong to the prompt's tokens after its first. `reasoning` is what a chat's answer says in its
    reasoning section, which `text` leaves out. `tool_calls` are a chat's calls, which `text` leaves out as well.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    seed: int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """Return a chat's answer as the assistant's message that a conversation goes on from. A call's result follows
        it as `{"role": "tool", "tool_call_id": ..., "content": ...}`."""
        calls = {"tool_calls": [call.message_form() for call in self.tool_calls]} if self.tool_calls else {}
        return {"role": "assistant", "content": self.text, **calls}

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return asdict(self)


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError("option_malformed", f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        raise UserError("option_out_of_range", f"{name} must be {_range(low, high, above=False)}, not {value}")


def _number(name: str, value: object, low: float, high: float | None = None, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError("option_malformed", f"{name} must be a finite number, not {value!r}")
    if value < low or (above and value == low) or (high is not None and value > high):
        raise UserError("option_out_of_range", f"{name} must be {_range(low, high, above)}, not {value}")


def _range(low: float, high: float | None, above: bool) -> str:
    lower = f"above {low:g}" if above else f"at least {low:g}"
    return lower if high is None else f"{lower} and at most {high:g}"


def _stops(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise UserError("option_malformed", f"stop must be a string or a list of strings, not {stop!r}")
    if len(strings) > MAX_STOPS:
        raise UserError("option_out_of_range", f"at most {MAX_STOPS} stop strings, not {len(strings)}")
    for text in strings:
        if not text:
            raise UserError("option_out_of_range", "a stop string must not be empty")
        if len(text.encode("utf-8", "surrogatepass")) > MAX_STOP_BYTES:
            message = f"a stop string may have {MAX_STOP_BYTES} bytes: {text[:20]!r}... is longer"
            raise UserError("option_out_of_range", message)
    return tuple(strings)


def _tokens(name: str, tokens: object) -> tuple[int, ...]:
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise UserError("option_malformed", f"{name} must be a list of token ids, not {tokens!r}")
    for token in tokens:
        _integer(f"a token id of {name}", token, 0)
    return tuple(tokens)


def _biases(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise UserError("option_malformed", f"logit_bias must map token ids to numbers, not {biases!r}")
    if len(biases) > MAX_BIASES:
        raise UserError("option_out_of_range", f"logit_bias may have {MAX_BIASES} entries, not {len(biases)}")
    for token, bias in biases.items():
        _integer("a token id in logit_bias", token, 0)
        _number("a number in logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    return {int(token): float(bias) for token, bias in biases.items()}
