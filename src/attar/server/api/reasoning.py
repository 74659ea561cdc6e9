"""Reasoning over HTTP: fields of OpenAI, vLLM, llama.cpp, OpenRouter, Anthropic and Ollama, read as one object.

They may contradict each other. Then the most specific one counts: variables of the template, `enable_thinking`,
`thinking`, `reasoning`, `reasoning_effort`. Of several budgets the smallest counts. A model without a reasoning section
fulfils any of them, so none is refused there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from attar.protocol.reasoning import ReasoningSection
from attar.server.errors import APIError
from attar.text.answers.reasoning import Place, ReasoningMarkers, switched
from attar.text.template import OWN, reads

MAX_VARIABLES = 64
NO_LIMIT = -1
MAX_BUDGET = 2**31 - 1
BUDGETS = {"minimal": 512, "low": 2048, "medium": 8192}
"""Tokens of reasoning by effort, for templates that do not read the effort themselves; none for more effort."""

_VARIABLE = rf"^(?!({'|'.join(OWN)})$)[A-Za-z_][A-Za-z0-9_]{{0,63}}$"
_VARIABLES = "Further variables of the chat template, such as enable_thinking. Special tokens in their texts stay text."
VariableName = Annotated[str, Meta(pattern=_VARIABLE)]
Variables = Annotated[dict[VariableName, Any], Meta(max_length=MAX_VARIABLES, description=_VARIABLES)]
_BUDGET = "Most tokens of reasoning; then its section is ended. -1 sets no limit."
Budget = Annotated[int, Meta(ge=NO_LIMIT, le=MAX_BUDGET, description=_BUDGET)]
_EFFORT = "Given to templates that read it; else `none` turns reasoning off, and up to `medium` a budget holds."
Effort = Annotated[Literal["none", "minimal", "low", "medium", "high", "xhigh"], Meta(description=_EFFORT)]


class Thinking(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Anthropic's field: whether the model reasons, and in how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0, le=MAX_BUDGET)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ReasoningOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """OpenRouter's field. With `exclude` the answer leaves out its reasoning."""

    effort: Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None


@dataclass(frozen=True, slots=True)
class ReasoningRequest:
    """What a request asks of a model's reasoning. None leaves it to the model.

    variables: given for the template. enabled: whether to reason. budget: most tokens. shown: whether the answer has
    the reasoning too.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    shown: bool = True

    @classmethod
    def of(
        cls, variables: Mapping[str, Any] | None, enable_thinking: bool | None = None, thinking: Thinking | None = None,
        reasoning: ReasoningOptions | None = None, effort: str | None = None, budgets: Iterable[int | None] = (),
    ) -> ReasoningRequest:  # fmt: skip
        """Read the fields of a request."""
        options = reasoning or ReasoningOptions()
        level = options.effort or effort
        switches: list[bool | None] = [
            enable_thinking, None if thinking is None or thinking.type == "adaptive" else thinking.type == "enabled",
            options.enabled, None if level is None else level != "none",
        ]  # fmt: skip
        most = [*budgets, options.max_tokens, None if thinking is None else thinking.budget_tokens]
        limits = [each for each in most if each is not None and each != NO_LIMIT]
        return cls(
            variables or {}, next((each for each in switches if each is not None), None), level,
            min(limits, default=None), not options.exclude and (thinking is None or thinking.display != "omitted"),
        )  # fmt: skip

    def for_template(self, template: str) -> dict[str, Any]:
        """Return the variables for a template: those that the request gives, and of the others those that it reads."""
        found: dict[str, Any] = {}
        if self.enabled is not None:
            found |= switched(template, self.enabled)
        if self.effort is not None and reads(template, "reasoning_effort"):
            found["reasoning_effort"] = self.effort
        return found | dict(self.variables)

    def section(
        self, markers: ReasoningMarkers | None, place: Place, template: str, constrained: str | None
    ) -> ReasoningSection | None:
        """Return the section of an answer that begins at `place`, for the engine; None where there is none, or nothing
        depends on it. `constrained` is the field of a constraint. Raises APIError where the engine would have to find
        markers that are no single tokens."""
        budget = self.budget
        if budget is None and self.effort in BUDGETS and not reads(template, "reasoning_effort"):
            budget = BUDGETS[self.effort]
        if markers is None or place is Place.BEHIND or (budget is None and constrained is None):
            return None
        if markers.start_id is None or markers.end_id is None:
            if place is Place.BEFORE and budget is None:  # the constraint holds from there, and lets no section begin
                return None
            name = constrained or "thinking_token_budget"
            message = (
                f"{name}: not supported while this model reasons, whose vocabulary has no token {markers.end!r}: "
                "set enable_thinking = false"
            )
            raise APIError("unsupported_field", message, name)
        return markers.section(place, budget)
