"""Conversations with calls of tools and their results, as chat templates expect them.

Messages come in OpenAI's shape: an assistant's `tool_calls` with arguments as JSON text, and messages of role `tool`
with a `tool_call_id`. Templates print arguments themselves, so they get objects. A result gets the name of its tool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from attar import strict_json
from attar.text.tools.tool import ToolError

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

Message = Mapping[str, Any]


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether a conversation has calls of tools, or results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def for_template(
    messages: Sequence[Message], id_length: int = 0, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Return messages as templates expect them.

    id_length: letters and digits of a call's id, where the template takes ids of one length only; other ids are
        replaced, the same one by the same. 0 leaves them as they are.
    arguments_as_text: whether the template takes arguments as JSON text.

    Raises ToolError for arguments that are no JSON object, for a result without its call, for two results of a call,
    and for a call without a result before the next message that is none.
    """
    said: list[dict[str, Any]] = []
    waiting: dict[str, str] = {}  # calls without a result: name by id
    asked = 0  # index of the message with these calls
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if message["role"] == "tool":
            given = message["tool_call_id"]
            if given not in waiting:
                text = (
                    f"no call of the assistant's message before has the id {given[:80]!r}, or it has a result already"
                )
                raise ToolError(text, f"{where}.tool_call_id")
            own = {"tool_call_id": _id(given, id_length), "name": waiting.pop(given)}
            said.append({**message, **own})
            continue
        _check_answered(waiting, asked)
        if not message.get("tool_calls"):
            said.append(dict(message))
            continue
        calls = []
        for number, call in enumerate(message["tool_calls"]):
            place = f"{where}.tool_calls[{number}]"
            if call["id"] in waiting:
                raise ToolError(f"two calls have the id {call['id'][:80]!r}", f"{place}.id")
            function = call["function"]
            waiting[call["id"]] = function["name"]
            arguments = _object(function["arguments"], f"{place}.function.arguments")
            if not arguments_as_text:
                function = {**function, "arguments": arguments}
            own = {"id": _id(call["id"], id_length), "function": function}
            calls.append({**call, **own})
        said.append({**message, "tool_calls": calls})
        asked = at
    _check_answered(waiting, asked)
    return said


def _check_answered(waiting: Mapping[str, str], asked: int) -> None:
    for unanswered in waiting:
        text = f"the call {unanswered[:80]!r} has no result: a message of role tool must follow for each call"
        raise ToolError(text, f"messages[{asked}].tool_calls")


def _object(text: str, where: str) -> dict[str, Any]:
    """Return the arguments of a call."""
    try:
        value = strict_json.loads(text.encode()) if text.strip() else {}
    except strict_json.JSONError as error:
        raise ToolError(f"the arguments of a call are a JSON object: {error}", where) from error
    if not isinstance(value, dict):
        raise ToolError("the arguments of a call are a JSON object", where)
    return value


def _id(given: str, length: int) -> str:
    if not length or (len(given) == length and given.isascii() and given.isalnum()):
        return given
    number = int.from_bytes(hashlib.sha256(given.encode()).digest(), "big")
    return "".join(_LETTERS[number // 62**place % 62] for place in range(length))
