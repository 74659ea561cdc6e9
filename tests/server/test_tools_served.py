"""Tools over HTTP: what a request may call, calls in answers whole and streamed, and conversations with results."""

from __future__ import annotations

import json
import re
import subprocess
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
from tests.server.test_clients import PYTHON, needs_clients
from tests.text.tools.families import HERMES, MISTRAL, with_markers

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
    least = {"messages": USER} if path == OLLAMA else {"messages": USER, "max_tokens": 300}
    return server.post(path, {**least, **fields})


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


def test_a_call_without_its_marker_is_one_unless_json_was_asked_for(server: Running, saying: Saying) -> None:
    bare = f'{{"name": "weather", "arguments": {FIRST}}}'
    for whole in (bare, f"```json\n{bare}\n```"):
        saying(whole)
        message = ask(server, tools=[WEATHER, NOW]).json["choices"][0]["message"]
        assert message["content"] is None
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == MADE[:1]
        assert joined(chunks(ask(server, tools=[WEATHER, NOW], stream=True))) == ("", MADE[:1])
        reply = ask(server, tools=[WEATHER, NOW], response_format={"type": "json_object"})
        assert reply.json["choices"][0]["message"]["content"] == whole


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


def test_only_allowed_tools_are_called_and_all_are_shown(server: Running) -> None:
    ask(server, tools=[WEATHER, NOW])
    shown = asked(server).prompt
    for mode in ("auto", "required"):
        tools = [{"type": "function", "function": {"name": "now"}}]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
        assert ask(server, tools=[WEATHER, NOW], tool_choice=choice).status == 200
        submitted = asked(server)
        assert submitted.prompt == shown
        assert ask(server, tools=[NOW], tool_choice=mode).status == 200
        assert submitted.grammar == asked(server).grammar
    choice["allowed_tools"] = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]}
    reply = ask(server, tools=[WEATHER, NOW], tool_choice=choice)
    assert (reply.status, reply.json["error"]["param"]) == (400, "tool_choice")


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


WEATHER_THEIRS = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
NOW_THEIRS = {"name": "now", "input_schema": {"type": "object"}}
INPUTS = [("weather", json.loads(FIRST)), ("now", {})]


def blocks_of(reply: Reply) -> tuple[list[dict[str, Any]], str]:
    """The content blocks that a stream of Anthropic's makes, and the reason of its end."""
    made: list[dict[str, Any]] = []
    pieces: list[str] = []
    reason = ""
    for event in reply.events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(made)
                made.append(event["content_block"])
                pieces.append("")
            case "content_block_delta":
                assert event["index"] == len(made) - 1
                pieces[-1] += event["delta"].get("text", event["delta"].get("partial_json"))
            case "message_delta":
                reason = event["delta"]["stop_reason"]
    kinds = [event["type"] for event in reply.events]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(made)
    for block, piece in zip(made, pieces, strict=True):
        block |= {"text": piece} if block["type"] == "text" else {"input": json.loads(piece or "{}")}
    return made, reason


def test_anthropics_messages_call(server: Running, saying: Saying) -> None:
    saying(CALLS)
    body = {"tools": [WEATHER_THEIRS, NOW_THEIRS]}
    answer = ask(server, MESSAGES, **body).json
    assert answer["stop_reason"] == "tool_use"
    text, *made = answer["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert [(each["name"], each["input"]) for each in made] == INPUTS
    assert all(re.fullmatch(r"toolu_[A-Za-z0-9]{24}", each["id"]) for each in made)
    streamed, reason = blocks_of(ask(server, MESSAGES, **body, stream=True))
    assert reason == "tool_use"
    strip = [{key: value for key, value in each.items() if key != "id"} for each in (*streamed, text, *made)]
    assert strip[:3] == strip[3:]
    saying(CALLS.removeprefix("Let me see.\n"))
    assert [each["type"] for each in ask(server, MESSAGES, **body).json["content"]] == ["tool_use"] * 2
    saying("Hello.")
    assert ask(server, MESSAGES, **body).json["content"] == [{"type": "text", "text": "Hello."}]
    assert blocks_of(ask(server, MESSAGES, **body, stream=True))[0] == [{"type": "text", "text": "Hello."}]


def test_anthropics_choice_is_that_of_openai(server: Running) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    for theirs, ours in (
        ({"type": "auto"}, {}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "tool", "name": "now"}, {"tool_choice": named}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"parallel_tool_calls": False}),
        ({"type": "none"}, {"tool_choice": "none"}),
    ):
        found = []
        for path, fields in ((MESSAGES, {"tool_choice": theirs, "tools": [WEATHER_THEIRS]}), (CHAT, ours)):
            tools = [WEATHER_THEIRS, NOW_THEIRS] if path == MESSAGES else [WEATHER, _now_with_schema()]
            assert ask(server, path, **{**fields, "tools": tools}).status == 200
            found.append((asked(server).prompt, asked(server).grammar))
        assert found[0] == found[1], theirs


