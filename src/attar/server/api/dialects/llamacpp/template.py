"""The body of llama.cpp's /apply-template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attar.server.api.body import Body
from attar.server.api.messages import Messages
from attar.server.api.reasoning import Effort, ReasoningRequest, Variables
from attar.server.api.schemas import Continue, check_turn
from attar.server.api.tools.fields import ToolUse
from attar.text.tools.openai import Tools


class TemplateBody(Body, frozen=True, kw_only=True):
    """Body of /apply-template: a conversation, and what its prompt depends on."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"tools": ([],), "chat_template": ()}

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Continue | None = None
    chat_template_kwargs: Variables | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Effort | None = None

    def __post_init__(self) -> None:
        check_turn(self.add_generation_prompt, self.continue_final_message)
        self.tool_use()

    def tool_use(self) -> ToolUse:
        """Return the tools that the conversation shows. Raises APIError for tools that are refused."""
        return ToolUse.read(self.tools, None, None)

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them."""
        return [message.for_template() for message in self.messages]

    def variables(self, template: str) -> dict[str, Any]:
        """Return the variables that the template gets."""
        asked = ReasoningRequest.of(self.chat_template_kwargs, self.enable_thinking, effort=self.reasoning_effort)
        return asked.for_template(template)
