"""The body of llama.cpp's /completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from attar.server.api.constraints import Asked, GrammarText, SchemaObject, of_llamacpp, only_one
from attar.server.api.dialects.llamacpp.fields import NativeSampling
from attar.server.api.dialects.llamacpp.inputs import Inputs, Pieces, check_inputs, inputs_of
from attar.server.api.schemas import MAX_PROMPTS, Choices, Logprobs, check_end


class NativeCompletionBody(NativeSampling, frozen=True, kw_only=True):
    """Body of /completion: a prompt to be continued, or several. `n_probs` asks for the log probabilities of so many of
    the likeliest tokens, `n_cmpl` for several answers to each prompt."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {**NativeSampling.neutral, "grammar": ("",)}

    prompt: Inputs
    n_cmpl: Choices | None = None
    n_probs: Logprobs | None = None
    ignore_eos: bool | None = None
    grammar: GrammarText | None = None
    json_schema: SchemaObject | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_end(self)
        check_inputs(self.prompt, "prompt", MAX_PROMPTS)

    def prompts(self) -> Sequence[str | Pieces]:
        """Return the prompts, each a text, or a list of token ids and texts."""
        return inputs_of(self.prompt)

    def constraint(self) -> Asked | None:
        """Return the constraint of the answer; None where there is none. Raises APIError for several."""
        return only_one(list(of_llamacpp(self.grammar, self.json_schema)))
