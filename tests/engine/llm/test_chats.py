"""Chats with tools: prompts, grammars and calls are the server's for the same request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from attar.engine.llm.llm import LLM
from attar.errors import UserError
from attar.protocol.grammar import Grammar
from attar.protocol.request import Completion, SamplingParams
from attar.server.api.schemas import ChatBody
from attar.server.fair_thread_pool import TextThreads
from attar.server.prompts import Prompts
from attar.text.answers.events import CallEnd, CallStart
from attar.text.answers.made_calls import calls
from attar.text.answers.reasoning import reasoning_and_text
from attar.text.tools.calling import Calling
from tests.text.tools.families import FAMILIES

PARAMS = SamplingParams(max_tokens=100, temperature=0, seed=0)
USER = [{"role": "user", "content": "The weather?"}]
HISTORY = [
    *USER,
    {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "now"}}


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Return the weather of a city."""
    return city


def now() -> str:
    """Return the time."""
    return ""


SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
NOTHING = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "Return the weather of a city.", "parameters": SCHEMA, "strict": True,
    }},
    {"type": "function", "function": {
        "name": "now", "description": "Return the time.", "parameters": NOTHING, "strict": True,
    }},
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(demo: Path) -> LLM:
    return LLM(demo)


@pytest.fixture(params=["hermes", "llama3", "chatml"])
def family(request: pytest.FixtureRequest, llm: LLM) -> Iterator[str]:
    known = llm.tokenizer.chat_templates
    llm.tokenizer.chat_templates = {"default": FAMILIES[request.param].template}
    yield request.param
    llm.tokenizer.chat_templates = known


def served(llm: LLM, request: dict[str, Any]) -> tuple[tuple[int, ...], str, list[tuple[str, str]]]:
    """The prompt, text and calls that the server's code makes of a request, by this model."""
    body = msgspec.convert(request, ChatBody)
    use, threads = body.tool_use(), TextThreads()
    prompts = Prompts(llm.tokenizer, threads)
    try:
        ids = asyncio.run(prompts.chat_ids(b"", body.conversation(), llm.context, tools=use.tools))
    finally:
        threads.close()
    calling = Calling.of(prompts.tool_format(), use.tools, use.choice, llm.prove)
    [answer] = llm.generate([ids], calling.shown(PARAMS), constraint=calling.grammar)
    parser = calling.parser()
    events = [*parser.feed(answer.text), *parser.close()]
    return ids, reasoning_and_text(events)[1], [(call.name, call.arguments) for call in calls(events)]


@pytest.mark.parametrize("choice", ["auto", "none", "required", NAMED], ids=["auto", "none", "required", "named"])
def test_calls_are_the_servers(llm: LLM, family: str, choice: Any) -> None:
    more = {"tool_choice": choice, "parallel_tool_calls": False}
    ids, text, made = served(llm, {"messages": HISTORY, "tools": TOOLS, **more})
    for tools in (TOOLS, [weather, now]):
        done = llm.chat(HISTORY, PARAMS, tools=tools, **more)  # type: ignore[arg-type]
        assert done.prompt_token_ids == ids
        assert (done.text, [(call.name, call.arguments) for call in done.tool_calls]) == (text, made)
    if choice not in ("auto", "none"):
        [call] = done.tool_calls
        assert done.text == ""
        assert json.loads(call.arguments) in ({}, {"city": "Oslo"}, {"city": "Rome"})
    if choice == "none":
        assert not done.tool_calls


def test_a_conversation_goes_on_from_a_call(llm: LLM, family: str) -> None:
    done = llm.chat(USER, PARAMS, tools=[now], tool_choice=NAMED)
    [call] = done.tool_calls
    assert (call.name, call.arguments, call.complete) == ("now", "{}", True)
    messages = [*USER, done.message()]
    with pytest.raises(UserError) as error:
        llm.chat(messages, PARAMS)
    assert error.value.code == "tools_invalid"  # the call has no result
    said = [*messages, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    assert not llm.chat(said, PARAMS, tools=[now], tool_choice="none").tool_calls


def test_events_and_pieces_are_of_the_same_answer(llm: LLM, family: str) -> None:
    def end(stream: Any) -> tuple[list[Any], Completion]:
        found = []
        while True:
            try:
                found.append(next(stream))
            except StopIteration as ended:
                return found, ended.value

    wanted = llm.chat(USER, PARAMS, tools=[now], tool_choice=NAMED)
    events, done = end(llm.chat_events(USER, PARAMS, tools=[now], tool_choice=NAMED))
    assert done.token_ids == wanted.token_ids
    assert [type(each) for each in (events[0], events[-1])] == [CallStart, CallEnd]
    pieces, done = end(llm.stream_chat(USER, PARAMS, tools=[now], tool_choice=NAMED))
    assert done.token_ids == wanted.token_ids
    assert '"now"' in "".join(pieces)


def test_beside_tools_a_constraint_is_one_to_json(llm: LLM, family: str) -> None:
    with pytest.raises(UserError) as error:
        llm.chat(USER, PARAMS, tools=[now], constraint=Grammar("regex", "a"))
    assert error.value.code == "option_conflict"
    done = llm.chat(USER, PARAMS, tools=[now], constraint={"enum": ["yes", "no"]})
    assert done.tool_calls or done.text in ('"yes"', '"no"')
