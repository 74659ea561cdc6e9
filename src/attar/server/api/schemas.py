"""The bodies of requests: types that are the table of fields, their ranges and their defaults, and their one reader.

Ranges are part of the types. msgspec checks them (a bool is no integer there; 1.0 is 1, as JSON Schema has it), and the
OpenAPI document is made of the same types, so both agree. Every integer has both bounds. `neutral` has the values that
mean "do nothing", also of fields that are not built here. Clients of other servers send those, and they are accepted.
Any other value of such a field is an error that names it, as for an unknown field: silence would be worse.

Fields that change no token (`user`, `metadata`, cache hints) are accepted with any value, and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from attar.protocol.grammar import DECIDE_ON_THE_END
from attar.protocol.request import MAX_ALLOWED, MAX_NAMED_LOGPROBS, MAX_REPETITION, MIN_REPETITION
from attar.protocol.speculation import MAX_DRAFT_TOKENS
from attar.server.api.body import MAX_TOKENS as MAX_TOKENS
from attar.server.api.body import Body
from attar.server.api.body import Token as Token
from attar.server.api.constraints import Constrained, MayConstrain
from attar.server.api.dialects.llamacpp.inputs import Inputs, Pieces, check_inputs, inputs_of
from attar.server.api.dialects.vllm import Kept, Side, Transfer, check_kept, cut
from attar.server.api.messages import Messages, text_of
from attar.server.api.reasoning import Budget, Effort, ReasoningOptions, ReasoningRequest, Thinking, Variables
from attar.server.api.tools.fields import ToolUse, check_alone
from attar.server.errors import APIError
from attar.server.prompts import Cut
from attar.text.tools.openai import Choice, Tools

MAX_PROMPTS = 128
MAX_INPUTS = 2048
MAX_CHOICES = 16
MAX_PRIORITY = 100
MAX_STOP_BYTES = 256
MAX_BIASES = 1024

Length = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
LengthOrNone = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
ALL_THAT_FIT = -1
Limit = Annotated[int, Meta(ge=ALL_THAT_FIT, le=MAX_TOKENS, description="-1: as many as fit.")]
_THEIRS = "llama.cpp's name of max_tokens: not both."
Predicted = Annotated[int, Meta(ge=ALL_THAT_FIT, le=MAX_TOKENS, description=_THEIRS)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES, title="Choices")]
_LOWEST = "The lowest goes first; 0 where none is given. With API keys, less than 0 counts as 0."
Priority = Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description=_LOWEST)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(ge=MIN_REPETITION, le=MAX_REPETITION)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Logprobs = Annotated[int, Meta(ge=0, le=20)]
_NAMED = "Tokens whose log probabilities are given in place of the most probable ones, in this order."
NamedTokens = Annotated[list[Token], Meta(max_length=MAX_NAMED_LOGPROBS, description=_NAMED)]
_ONLY = "The answer consists of these tokens alone; it ends where a token that ends it is one of them."
AllowedTokens = Annotated[list[Token], Meta(min_length=1, max_length=MAX_ALLOWED, description=_ONLY)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_BYTES, title="StopString")]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]
StopTokens = Annotated[list[Token], Meta(max_length=64)]
Biases = Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES, title="Biases")]
_POLICY = "Which keys of a long text are dropped: a policy that this server offers, or `none`."
Policy = Annotated[str, Meta(max_length=64, description=_POLICY)]
Suffix = Annotated[str, Meta(description="Text behind the answer, for models that can fill in the middle.")]
Pooling = Literal["mean", "last"]
_GOES_ON = "The answer goes on from the last message, and no turn is opened: not with add_generation_prompt = true."
Continue = Annotated[bool, Meta(description=_GOES_ON)]
_ECHOED = "The answer begins with the last message, where that is the assistant's."
Echoed = Annotated[bool, Meta(description=_ECHOED)]


_TRUST = (
    "Take the tokens that a constraint forces, whatever the model draws in their place: fewer steps, another text. Not "
    "with logprobs or best_of. `overruled_tokens` of /v1/requests/ID/why counts the difference."
)


class Speculation(Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding of this request, where the server has a drafter or a constraint forces tokens; it changes no
    text on CPUs, unless forced tokens are trusted."""

    max_tokens: Annotated[
        int, Meta(ge=0, le=MAX_DRAFT_TOKENS, description="Most drafts in a step; 0 turns it off.")
    ] = MAX_DRAFT_TOKENS
    trust_forced: Annotated[bool, Meta(description=_TRUST)] = False


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: every chunk has the usage so far, where `include_usage` is set
    include_obfuscation: bool = False  # padding against observers of lengths: a client may ask for none


