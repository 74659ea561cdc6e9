"""Fields of tools in OpenAI's shape, as the server refuses them. Their structs are in `text/tools/openai.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from attar.server.api.constraints import Asked
from attar.server.errors import APIError
from attar.text.tools import openai
from attar.text.tools.tool import Tool, ToolChoice, ToolError


class ToolUse(openai.ToolUse):
    """The tools of a request, and the choice among them; refused ones raise APIError."""

    @classmethod
    def checked(cls, tools: Sequence[Tool], choice: ToolChoice) -> Self:
        """Return tools and choice once they are checked. Raises APIError."""
        try:
            return super().checked(tools, choice)
        except ToolError as error:
            raise refused(error) from error


def refused(error: ToolError) -> APIError:
    """Make the refusal of tools, or of calls in a conversation."""
    return APIError("invalid_value", f"{error.param}: {error}", error.param)


def check_alone(asked: Asked | None, ends: Sequence[str]) -> None:
    """Raise APIError for what contradicts the grammar of calls: a constraint to other texts than JSON, or a field that
    decides on the end or the tokens."""
    if asked is not None and asked.grammar.kind not in ("json_object", "json_schema"):
        message = f"{asked.field}: not with tools, unless tool_choice is none"
        raise APIError("invalid_value", message, asked.field.partition(".")[0])
    for name in ends:
        message = f"{name}: not with tools, unless tool_choice is none: the grammar of calls decides on it"
        raise APIError("invalid_value", message, name)
