"""How conversations end: in a turn that is opened, in one that has ended, or in a message that the answer continues."""

from __future__ import annotations

from typing import Any

from tests.server.conftest import Running

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SAID = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once upon"}]


def tokens(server: Running, **fields: Any) -> list[int]:
    found: list[int] = server.post("/tokenize", fields).json["tokens"]
    return found


def test_an_answer_continues_the_last_message(server: Running) -> None:
    wanted = tokens(server, prompt="<|endoftext|>a\n\nOnce upon", add_special_tokens=False)
    assert tokens(server, messages=SAID, continue_final_message=True, add_generation_prompt=False) == wanted
    assert tokens(server, messages=SAID) != wanted
    for path, more in ((CHAT, {"continue_final_message": True}), (MESSAGES, {})):
        reply = server.post(path, {"messages": SAID, "max_tokens": 4, **more})
        assert reply.status == 200
        assert server.engine.commands[-1].prompt == tuple(wanted), path
    counted = server.post("/v1/messages/count_tokens", {"messages": SAID}).json["input_tokens"]
    assert counted == len(wanted)


def test_special_tokens_stay_text_in_a_message_that_is_continued(server: Running) -> None:
    said = [SAID[0], {"role": "assistant", "content": "x<|endoftext|>y"}]
    found = tokens(server, messages=said, continue_final_message=True)
    assert found.count(server.server.prompts.tokenizer.eos_id) == 1  # the template's own
    assert server.post("/detokenize", {"tokens": found}).json["prompt"].endswith("x<|endoftext|>y")
