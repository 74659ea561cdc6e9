"""Chat templates: the same text as transformers, and no template that can do harm."""

from __future__ import annotations

import datetime
import json
import os
import select
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from attar.protocol.framing import frame
from attar.text import limited_child
from attar.text import template as module
from attar.text.template import MAX_TEMPLATE, TemplateError, reads, render_chat
from tests.errors import user_error
from tests.text.hostile_templates import BIG, SLOW, WALKS

SLACK = 2.0  # seconds: a busy machine replacing the child
RESIDENT_GROWTH = 8 << 20  # bytes

USER = {"role": "user", "content": "  What is <b>2 + 2</b> & why? 'é' 👩\u200d👩\u200d👧\n"}
REPLY = {"role": "assistant", "content": "Four."}
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, REPLY, USER],
    "all": [SYSTEM, USER, REPLY, USER],
    "wrong order": [REPLY, USER],
}
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError)  # what a template may raise, in transformers
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "a < b & 'c'", "parameters": {"type": "object", "properties": {}}},
    }
]


def oracle(template: str, messages: list[dict[str, Any]], **values: Any) -> str:
    backend = Backend(models.WordLevel({"x": 0}))  # nothing is encoded with it
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    values.setdefault("add_generation_prompt", True)
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **values)
    assert isinstance(text, str)
    return text


def ours(template: str, messages: list[dict[str, Any]], **values: Any) -> str:
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **values)


def same(template: str, messages: list[dict[str, Any]], **values: Any) -> bool:
    """Both render the same text (True), or both refuse (False)."""
    try:
        expected = oracle(template, messages, **values)
    except TEMPLATE_ERRORS:
        with pytest.raises(TemplateError):
            ours(template, messages, **values)
        return False
    assert ours(template, messages, **values) == expected
    return True


def test_published_templates_render_as_in_transformers(shared: Path) -> None:
    paths = sorted((shared / "tokenizers" / "chat_templates").glob("*.jinja"))
    assert len(paths) == 18
    for path in paths:
        template = path.read_text()
        rendered = [same(template, messages) for messages in CONVERSATIONS.values()]
        assert rendered[0], path.name
        assert same(template, CONVERSATIONS["turns"], add_generation_prompt=False)


@pytest.mark.parametrize("name", ["llama3", "qwen2.5"])
def test_templates_of_tokenizer_configs(shared: Path, name: str) -> None:
    config = json.loads((shared / "tokenizers" / name / "tokenizer_config.json").read_text())
    template = config["chat_template"]
    call = {"name": "add", "arguments": {"a": 1, "b": "ü<"}}
    calls = [USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}]
    calls.append({"role": "tool", "content": "3"})
    for messages in (*CONVERSATIONS.values(), calls):
        for tools in (None, TOOLS):
            same(template, messages, tools=tools, date_string="26 Jul 2024")
    assert same(template, calls, tools=TOOLS, date_string="26 Jul 2024")


FEATURES = [
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true) }}",
    "{{ messages[0].content | trim | upper | replace('A', 'B') }}|{{ messages | length }}",
    "{{ tools is none }} {{ documents is none }} {{ tools is defined }} {{ missing is defined }} {{ missing }}",
    "  {% if true %}\n  x\n  {% endif %}\n y \n",
    "{%- macro show(m) -%}<{{ m.role }}>{%- endmacro -%}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "{{ messages[-1]['content'].strip().split(' ')[0] }}{{ messages[::-1][0].role }}{{ dict(a=1).a }}",
    "{{ bos_token + eos_token }}{{ '%s-%05d' | format('a', 42) }}{{ 'x' * 3 }}{{ 'é\\n\\u00e9' }}",
    "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}",
    "{{ messages | map(attribute='role') | join }}{{ messages | selectattr('role', 'eq', 'user') | list | count }}",
    "{{ [1, 2] | pprint }} {{ 'a b' | urlencode }} {{ 'Hi' | indent(2) }} {{ range(3) | list }}",
    "{{ raise_exception('no ' + messages[0].role) }}",
]


@pytest.mark.parametrize("template", FEATURES)
def test_features_of_templates_as_in_transformers(template: str) -> None:
    same(template, CONVERSATIONS["turns"], enable_thinking=False)


def test_missing_special_tokens_are_undefined_not_none() -> None:
    template = "[{{ bos_token }}|{{ eos_token is defined }}]"
    assert render_chat(template, [USER], bos_token=None, eos_token=None) == "[|False]"


