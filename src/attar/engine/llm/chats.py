"""Conversations of an `LLM`: prompts by the model's chat template, and what splits answers into their parts.

Tools are shown, and calls enforced and read, by the code that the server has for them (`text/tools/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attar.engine.llm.images import ImagePrompts
from attar.protocol.images import ImageInput
from attar.text.answers.events import AnswerParser
from attar.text.answers.reasoning import Place, ReasoningMarkers, ReasoningParser
from attar.text.forms.infill import Infill
from attar.text.forms.rerank import Reranker
from attar.text.literal import LiteralChat
from attar.text.template import render_chat
from attar.text.tokenizer import Tokenizer
from attar.text.tools.formats import ToolFormat, detect
from attar.text.tools.generic import shown
from attar.text.tools.given import conversation
from attar.text.tools.history import has_calls
from attar.text.tools.tool import Tool

Message = Mapping[str, Any]

TAIL = 64  # tokens at the end of a prompt that show whether a reasoning section is open


class Chats:
    """The conversations of a model with this tokenizer, and with `images` where it has a vision tower."""

    def __init__(self, tokenizer: Tokenizer, images: ImagePrompts | None = None) -> None:
        self._tokenizer, self._images = tokenizer, images
        self._literal = LiteralChat(tokenizer)
        self.infill = Infill.of(tokenizer, self._literal.text_ids)
        self.reranker = Reranker.of(tokenizer, self._literal.text_ids)
        self._format: tuple[str, ToolFormat] | None = None  # with the template that it was found by

    @property
    def markers(self) -> ReasoningMarkers | None:
        """The markers of the model's reasoning section; None where it has none."""
        return ReasoningMarkers.of(self._tokenizer, self._tokenizer.chat_templates.get("default"))

    def tool_format(self) -> ToolFormat:
        """Return the model's syntax of calls. Raises ValueError where there is no template."""
        template = self._tokenizer.chat_template(tools=True)
        if self._format is None or self._format[0] != template:
            self._format = template, detect(self._tokenizer, template)
        return self._format[1]

    def ids(
        self, messages: Sequence[Message], template: Mapping[str, Any], images: Sequence[ImageInput] = ()
    ) -> list[int]:
        """Return the token ids of messages as the template takes them, with the assistant's turn opened. `images` are
        those of the marks in messages. Raises ValueError where there is no template, or it fails."""
        tokenizer = self._tokenizer
        source = tokenizer.chat_template(bool(template.get("tools")))

        def render(said: Sequence[Message], more: Mapping[str, Any]) -> str:
            text = render_chat(source, said, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, **more)
            return self._images.expand(text, images) if self._images is not None and images else text

        said = messages if self._images is None else self._images.parted(source, messages)
        return self._literal.encode(said, render, template)

    def with_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool], template: Mapping[str, Any],
        images: Sequence[ImageInput] = (),
    ) -> list[int]:  # fmt: skip
        """Return the token ids of messages in OpenAI's shape, calls and results among them, with tools shown. Raises
        ToolError for calls and results that do not belong together, and ValueError as `ids`."""
        said = conversation(messages)
        if not tools and not has_calls(said):
            return self.ids(said, template, images)
        as_shown, more = shown(self.tool_format(), said, tools)
        return self.ids(as_shown, {**template, **more}, images)

    def place(self, markers: ReasoningMarkers, prompt: Sequence[int]) -> Place:
        """Return where the answer to a prompt begins: before, inside or behind its reasoning section."""
        return markers.place(self._tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False))

    def parser(self, prompt: Sequence[int], exact: bool, inner: AnswerParser) -> AnswerParser:
        """Return a parser of an answer to a prompt, which splits reasoning from what `inner` gets; `exact` as a
        constraint needs it (`text/answers/reasoning.py`)."""
        if (markers := self.markers) is None:
            return inner
        return ReasoningParser(markers, self.place(markers, prompt), inner, exact)
