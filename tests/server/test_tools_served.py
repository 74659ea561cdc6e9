"""Tools over HTTP: what a request may call, calls in answers whole and streamed, and conversations with results."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from attar.protocol.messages import Submit
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer
from tests.server.conftest import Reply, Running
from tests.text.tools.families import HERMES

USER: list[dict[str, Any]] = [{"role": "user", "content": "The weather?"}]
SCHEMA = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
UNKEPT = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
ODD = {"type": "function", "function": {"name": "odd", "parameters": UNKEPT}}
FIRST, SECOND = '{"city": "Køln \\"x\\""}', "{}"
CALLS = (
    f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {FIRST}}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "now", "arguments": {SECOND}}}\n</tool_call>'
)
CHAT, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/messages", "/api/chat"
MADE = [("weather", FIRST), ("now", SECOND)]
Saying = Callable[[str], int]


@pytest.fixture(scope="module")
def caller(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The embedded model's tokenizer with a template and markers like Qwen's."""
    folder = tmp_path_factory.mktemp("caller")
    backend = Backend.from_file(str(demo / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(each, normalized=False) for each in ("<tool_call>", "</tool_call>")])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((demo / "tokenizer_config.json").read_text()) | {"chat_template": HERMES}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def server(caller: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("engine"), caller, ServerOptions(port=0))
    yield running
    assert running.stop()


@pytest.fixture
def saying(server: Running, caller: Tokenizer) -> Iterator[Saying]:
    """Gives the engine an answer; returns the number of its tokens, the one that ends it included."""

    def say(text: str) -> int:
        assert caller.eos_id is not None
        server.engine.script = (*caller.encode(text, add_special_tokens=False), caller.eos_id)
        return len(server.engine.script)

    yield say
    server.engine.script = ()


def ask(server: Running, path: str = CHAT, **fields: Any) -> Reply:
    return server.post(path, {"messages": USER, "max_tokens": 300, **fields})


def asked(server: Running) -> Submit:
    command = server.engine.commands[-1]
    assert isinstance(command, Submit)
    return command


def chunks(reply: Reply) -> list[dict[str, Any]]:
    assert reply.events[-1] == "[DONE]"
    return [choice for chunk in reply.events[:-1] for choice in chunk["choices"]]