def test_the_date_is_the_callers_and_now_by_default() -> None:
    template = "{{ strftime_now('%d %b %Y %H:%M') }}"
    before = datetime.datetime.now().replace(second=0, microsecond=0)
    assert before <= datetime.datetime.strptime(ours(template, []), "%d %b %Y %H:%M") <= datetime.datetime.now()
    assert ours(template, [], date=datetime.date(2026, 1, 2)) == "02 Jan 2026 00:00"


def test_a_templates_own_error_is_told() -> None:
    with user_error("template_failed"):
        ours("{{ raise_exception('roles must alternate') }}", [USER])
    with user_error("template_failed"):
        ours("x\n{% for %}", [USER])


NO_JSON: list[Any] = [{1, 2}, 1j, b"x", "\ud800"]


@pytest.mark.parametrize("value", NO_JSON, ids=repr)
def test_refuses_what_is_not_json(value: Any) -> None:
    with user_error("template_failed"):
        ours("x", [{"role": "user", "content": value}])


@pytest.mark.parametrize("message", ["hi", {"content": "hi"}, {"role": 1}, None], ids=repr)
def test_refuses_what_is_not_a_message(message: Any) -> None:
    with user_error("template_failed"):
        ours("x", [message])


# Hostile templates. All must fail, soon, without the caller's memory growing, and the next render must work.


def _refused(attack: str) -> str:
    before = _resident()
    start = time.perf_counter()
    with pytest.raises(TemplateError) as caught:
        ours(attack, [USER])
    assert time.perf_counter() - start < limited_child.STARVED_SECONDS + SLACK
    assert _resident() - before < RESIDENT_GROWTH
    assert ours("{{ messages[0].role }}", [USER]) == "user"
    sentence = str(caught.value)
    assert 0 < len(sentence) < 500
    assert "\n" not in sentence
    assert "/" not in sentence.replace("/etc/passwd", "").replace("'/'", ""), "a path of this machine"
    return sentence


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("attack", [*WALKS, *BIG], ids=lambda attack: attack[:40])
def test_refuses_hostile_templates(attack: str) -> None:
    _refused(attack)


@pytest.mark.parametrize("attack", SLOW, ids=lambda attack: attack[:40])
def test_refuses_endless_templates(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "RENDER_SECONDS", 0.3)
        with user_error("template_failed"):
            ours(attack, [USER])
    assert ours("{{ messages[0].role }}", [USER]) == "user"


@pytest.mark.parametrize(
    ("attack", "sentence"),
    [
        ("{{ 'A' * 10**9 }}", "needs more than 256 MiB of memory"),
        ("{% for i in range(4200) %}{{ 'A' * 1000 }}{% endfor %}", "writes more than 4 MiB"),
        ("A" * (MAX_TEMPLATE + 1), "larger than 1 MiB"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{{ 'a'.encode().decode('zlib') }}", "may not open files"),
    ],
)
def test_the_limit_is_named(attack: str, sentence: str) -> None:
    assert sentence in _refused(attack)


def test_text_up_to_the_limit_passes() -> None:
    assert len(ours("{% for i in range(4194) %}{{ 'A' * 1000 }}{% endfor %}", [])) == 4_194_000


def test_state_does_not_pass_from_one_render_to_the_next() -> None:
    ours("{% set x = 'secret' %}{% set ns = namespace(y='secret') %}{{ x }}{{ messages[0].content }}", [USER])
    assert ours("[{{ x }}{{ ns }}{{ messages | length }}]", []) == "[0]"


def test_processor_time_is_limited_without_the_parents_deadline() -> None:
    """The child must not outlive a parent that died while it was busy."""
    child = module._renderer.spawn()
    body = json.dumps({"template": SLOW[0], "variables": {}, "date": "2024-07-26"}).encode()
    assert child.stdin is not None
    child.stdin.write(frame(body))
    child.stdin.flush()
    assert child.wait(timeout=60) == -signal.SIGXCPU
    child.communicate()


def test_the_child_ends_with_its_input() -> None:
    child = module._renderer.spawn()
    child.communicate()
    assert child.returncode == 0


def test_the_child_can_open_no_file_and_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTAR_SECRET", "canary")
    child = module._renderer.spawn()
    environment = Path(f"/proc/{child.pid}/environ").read_bytes()
    limits = Path(f"/proc/{child.pid}/limits").read_text()
    child.kill()
    child.communicate()
    assert b"canary" not in environment
    rows = {line[:26].strip(): line[26:].split()[:2] for line in limits.splitlines()[1:]}
    assert rows["Max open files"] == ["3", "3"]
    assert rows["Max file size"] == ["0", "0"]
    assert int(rows["Max address space"][1]) < 1 << 30


def test_a_killed_child_is_replaced() -> None:
    assert ours("a", []) == "a"
    child = module._renderer._child
    assert child is not None
    child.kill()
    child.wait()
    assert ours("b", []) == "b"


def test_a_child_that_was_started_early_renders() -> None:
    module._renderer.close()
    module.warm()
    child = module._renderer._child
    assert child is not None
    module.warm()
    assert ours("a", []) == "a"
    assert module._renderer._child is child


def test_one_that_cannot_be_started_is_told_of_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise TemplateError("no child")

    module._renderer.close()
    monkeypatch.setattr(module._renderer, "spawn", start)
    module.warm()
    with user_error("template_failed"):
        ours("a", [])


def test_threads_get_their_own_answers() -> None:
    answers: dict[int, str] = {}

    def work(number: int) -> None:
        answers[number] = ours("{{ messages[0].content }}", [{"role": "user", "content": str(number)}])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: str(number) for number in range(16)}