def _now_with_schema() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def test_anthropics_results_are_openais(server: Running) -> None:
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": json.loads(FIRST)}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "Rain."}]}
    theirs = [
        *USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    ours = [*USER, {**CALLED, "content": "Hm."}, RESULT, {"role": "user", "content": "And?"}]
    ids = server.post("/tokenize", {"messages": ours, "tools": [WEATHER]}).json["tokens"]
    fields = {"messages": theirs, "tools": [WEATHER_THEIRS]}
    assert ask(server, MESSAGES, **fields).status == 200
    assert list(asked(server).prompt) == ids
    assert server.post("/v1/messages/count_tokens", fields).json["input_tokens"] == len(ids)
    failed = [*theirs[:2], {"role": "user", "content": [{**result, "is_error": True}]}]
    assert ask(server, MESSAGES, **{**fields, "messages": failed}).status == 200
    told = server.post("/detokenize", {"tokens": list(asked(server).prompt)}).json["prompt"]
    assert "Error: Rain." in told
    for wrong in (theirs[:2], [*USER, theirs[2]], [{"role": "user", "content": [use]}], [*theirs[:2], *USER]):
        assert ask(server, MESSAGES, **{**fields, "messages": wrong}).status == 400


def test_anthropics_refusals_name_their_fields(server: Running) -> None:
    for fields, words in (
        ({"tools": [NOW_THEIRS, NOW_THEIRS]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": UNKEPT, "strict": True}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [NOW_THEIRS], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ):
        reply = ask(server, MESSAGES, **fields)  # type: ignore[arg-type]
        assert reply.status == 400
        assert reply.json["error"]["message"].startswith(words)


def test_an_answer_may_be_calls_or_json(server: Running) -> None:
    """As OpenAI has it: `response_format` is that of an answer without calls."""
    for shape in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}):
        assert ask(server, tools=[WEATHER], response_format=shape).status == 200
        grammar = asked(server).grammar
        assert grammar is not None
        assert "start: calls | final" in grammar.text
        assert ask(server, tools=[WEATHER], tool_choice="required", response_format=shape).status == 200
        assert asked(server).grammar != grammar


def test_ollamas_chat_calls(server: Running, saying: Saying) -> None:
    saying(CALLS)
    answer = ask(server, OLLAMA, tools=[WEATHER, NOW], stream=False).json
    assert (answer["done_reason"], answer["message"]["content"]) == ("stop", "Let me see.")
    made = [each["function"] for each in answer["message"]["tool_calls"]]
    assert [(each["index"], each["name"], each["arguments"]) for each in made] == [
        (at, name, given) for at, (name, given) in enumerate(INPUTS)
    ]
    reply = ask(server, OLLAMA, tools=[WEATHER, NOW, ODD])
    lines = [json.loads(line) for line in reply.body.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "Let me see."
    assert [each["function"] for line in lines for each in line["message"].get("tool_calls", [])] == made
    assert reply.headers["x-attar-loosened-tools"] == "odd"
    assert "tools" in server.post("/api/show", {}).json["capabilities"]


def test_a_call_that_breaks_off_is_text_where_calls_are_objects(server: Running, saying: Saying) -> None:
    length = saying(CALLS)
    for most in range(1, length, 4):
        message = ask(server, tools=[WEATHER, NOW], max_tokens=most).json["choices"][0]["message"]
        text, made = message["content"] or "", message.get("tool_calls", [])
        whole = [each["function"] for each in made]
        broken = ""
        try:
            inputs = [(each["name"], json.loads(each["arguments"])) for each in whole]
        except ValueError:
            *whole, last = whole
            inputs = [(each["name"], json.loads(each["arguments"])) for each in whole]
            broken = f'{{"name": {json.dumps(last["name"])}, "arguments": {last["arguments"]}'
        content = ask(server, MESSAGES, tools=[WEATHER_THEIRS, NOW_THEIRS], max_tokens=most).json["content"]
        assert [(each["name"], each["input"]) for each in content if each["type"] == "tool_use"] == inputs
        assert "".join(each["text"] for each in content if each["type"] == "text") == text + broken
        options = {"tools": [WEATHER, NOW], "options": {"num_predict": most}}
        theirs = ask(server, OLLAMA, **options, stream=False).json["message"]
        lines = [json.loads(line)["message"] for line in ask(server, OLLAMA, **options).body.splitlines()]
        for said in ([theirs], lines):
            functions = [each["function"] for line in said for each in line.get("tool_calls", [])]
            assert [(each["name"], each["arguments"]) for each in functions] == inputs
            assert "".join(line["content"] for line in said) == text + broken


def test_ollamas_results_are_openais(server: Running) -> None:
    call = {"function": {"name": "weather", "arguments": json.loads(FIRST)}}
    ours = [*USER, {**CALLED, "content": "Hm."}, RESULT]
    ids = server.post("/tokenize", {"messages": ours, "tools": [WEATHER]}).json["tokens"]
    for result in ({"tool_name": "weather"}, {"name": "weather"}, {}, {"tool_call_id": "call_1"}):
        theirs = [*USER, {"role": "assistant", "content": "Hm.", "tool_calls": [call]}]
        theirs.append({"role": "tool", "content": "Rain.", **result})
        assert ask(server, OLLAMA, messages=theirs, tools=[WEATHER], stream=False).status == 200
        assert list(asked(server).prompt) == ids
    for wrong in ({"tool_name": "now"}, {"tool_call_id": "call_2"}):
        theirs[-1] = {"role": "tool", "content": "Rain.", **wrong}
        assert ask(server, OLLAMA, messages=theirs, tools=[WEATHER]).status == 400


CLIENTS = """
import json, sys, anthropic, openai
url, tools, theirs = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
ours = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
claude = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
said = [{"role": "user", "content": "The weather?"}]
options = {"model": "fake", "messages": said, "tools": tools}
message = ours.chat.completions.create(**options).choices[0].message
with ours.chat.completions.stream(**options) as stream:
    final = stream.get_final_completion().choices[0]
found = [[[c.function.name, json.loads(c.function.arguments)] for c in m.tool_calls] for m in (message, final.message)]
results = [{"role": "tool", "tool_call_id": c.id, "content": "Rain."} for c in message.tool_calls]
again = ours.chat.completions.create(**{**options, "messages": [*said, message, *results]})
options = {"model": "fake", "max_tokens": 300, "messages": said, "tools": theirs}
reply = claude.messages.create(**options)
with claude.messages.stream(**options) as stream:
    streamed = stream.get_final_message()
found += [[[b.name, b.input] for b in m.content if b.type == "tool_use"] for m in (reply, streamed)]
used = [b for b in reply.content if b.type == "tool_use"]
results = [{"type": "tool_result", "tool_use_id": b.id, "content": "Rain."} for b in used]
turn = [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
more = claude.messages.create(**{**options, "messages": [*said, *turn]})
ends = [final.finish_reason, again.choices[0].finish_reason, streamed.stop_reason, more.stop_reason]
print(json.dumps([found, ends]))
"""


def test_the_clients_of_both_apis_call_and_send_results(server: Running, saying: Saying) -> None:
    needs_clients()
    saying(CALLS)
    tools = [json.dumps(each) for each in ([WEATHER, NOW], [WEATHER_THEIRS, NOW_THEIRS])]
    program = [PYTHON, "-c", CLIENTS, f"http://127.0.0.1:{server.port}", *tools]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr[-2000:]
    found, reasons = json.loads(done.stdout)
    assert found == [[list(each) for each in INPUTS]] * 4
    assert reasons == ["tool_calls", "tool_calls", "tool_use", "tool_use"]


def test_markers_that_are_special_tokens_are_shown_and_ids_have_the_templates_length(
    demo: Path, tmp_path: Path
) -> None:
    """As Mistral's templates have it."""
    tokenizer = with_markers(Tokenizer.load(demo))
    tokenizer.chat_templates["default"] = MISTRAL
    server = Running(tmp_path, tokenizer, ServerOptions(port=0))
    assert tokenizer.eos_id is not None
    text = f'[TOOL_CALLS] [{{"name": "weather", "arguments": {FIRST}}}]'
    server.engine.script = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_id)
    try:
        [call] = ask(server, tools=[WEATHER]).json["choices"][0]["message"]["tool_calls"]
        assert asked(server).params.visible_token_ids == (tokenizer.token_to_id("[TOOL_CALLS]"),)
        assert re.fullmatch("[A-Za-z0-9]{9}", call["id"])
        assert call["function"] == {"name": "weather", "arguments": FIRST}
        assert ask(server, messages=[*USER, CALLED, RESULT], tools=[WEATHER]).status == 200  # other ids are replaced
        plain = ask(server, tools=[WEATHER], tool_choice="none").json["choices"][0]["message"]
        assert plain["content"] == text.removeprefix("[TOOL_CALLS]")
    finally:
        assert server.stop()