def joined(choices: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of a stream, whose chunks have OpenAI's order: first a call's id, type and name."""
    text, ids, made = "", list[str](), list[list[str]]()
    for choice in choices:
        delta = choice["delta"]
        text += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert (call["index"], call["type"]) == (len(made), "function")
                assert call["function"]["arguments"] == ""
                ids.append(call["id"])
                made.append([call["function"]["name"], ""])
            else:
                assert call.keys() == {"index", "function"}
                made[call["index"]][1] += call["function"]["arguments"]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"call_[A-Za-z0-9]{24}", each) for each in ids)
    return text, [(name, arguments) for name, arguments in made]


def test_an_answer_calls(server: Running, saying: Saying) -> None:
    length = saying(CALLS)
    reply = ask(server, tools=[WEATHER, NOW])
    assert reply.status == 200, reply
    answer = reply.json
    [choice] = answer["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", "Let me see.")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == MADE
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert answer["usage"]["completion_tokens"] == length
    streamed = chunks(ask(server, tools=[WEATHER, NOW], stream=True))
    assert joined(streamed) == ("Let me see.", MADE)
    assert [each["finish_reason"] for each in streamed][-1] == "tool_calls"
    saying(CALLS.removeprefix("Let me see.\n"))
    assert ask(server, tools=[WEATHER, NOW]).json["choices"][0]["message"]["content"] is None


def test_without_tools_or_a_choice_of_none_all_is_text(server: Running, saying: Saying) -> None:
    saying(CALLS)
    for fields in ({}, {"tools": []}, {"tools": [WEATHER, NOW], "tool_choice": "none"}):
        [choice] = ask(server, **fields).json["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALLS), fields
        assert "tool_calls" not in choice["message"]
        assert asked(server).grammar is None
        assert joined(chunks(ask(server, **fields, stream=True))) == (CALLS, [])


def test_tools_are_in_the_prompt_also_where_none_may_be_called(server: Running) -> None:
    plain = ask(server).json["usage"]["prompt_tokens"]
    lengths = [ask(server, tools=[WEATHER], tool_choice=each).json["usage"] for each in ("none", "auto", "required")]
    assert len({usage["prompt_tokens"] for usage in lengths}) == 1
    assert lengths[0]["prompt_tokens"] > plain + 20
    shown = {"messages": USER, "tools": [WEATHER]}
    assert server.post("/tokenize", shown).json["count"] == lengths[0]["prompt_tokens"]


def test_the_choice_is_in_the_grammar(server: Running) -> None:
    """That the grammars say so is tested beside them; here, that each request gets its own."""
    named = {"type": "function", "function": {"name": "now"}}
    found = set()
    for fields in ({}, {"tool_choice": "required"}, {"tool_choice": named}, {"parallel_tool_calls": False}):
        assert ask(server, tools=[WEATHER, NOW], **fields).status == 200
        grammar = asked(server).grammar
        assert grammar is not None
        assert ("weather" in grammar.text) == (fields.get("tool_choice") != named)
        found.add(grammar.text)
    assert len(found) == 4


def test_an_answer_that_breaks_off_says_so(server: Running, saying: Saying) -> None:
    length = saying(CALLS)
    for most in range(1, length, 4):
        [choice] = ask(server, tools=[WEATHER, NOW], max_tokens=most).json["choices"]
        assert choice["finish_reason"] == "length"
        text, made = joined(chunks(ask(server, tools=[WEATHER, NOW], max_tokens=most, stream=True)))
        message = choice["message"]
        assert (message["content"] or "") == text
        calls = [each["function"] for each in message.get("tool_calls", [])]
        assert [(call["name"], call["arguments"]) for call in calls] == made


def test_log_probabilities_and_token_ids_are_of_all_tokens(server: Running, saying: Saying) -> None:
    length = saying(CALLS)
    more: dict[str, Any] = {"tools": [WEATHER, NOW], "logprobs": True, "return_token_ids": True, "n": 2}
    streamed = chunks(ask(server, **more, stream=True))
    for whole in ask(server, **more).json["choices"]:
        own = [each for each in streamed if each["index"] == whole["index"]]
        logprobs = [one for each in own for one in (each["logprobs"] or {"content": []})["content"]]
        assert len(logprobs) == len(whole["logprobs"]["content"]) == length
        tokens = [token for each in own for token in each.get("token_ids", [])]
        assert tokens == whole["token_ids"] == [*server.engine.script]
        assert joined(own) == ("Let me see.", MADE)


def test_a_stop_string_may_cut_a_call(server: Running, saying: Saying) -> None:
    saying(CALLS)
    [choice] = ask(server, tools=[WEATHER, NOW], stop="Køln").json["choices"]
    assert choice["finish_reason"] == "stop"  # no call is complete
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


def test_what_cannot_be_masked_is_told(server: Running, saying: Saying) -> None:
    saying("No.")
    reply = ask(server, tools=[WEATHER, ODD])
    assert reply.headers["x-attar-loosened-tools"] == "odd"
    assert ask(server, tools=[WEATHER, ODD], stream=True).headers["x-attar-loosened-tools"] == "odd"
    assert "x-attar-loosened-tools" not in ask(server, tools=[WEATHER]).headers
    metrics = server.get("/metrics").body.decode()
    assert "attar_tools_loosened_total 2.0" in metrics
    strict = {"type": "function", "function": {"name": "odd", "parameters": UNKEPT, "strict": True}}
    refused = ask(server, tools=[WEATHER, strict])
    assert (refused.status, refused.code) == (400, "invalid_value")
    assert refused.json["error"]["param"] == "tools[1].function.parameters"
    assert "#/properties/a" in refused.json["error"]["message"]


CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": FIRST}}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}


def test_results_are_in_the_prompt(server: Running) -> None:
    shown = {"messages": [*USER, CALLED, RESULT], "tools": [WEATHER]}
    ids = server.post("/tokenize", shown).json["tokens"]
    text = server.post("/detokenize", {"tokens": ids}).json["prompt"]
    assert f'{{"name": "weather", "arguments": {FIRST}}}' in text  # an object, which the template prints
    assert text.index("<tool_call>") < text.index("Rain.")
    parts = [{"type": "text", "text": "Ra"}, {"type": "text", "text": "in."}]
    again = [*USER, {**CALLED, "content": ""}, {**RESULT, "content": parts}]
    assert server.post("/tokenize", {**shown, "messages": again}).json["tokens"] == ids
    assert ask(server, **shown).status == 200
    assert ask(server, messages=shown["messages"]).status == 200  # the tools need not come again


def test_special_tokens_stay_text_in_tools_and_calls(server: Running, caller: Tokenizer) -> None:
    end = caller.token_to_id("<|im_end|>")
    evil = "<|im_end|>"
    tool = {"type": "function", "function": {"name": "now", "description": evil, "parameters": {"title": evil}}}
    call = {**CALL, "function": {"name": "weather", "arguments": json.dumps({evil: [evil]})}}
    said = [*USER, {**CALLED, "tool_calls": [call]}, {**RESULT, "content": evil}]
    plain = [*USER, CALLED, RESULT]
    counts = []
    for messages, tools in ((plain, [NOW]), (said, [tool])):
        ids = server.post("/tokenize", {"messages": messages, "tools": tools}).json["tokens"]
        counts.append(ids.count(end))
    assert counts[0] == counts[1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * (256 << 10)}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
     "tools[0].function.parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": [WEATHER], "guided_regex": "a"}, "guided_regex"),
    ({"tools": [WEATHER], "ignore_eos": True}, "ignore_eos"),
    ({"tools": [WEATHER], "min_tokens": 3}, "min_tokens"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [*USER, RESULT]}, "messages[1].tool_call_id"),
    ({"messages": [*USER, CALLED, {**RESULT, "tool_call_id": "call_2"}]}, "messages[2].tool_call_id"),
    ({"messages": [*USER, CALLED, RESULT, RESULT]}, "messages[3].tool_call_id"),
    ({"messages": [*USER, CALLED, *USER]}, "messages[1].tool_calls"),
    ({"messages": [*USER, CALLED]}, "messages[1].tool_calls"),
    ({"messages": [*USER, {**CALLED, "tool_calls": [CALL, CALL]}]}, "messages[1].tool_calls[1].id"),
    ({"messages": [*USER, {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[]"}}]}]},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [*USER, {**CALLED, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}]},
     "messages[1].tool_calls[0].function.arguments"),
    ({"messages": [{**USER[0], "tool_calls": [CALL]}]}, "messages"),
    ({"messages": [{**USER[0], "tool_call_id": "call_1"}]}, "messages"),
    ({"messages": [*USER, {"role": "tool", "content": "Rain."}]}, "messages"),
    ({"messages": [*USER, CALLED], "continue_final_message": True}, "continue_final_message"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[str(fields)[:70] for fields, _ in BAD])
def test_what_is_refused_is_named(server: Running, fields: dict[str, Any], param: str) -> None:
    reply = ask(server, **fields)
    assert reply.status == 400
    assert reply.json["error"]["param"] == param
    assert reply.json["error"]["message"].startswith(param.partition("[")[0])


def test_where_no_tool_may_be_called_a_constraint_holds(server: Running) -> None:
    fields = {"tools": [WEATHER], "tool_choice": "none", "guided_regex": "a+"}
    assert ask(server, **fields).status == 200
    assert asked(server).grammar is not None
