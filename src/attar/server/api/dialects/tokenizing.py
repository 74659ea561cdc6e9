"""The bodies of /tokenize and /detokenize, as vLLM and llama.cpp have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from attar.server.api.body import Body, Token
from attar.server.api.messages import Messages
from attar.server.api.reasoning import Variables
from attar.server.api.schemas import Continue, check_turn
from attar.server.api.tools.fields import ToolUse
from attar.server.errors import APIError
from attar.text.tools.openai import Tools


class TokenizeBody(Body, frozen=True, kw_only=True):
    """Body of /tokenize: a text, or a conversation as the chat endpoint would render it.

    `content` is llama.cpp's name of the text; then `add_special` asks for special tokens around it, and `with_pieces`
    for each token's text.

    `add_generation_prompt` opens the assistant's turn behind a conversation. `return_token_strs` asks for the tokens as
    the vocabulary spells them, in `token_strs`.
    """

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"chat_template": (), "parse_special": (True,)}

    prompt: str | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Continue | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Variables | None = None

    def __post_init__(self) -> None:
        if [self.prompt, self.messages, self.content].count(None) != 2:
            raise APIError("missing_field", "prompt: either prompt, messages or content, and one of them", "prompt")
        check_turn(self.add_generation_prompt, self.continue_final_message)
        self.tool_use()

    def tool_use(self) -> ToolUse:
        """Return the tools that a conversation shows. Raises APIError for tools that are refused."""
        return ToolUse.read(self.tools, None, None)

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates expect them."""
        return [message.for_template() for message in self.messages or ()]


class DetokenizeBody(Body, frozen=True, kw_only=True):
    """Body of /detokenize."""

    tokens: Annotated[list[Token], Meta(max_length=1 << 20)]