ALLOWED = "allowed_token_ids"


def check_stops(stop: str | Sequence[str] | None, name: str) -> None:
    for each in (stop,) if isinstance(stop, str) else stop or ():
        if len(each.encode()) > MAX_STOP_BYTES:
            message = f"{name}: a string of {len(each.encode())} bytes is longer than {MAX_STOP_BYTES}"
            raise APIError("invalid_length", message, name)


def check_turn(opened: bool | None, continued: bool | None) -> None:
    """Raise APIError where a turn is to be opened, and the last message to be continued."""
    if opened and continued:
        name = "add_generation_prompt"
        raise APIError("invalid_value", f"{name}: not with continue_final_message, which opens no turn", name)


def check_limits(predicted: int | None, others: Mapping[str, int | None]) -> None:
    """Raise APIError for llama.cpp's limit beside another, which it is another name of."""
    for name, limit in others.items():
        if predicted is not None and limit is not None:
            raise APIError("invalid_value", f"n_predict: not with {name}, which it is another name of", "n_predict")


def check_end(body: MayConstrain) -> None:
    """Raise APIError for a constraint beside a field that decides on the end or the tokens of the answer too."""
    if (asked := body.constraint()) is not None:
        for name in (*DECIDE_ON_THE_END, ALLOWED):
            if getattr(body, name, None):
                why = "it decides on the tokens too" if name == ALLOWED else "the constraint decides on the end"
                raise APIError("invalid_value", f"{name}: not with {asked.field}: {why}", name)


