"""Shapes of answers about the server, its models, its tokenizer and its requests."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from attar.protocol.messages import Ready, Report, Stats
from attar.protocol.model_shape import MachineRates, ModelShape
from attar.server.api.response_types.answer import Answer


class Alive(Answer, frozen=True):
    status: Literal["alive", "ready"]


class Version(Answer, frozen=True):
    version: str


class Load(Answer, frozen=True):
    server_load: int  # requests that run or wait


class Replica(Answer, frozen=True):
    replica: int
    state: Literal["loading", "ready", "draining", "down", "stuck", "strange", "failed"]
    processors: list[int]
    open: int  # requests that it has
    deaths: int
    restarts: int
    requests: int  # that were sent to it, and the tokens of their prompts
    prompt_tokens: int
    cached_prompt_tokens: int  # of these, those that the router expected to be cached there
    stats: Stats | None


class Engine(Answer, frozen=True):
    ready: Ready
    stats: Stats | None
    replicas: list[Replica] | UnsetType = UNSET  # of a server with several engines


class RunningRequest(Answer, frozen=True):
    """A running request of the caller's key: its id, the tokens that it has, and those that it may come to have."""

    id: str
    tokens: int
    max_tokens: int


class Lab(Answer, frozen=True):
    """Data of the lab's page. `steps` are the last ones: rows, sequences, cached tokens, seconds; null where several
    keys share the server, whose requests they would tell of."""

    live: bool
    written: str
    model: ModelShape | None
    machine: MachineRates | None
    gpus: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    channels: list[dict[str, Any]]
    replay: list[dict[str, Any]]
    engine: Engine
    sequences: list[RunningRequest]
    steps: list[tuple[int, int, int, float]] | None


class Model(Answer, frozen=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str  # what is served under this name
    parent: str | UnsetType = UNSET  # an adapter's base model
    loaded: bool | UnsetType = UNSET  # this and the others: of a server with several models
    state: Literal["unloaded", "loading", "ready", "draining", "failed"] | UnsetType = UNSET
    memory: int | UnsetType = UNSET  # bytes that its engine takes


class Models(Answer, frozen=True):
    object: Literal["list"]
    data: list[Model]


class Why(Answer, frozen=True):
    """Account of where a request's time went, or goes while `outcome` is `running`.

    `outcome` is otherwise how it ended: `stop`, `length`, or the code of its failure. `prompts` has a report for each
    prompt, and for an embedding's first 128 inputs. A running prompt's report is partial; it is null where the prompt
    waits to be sent to the engine, or a step has kept the engine from answering for a second.
    """

    id: str
    outcome: str
    seconds: float
    seconds_to_first_token: float | None
    generated_tokens: int
    replays: int  # times that another engine of several went on with a prompt; told at the end
    prompts: list[Report | None]


class TokenPiece(Answer, frozen=True):
    """A token with its text, or with its bytes where those are no text."""

    id: int
    piece: str | list[int]


class Tokenized(Answer, frozen=True):
    tokens: list[int | TokenPiece]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET  # where they were asked for


class Detokenized(Answer, frozen=True):
    """The text, by vLLM's and by llama.cpp's name."""

    prompt: str
    content: str


class TokenizerInfo(Answer, frozen=True):
    """What a client needs to render conversations by itself."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: None
    chat_template: str | None
    vocab_size: int
    model_max_length: int