def test_a_good_template_on_a_busy_machine_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that renders is stopped for longer than a render may take."""
    assert ours("a", []) == "a"
    child = module._renderer._child
    assert child is not None
    monkeypatch.setattr(module, "RENDER_SECONDS", 0.1)
    monkeypatch.setattr(limited_child, "STARVED_SECONDS", 600.0)
    os.kill(child.pid, signal.SIGSTOP)
    going_on = threading.Timer(0.5, os.kill, (child.pid, signal.SIGCONT))
    going_on.start()
    assert ours("b", []) == "b"
    going_on.join()
    assert module._renderer._child is child


def test_a_process_that_is_ended_from_outside_is_not_called_slow() -> None:
    assert ours("a", []) == "a"
    child = module._renderer._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    ending = threading.Timer(0.2, child.kill)
    ending.start()
    with user_error("template_failed"):
        ours("b", [])
    ending.join()
    assert ours("c", []) == "c"


def test_a_forked_process_does_not_read_the_parents_answers() -> None:
    assert ours("a", []) == "a"
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child reports and leaves without running the test session's own exit
        try:
            os.write(write, ours("b", []).encode())
            module._renderer.close()
        finally:
            os._exit(0)
    os.close(write)
    try:
        assert select.select([read], [], [], 60)[0], "it hangs"
        assert os.read(read, 10) == b"b"
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert ours("c", []) == "c"


def test_a_large_conversation_passes() -> None:
    long = "é" * (1 << 20)
    assert len(ours("{{ messages[0].content }}", [{"role": "user", "content": long}])) == 1 << 20
    with user_error("template_failed"):
        ours("x", [{"role": "user", "content": long * 9}])


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content TRIM }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize("trim", ["", "| trim"])
@pytest.mark.parametrize("said", ["Once upon", "Once upon ", "  a", "en", "assistant", "", "a\n", "\ufdef"])
def test_a_last_message_is_continued_as_in_transformers(trim: str, said: str) -> None:
    template = CHATML.replace("TRIM", trim) + OPENING
    messages = [USER, {"role": "assistant", "content": said}]
    text = ours(template, messages, continue_final_message=True)
    wanted = oracle(template, messages, continue_final_message=True, add_generation_prompt=False)
    assert text == wanted
    assert text.endswith("assistant\n" + (said.strip() if trim else said)) or not said
    assert messages[-1]["content"] == said  # the caller's own stays


def test_texts_in_parts_are_continued_too() -> None:
    template = "{% for m in messages %}[{% for part in m.content %}{{ part.text }}{% endfor %}]{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ours(template, [{"role": "assistant", "content": parts}], continue_final_message=True) == "[ab"


def test_what_cannot_be_continued_is_said() -> None:
    with user_error("template_failed", "leaves out the last message"):
        ours("{{ messages[0].content }}", [USER, REPLY], continue_final_message=True)
    for messages in ([], [{"role": "assistant", "content": None}], [{"role": "assistant", "content": [{"a": "b"}]}]):
        with user_error("template_failed", "no text"):
            ours("{{ messages }}", messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% if enable_thinking is false %}x{% endif %}", True),
        ("{%- if (enable_thinking) %}x{% endif %}", True),
        ("{{ message.enable_thinking }}{{ message['enable_thinking'] }}", False),
        ("{{ enable_thinking_now }}", False),
        ("", False),
    ],
)
def test_a_template_reads_the_variables_that_it_names(template: str, found: bool) -> None:
    assert reads(template, "enable_thinking") is found
