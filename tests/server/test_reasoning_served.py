"""Reasoning over HTTP: split from answers in each API, switched on and off, bounded, and accepted in a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from attar.protocol.messages import Submit
from attar.protocol.reasoning import ReasoningSection
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer
from tests.server.conftest import Running

TEMPLATE = """\
{%- for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{% endfor %}
{%- if note is defined %}{{ note }}{% endif %}
{%- if add_generation_prompt %}assistant: {% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% elif opened %}<think>
{% endif %}{% endif %}"""
USER: list[dict[str, Any]] = [{"role": "user", "content": "Is it so?"}]
REASONING, TEXT = "Hm.\n\nLet me see: <b>", "Yes, it is."
CHAT, MESSAGES, OLLAMA, GENERATE = "/v1/chat/completions", "/v1/messages", "/api/chat", "/api/generate"
MOST = 200  # tokens of an answer


@pytest.fixture(scope="module", params=[False, True], ids=["words", "special"])
def thinker(demo: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Tokenizer:
    """The embedded model's tokenizer with two markers, words or special tokens, and a template that opens sections."""
    folder = tmp_path_factory.mktemp("thinker")
    backend = Backend.from_file(str(demo / "tokenizer.json"))
    markers = [AddedToken(marker, normalized=False, special=request.param) for marker in ("<think>", "</think>")]
    backend.add_tokens(markers)
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((demo / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def server(thinker: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(tmp_path_factory.mktemp("engine"), thinker, ServerOptions(port=0))
    yield running
    assert running.stop()


@pytest.fixture
def saying(server: Running, thinker: Tokenizer) -> Iterator[Callable[[str], int]]:
    """Has every answer say a text, and then end; returns the number of its tokens."""

    def put(text: str) -> int:
        tokens = thinker.encode(text, add_special_tokens=False)
        assert thinker.eos_id is not None
        server.engine.script = (*tokens, thinker.eos_id)
        return len(tokens)

    yield put
    server.engine.script = ()


def submitted(server: Running) -> Submit:
    command = server.engine.commands[-1]
    assert isinstance(command, Submit)
    return command


def chat(server: Running, **more: Any) -> Any:
    reply = server.post(CHAT, {"messages": USER, "max_tokens": MOST, **more})
    assert reply.status == 200, reply.body
    return reply.json


def section(server: Running, path: str = CHAT, **more: Any) -> ReasoningSection | None:
    """The section that the engine is told of."""
    body = {"messages": USER, **({"max_tokens": 1} if path != OLLAMA else {"options": {"num_predict": 1}}), **more}
    reply = server.post(path, body)
    assert reply.status == 200, reply.body
    return submitted(server).reasoning


@pytest.mark.parametrize("opened", [False, True])
def test_a_chat_has_its_reasoning_apart(
    server: Running, saying: Callable[[str], int], thinker: Tokenizer, opened: bool
) -> None:
    start = "" if opened else "<think>"
    count = saying(f"{start}\n{REASONING}\n</think>\n\n{TEXT}")
    given: dict[str, Any] = {"chat_template_kwargs": {"opened": opened}}
    answer = chat(server, **given)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (REASONING, TEXT)
    reasoned = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    behind = len(thinker.encode(f"\n\n{TEXT}", add_special_tokens=False))
    assert reasoned == count - behind

    reply = server.post(CHAT, {
        "messages": USER, "max_tokens": MOST, "stream": True, "stream_options": {"include_usage": True}, **given,
    })  # fmt: skip
    *chunks, told, _ = reply.events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == REASONING
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoned


def test_reasoning_that_is_cut_off_is_no_text(server: Running, saying: Callable[[str], int]) -> None:
    saying("<think>\nHm, well")
    for more in ({}, {"stream": True}):
        reply = server.post(CHAT, {"messages": USER, "max_tokens": 3, **more})
        said = [each["choices"][0] for each in (reply.events[:-1] if more else [reply.json])]
        told = [each.get("delta", each.get("message")) for each in said]
        assert "".join(each.get("content") or "" for each in told) == ""
        assert "".join(each.get("reasoning_content", "") for each in told) != ""
        assert said[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("more", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_reasoning_may_be_left_out(server: Running, saying: Callable[[str], int], more: dict[str, Any]) -> None:
    saying(f"<think>{REASONING}</think>{TEXT}")
    assert chat(server, **more)["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}


def test_messages_have_a_thinking_block(server: Running, saying: Callable[[str], int]) -> None:
    saying(f"<think>\n{REASONING}\n</think>\n\n{TEXT}")
    body = {"messages": USER, "max_tokens": MOST, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    thinking, text = server.post(MESSAGES, body).json["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", REASONING)
    assert thinking["signature"]
    assert text == {"type": "text", "text": TEXT}

    blocks: list[dict[str, Any]] = []
    for event in server.post(MESSAGES, {**body, "stream": True}).events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            kind = event["delta"].pop("type").removesuffix("_delta")
            blocks[-1][kind] += event["delta"][kind]
    assert blocks == [thinking, text]


def test_messages_without_reasoning_have_a_text_block(server: Running, saying: Callable[[str], int]) -> None:
    saying(TEXT)
    for more in ({}, {"stream": True}):
        reply = server.post(MESSAGES, {"messages": USER, "max_tokens": MOST, **more})
        if more:
            starts = [event for event in reply.events if event["type"] == "content_block_start"]
            assert [event["content_block"]["type"] for event in starts] == ["text"]
        else:
            assert reply.json["content"] == [{"type": "text", "text": TEXT}]


@pytest.mark.parametrize("path", [OLLAMA, GENERATE])
def test_ollamas_answers_have_thinking(server: Running, saying: Callable[[str], int], path: str) -> None:
    saying(f"<think>\n{REASONING}\n</think>\n\n{TEXT}")
    asked = {"messages": USER} if path == OLLAMA else {"prompt": "Is it so?"}
    for streams in (False, True):
        reply = server.post(path, {**asked, "stream": streams, "think": True})
        lines = [json.loads(line) for line in reply.body.splitlines()]
        said = [line["message"] if path == OLLAMA else line for line in lines]
        assert "".join(each.get("thinking", "") for each in said) == REASONING
        assert "".join(each["content" if path == OLLAMA else "response"] for each in said) == TEXT


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"enable_thinking": False}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}),
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"reasoning": {"enabled": False}}),
        (CHAT, {"reasoning": {"effort": "none"}}),
        (CHAT, {"thinking": {"type": "disabled"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (OLLAMA, {"think": False, "stream": False}),
    ],
)
def test_reasoning_is_turned_off_in_each_clients_words(
    server: Running, thinker: Tokenizer, path: str, more: dict[str, Any]
) -> None:
    assert section(server, path, **more) is None
    assert thinker.decode(submitted(server).prompt, False).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("path", "more", "budget"),
    [
        (CHAT, {}, None),
        (CHAT, {"reasoning_effort": "high"}, None),
        (CHAT, {"reasoning_effort": "low"}, 2048),
        (CHAT, {"reasoning_effort": "low", "thinking_token_budget": 9}, 9),
        (CHAT, {"thinking_token_budget": -1}, None),
        (CHAT, {"thinking_budget_tokens": 8}, 8),
        (CHAT, {"thinking_budget": 7, "enable_thinking": True}, 7),
        (CHAT, {"reasoning": {"max_tokens": 6}}, 6),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 5}}, 5),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}, 0),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, None),
        (OLLAMA, {"think": "medium", "stream": False}, 8192),
    ],
)
def test_a_budget_has_many_names(
    server: Running, thinker: Tokenizer, path: str, more: dict[str, Any], budget: int | None
) -> None:
    found = section(server, path, **more)
    if budget is None:
        assert found is None
    else:
        start, end = (thinker.token_to_id(marker) for marker in ("<think>", "</think>"))
        assert found == ReasoningSection(start, end, False, budget)  # type: ignore[arg-type]