class Sampling(Constrained, frozen=True, kw_only=True):
    """Fields of both /v1/completions and /v1/chat/completions; None is the default of `SamplingParams`.

    The waiting request of the lowest `priority` goes first, 0 where none is given. The number of times that an older
    one is passed by is limited (`protocol/scheduler_config.py`).
    """

    max_tokens: Limit | None = None
    n_predict: Predicted | None = None
    min_tokens: LengthOrNone | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopTokens | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    n: Choices | None = None
    priority: Priority | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: Speculation | None = None
    kv_eviction: Policy | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Logprobs | None = None
    logprob_token_ids: NamedTokens | None = None  # vLLM's
    allowed_token_ids: AllowedTokens | None = None
    return_tokens_as_token_ids: bool | None = None  # in log probabilities: `token_id:ID` in the place of texts
    timings_per_token: bool | None = None
    truncate_prompt_tokens: Kept | None = None  # vLLM's, as the next one
    truncation_side: Side | None = None

    def __post_init__(self) -> None:
        check_stops(self.stop, "stop")
        check_end(self)
        check_limits(self.n_predict, {"max_tokens": self.max_tokens})
        check_kept(self.truncate_prompt_tokens)
        if self.stream_options is not None and not self.stream:
            raise APIError("invalid_value", "stream_options: only with stream = true", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            where = "stream_options.include_obfuscation"
            raise APIError("unsupported_field", f"{where}: not supported by this server", where)

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None where the request names no limit."""
        return self.n_predict if self.max_tokens is None else self.max_tokens

    def cut(self, room: int) -> Cut | None:
        """Return what cuts prompts that have `room` tokens; None where they are taken whole."""
        return cut(self.truncate_prompt_tokens, self.truncation_side, room)

    def _check_scores(self, asked: bool, ranked: bool = False) -> None:
        """Raise APIError for `logprob_token_ids` in a request that has not `asked` for log probabilities, and for one
        that trusts forced tokens and has, or is `ranked` by them."""
        if (asked or ranked) and self.speculation is not None and self.speculation.trust_forced:
            name = "speculation.trust_forced"
            raise APIError("invalid_value", f"{name}: not with log probabilities, which are of drawn tokens", name)
        if self.logprob_token_ids and not asked:
            name = "logprob_token_ids"
            raise APIError("invalid_value", f"{name}: only with logprobs", name)


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {  # of both endpoints, or of other servers' dialects
    "stop": ("", [""]), "logit_bias": ([],), "tools": ([],),
    "use_beam_search": (False,), "num_beams": (1,), "length_penalty": (1,), "early_stopping": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True, False), "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "grammar": ("",), "regex": (), "ebnf": (), "logits_processors": ([],), "samplers": (),
    "mirostat": (0,), "mirostat_mode": (0,), "typical_p": (1,), "tfs": (1,), "tfs_z": (1,), "top_a": (0,),
    "dynatemp_range": (0,), "xtc_probability": (0,), "dry_multiplier": (0,), "repeat_penalty": (1,),
    "no_repeat_ngram_size": (0,), "n_keep": (0,), "n_probs": (0,),
    "return_progress": (False,), "options": ({},), "plugins": ([],), "transforms": ([],), "safe_prompt": (False,),
}  # fmt: skip


def _check_prompts(given: str | Sequence[Any], name: str, most: int, noun: str) -> None:
    """Check prompts while a body is read, which is outside the event loop: token ids may be millions."""
    if isinstance(given, str):
        return
    kinds = {type(part) for part in given}
    if len(kinds) > 1:
        raise APIError("invalid_type", f"{name}: a list of strings, of token ids, or of lists of token ids", name)
    if kinds != {int} and len(given) > most:
        raise APIError("invalid_length", f"{name}: at most {most} {noun}, not {len(given)}", name)


def _prompts(checked: Any) -> Sequence[str | list[int]]:
    return [checked] if isinstance(checked, str) or isinstance(checked[0], int) else checked


class CompletionBody(Sampling, frozen=True, kw_only=True):
    """Body of /v1/completions. With `best_of` greater than `n`, the answer is the `n` candidates with the highest log
    probability per token. `best_of` cannot be less than `n`, its default."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_NEUTRAL, "suffix": ("",), "add_special_tokens": (True,)}

    prompt: str | list[str | Token | list[Token]]
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Choices | None = None
    suffix: Suffix | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = self.n or 1
        made = self.best_of or kept
        if made < kept:
            raise APIError("invalid_value", f"best_of: {made} candidates are fewer than n, which is {kept}", "best_of")
        if self.stream and made > kept:
            message = "best_of: more than n only without stream: the best are known at the end"
            raise APIError("invalid_value", message, "best_of")
        if self.prompt_logprobs is not None and self.echo and self.logprobs is not None:
            message = "prompt_logprobs: not with echo and logprobs, which tell of the prompt too"
            raise APIError("invalid_value", message, "prompt_logprobs")
        self._check_scores(self.logprobs is not None, (self.best_of or 1) > 1)
        if self.limit == 0 and self.logprob_token_ids:
            raise APIError("out_of_range", "max_tokens: 0 leaves no token for logprob_token_ids", "max_tokens")
        if self.limit == 0 and not self.echo:
            raise APIError("out_of_range", "max_tokens: 0 only with echo = true", "max_tokens")
        for name, whole in (("echo", self.echo), ("suffix", self.suffix is not None)):
            if whole and self.truncate_prompt_tokens is not None:
                raise APIError("invalid_value", f"{name}: not with truncate_prompt_tokens", name)
        if self.suffix is not None and self.echo:
            raise APIError("invalid_value", "suffix: not with echo", "suffix")
        if self.prompt == []:
            raise APIError("empty_prompt", "prompt: an empty list", "prompt")
        _check_prompts(self.prompt, "prompt", MAX_PROMPTS, "prompts")

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts, each a text or token ids."""
        return _prompts(self.prompt)


class ChatBody(Sampling, frozen=True, kw_only=True):
    """Body of /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NEUTRAL,
        "functions": ([],),
        "function_call": ("none", "auto"), "modalities": (["text"],), "audio": (), "prediction": (),
        "verbosity": ("medium",), "web_search_options": (), "add_special_tokens": (False,),
        "chat_template": (), "documents": ([],), "separate_reasoning": (True,), "stream_reasoning": (True,),
        "reasoning_format": ("auto", "deepseek"),
    }  # fmt: skip

    messages: Messages
    max_completion_tokens: Limit | None = None
    echo: Echoed | None = None
    kv_transfer_params: Transfer | None = None
    truncation_side: Literal["left"] | None = None  # at the end the answer opens
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Continue | None = None
    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: Thinking | None = None
    thinking_token_budget: Budget | None = None  # vLLM's; llama.cpp's and DashScope's names follow
    thinking_budget_tokens: Budget | None = None
    thinking_budget: Budget | None = None
    include_reasoning: bool | None = None
    tools: Tools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tool_use()
        for name in ("max_tokens", "max_completion_tokens", "n_predict"):
            if getattr(self, name) == 0:
                raise APIError("out_of_range", f"{name}: at least 1, or -1 for as many as fit", name)
        check_limits(self.n_predict, {"max_completion_tokens": self.max_completion_tokens})
        if self.top_logprobs is not None and not self.logprobs:
            raise APIError("invalid_value", "top_logprobs: only with logprobs = true", "top_logprobs")
        self._check_scores(bool(self.logprobs))
        check_turn(self.add_generation_prompt, self.continue_final_message)
        if self.continue_final_message and self.messages[-1].tool_calls:
            name = "continue_final_message"
            raise APIError("invalid_value", f"{name}: a message with calls cannot be continued", name)

    def tool_use(self) -> ToolUse:
        """Return the tools and the choice among them. Raises APIError for tools that are refused."""
        use = ToolUse.read(self.tools, self.tool_choice, self.parallel_tool_calls)
        if use.may_call:
            names = [each for each in (*DECIDE_ON_THE_END, ALLOWED) if getattr(self, each)]
            check_alone(self.constraint(), names)
        return use

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them."""
        return [message.for_template() for message in self.messages]

    @property
    def most(self) -> int | None:
        """The most tokens of an answer; None for as many as fit."""
        limits = (self.max_completion_tokens, self.limit)
        return next((limit for limit in limits if limit not in (None, ALL_THAT_FIT)), None)

    @property
    def echoed(self) -> str:
        """The text that the answer begins with before the model says more."""
        return text_of(self.messages[-1].content) if self.echo and self.messages[-1].role == "assistant" else ""

    def reasoning_request(self) -> ReasoningRequest:
        """Return what the request asks of the model's reasoning."""
        budgets = (self.thinking_token_budget, self.thinking_budget_tokens, self.thinking_budget)
        made = ReasoningRequest.of(
            self.chat_template_kwargs, self.enable_thinking, self.thinking, self.reasoning, self.reasoning_effort,
            budgets,
        )  # fmt: skip
        return replace(made, shown=False) if self.include_reasoning is False else made


class EmbeddingBody(Body, frozen=True, kw_only=True):
    """Body of /v1/embeddings. `pooling`, an extension, is the mean over positions (default) or the last one. Vectors
    have unit length. `dimensions` keeps the first numbers of each, which says little unless the model was trained for
    it (Matryoshka)."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "add_special_tokens": (True,), "normalize": (True,), "priority": (0,),
        "embed_dtype": ("float32",),
    }  # fmt: skip

    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Pooling = "mean"
    dimensions: Length | None = None
    truncate_prompt_tokens: Kept | None = None
    truncation_side: Side | None = None

    def __post_init__(self) -> None:
        check_inputs(self.input, "input", MAX_INPUTS)
        check_kept(self.truncate_prompt_tokens)

    def cut(self, room: int) -> Cut | None:
        """Return what cuts inputs to `room` tokens at most; None where they are taken whole."""
        return cut(self.truncate_prompt_tokens, self.truncation_side, room)

    def inputs(self) -> Sequence[str | Pieces]:
        """Return the inputs, each a text, or a list of token ids and texts."""
        return inputs_of(self.input)
