"""A prompt of an `LLM` and its output so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from attar.errors import UserError
from attar.protocol.grammar import Grammar
from attar.protocol.images import ImageInput
from attar.protocol.messages import Delta, Failed, Finished, PromptLogprobs
from attar.protocol.reasoning import ReasoningSection
from attar.protocol.request import Completion, FinishReason, SamplingParams, TokenLogprob, ToolCall
from attar.sampling.sampler import counted
from attar.text.answers.events import AnswerEvent, AnswerParser, Plain
from attar.text.answers.made_calls import calls
from attar.text.answers.reasoning import reasoning_and_text
from attar.text.tools.calling import NO_CALLS, Calling

Said = Delta | PromptLogprobs | Finished | Failed


@dataclass(eq=False)
class Answer:
    """A prompt and its output so far."""

    prompt: tuple[int, ...]
    params: SamplingParams
    grammar: Grammar | None = None
    section: ReasoningSection | None = None
    parser: AnswerParser = field(default_factory=Plain)
    calling: Calling = NO_CALLS
    events: list[AnswerEvent] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    of_prompt: tuple[TokenLogprob, ...] | None = None
    reason: FinishReason | None = None
    images: tuple[ImageInput, ...] = ()

    def take(self, event: Said) -> None:
        """Add an event. Raises ValueError where the request has failed."""
        match event:
            case Failed():
                raise UserError("request_refused", event.message)
            case Finished():
                self.reason = event.reason
                self.events += self.parser.close()
            case PromptLogprobs():
                self.of_prompt = event.logprobs
            case Delta():
                self.tokens += event.token_ids
                self.events += self.parser.feed(event.text)
                self.logprobs += event.logprobs or ()

    def completion(self) -> Completion:
        """Return the answer, which has ended."""
        assert self.reason is not None, "an answer that has not ended"
        logprobs = None if counted(self.params) is None else tuple(self.logprobs)
        reasoning, text = reasoning_and_text(self.events)
        made = tuple(ToolCall(self.calling.new_id(), call.name, call.arguments) for call in calls(self.events))
        return Completion(
            text, tuple(self.tokens), self.reason, self.prompt, logprobs, self.params.seed, self.of_prompt, reasoning,
            made,
        )  # fmt: skip