def test_a_constraint_begins_behind_the_reasoning(server: Running) -> None:
    asked = {"response_format": {"type": "json_object"}}
    for opened in (False, True):
        found = section(server, **asked, chat_template_kwargs={"opened": opened})
        assert found is not None
        assert (found.opened, found.budget) == (opened, None)
    assert section(server, **asked, enable_thinking=False) is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_conversation_may_have_reasoning(server: Running, thinker: Tokenizer, name: str) -> None:
    again = [*USER, {"role": "assistant", "content": TEXT, name: REASONING}, *USER]
    section(server, messages=again)
    prompt = submitted(server).prompt
    assert f"assistant: <think>\n{REASONING}\n</think>\n\n{TEXT}\n" in thinker.decode(prompt, False)
    block = [{"type": "thinking", "thinking": REASONING, "signature": "x"}, {"type": "redacted_thinking", "data": "x"}]
    block.append({"type": "text", "text": TEXT})
    section(server, MESSAGES, messages=[*USER, {"role": "assistant", "content": block}, *USER])
    assert submitted(server).prompt == prompt


def test_texts_of_template_variables_stay_text(server: Running, thinker: Tokenizer) -> None:
    assert thinker.eos_token is not None
    for path in ("/tokenize", CHAT):
        body = {"messages": USER, "chat_template_kwargs": {"note": f"a{thinker.eos_token}b"}}
        reply = server.post(path, {**body, **({"max_tokens": 1} if path == CHAT else {})})
        ids = reply.json["tokens"] if path == "/tokenize" else submitted(server).prompt
        assert thinker.eos_id not in ids
        assert f"a{thinker.eos_token}b" in thinker.decode(ids, False)
