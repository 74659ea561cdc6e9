"""Tools for models whose chat template prints none: a system message explains them, and answers are JSON.

An answer is `{"tool_calls": [...]}` or `{"response": "..."}`, which a constraint enforces, so any model can call.
Earlier calls and results are written as text of the roles that every template has.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from attar.text.literal import REASONING
from attar.text.tools.formats import ToolFormat
from attar.text.tools.history import for_template
from attar.text.tools.tool import Tool

INSTRUCTIONS = """You can call these tools, each described by a line of JSON:
{tools}

Answer with JSON alone. To call tools, write {{"tool_calls": [{{"name": NAME, "arguments": {{...}}}}]}}.
To answer in words, write {{"response": "..."}}. The results of your calls come with the next message."""

Message = Mapping[str, Any]


def shown(
    form: ToolFormat, messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return messages in OpenAI's shape as a template of this format takes them, and its variables for `tools`. Raises
    ToolError as `for_template` does."""
    said = for_template(messages, form.id_length, form.arguments_as_text)
    if form.name == "generic":
        return plain(said, tools), {}
    return said, {"tools": [tool.template_form() for tool in tools]} if tools else {}


def plain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return messages that any template prints: tools in the system message, calls as the model writes them, results as
    text of the user.

    Arguments of calls may be objects or JSON text. With `tools` a `response` is written as the model writes one.
    Without, calls and results of earlier turns are still shown.
    """
    names: dict[str, str] = {}
    made: list[dict[str, Any]] = []
    for message in messages:
        role, content = message.get("role"), _text(message.get("content"))
        if role == "assistant" and message.get("tool_calls"):
            calls = [_call(each, names) for each in message["tool_calls"]]
            _add(made, "assistant", _json({"tool_calls": calls}))
        elif role == "assistant" and tools and content:
            _add(made, "assistant", _json({"response": content}))
        elif role == "tool":
            name = message.get("name") or names.get(str(message.get("tool_call_id")), "")
            _add(made, "user", f"Result of {name}:\n{content}")
        elif role == "user" and made and made[-1]["role"] == "user":
            _add(made, "user", content)
        else:
            made.append(dict(message))
    if not tools:
        return made
    lines = "\n".join(json.dumps(tool.template_form()["function"], ensure_ascii=False) for tool in tools)
    words = INSTRUCTIONS.format(tools=lines)
    if made and made[0].get("role") in ("system", "developer"):
        first = made.pop(0)
        words = f"{_text(first.get('content'))}\n\n{words}"
    return [{"role": "system", "content": words}, *made]


def _add(made: list[dict[str, Any]], role: str, text: str) -> None:
    """Add a turn; one of the same speaker goes on, as many templates want turns to alternate."""
    if made and made[-1]["role"] == role:
        made[-1] = {**made[-1], "content": f"{_text(made[-1].get('content'))}\n\n{text}"}
    else:
        made.append({"role": role, "content": text})


def _call(call: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    function = call.get("function", call)
    names[str(call.get("id"))] = str(function.get("name"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else shown as it is
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def _text(content: Any) -> str:
    """Return the text of a content: a string, or parts of which some have text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def _json(value: Any) -> str:
    """Return JSON without markers of reasoning, which an assistant's own text may have, and its arguments may not."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("<", "\\u003c") if any(part in text.lower() for part in REASONING) else text
