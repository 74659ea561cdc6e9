"""Images of every API reach the engine as tiles, are counted, and harm nothing."""

from __future__ import annotations

import base64
import http.client
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attar.images.decoding import ImageSource, decode
from attar.images.messages import MARK, in_parts
from attar.images.placeholders import Placeholders
from attar.images.settings import ImageSettings, read_settings
from attar.protocol.messages import Submit
from attar.server import images
from attar.server.http.limits import MAX_BODY, MAX_IMAGE_BODY
from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from attar.text.template import lists_only
from attar.text.tokenizer import Tokenizer
from tests.images import oracle

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
from tests.images import hostile
from tests.images.test_decoding import BAD_URLS, file, picture
from tests.images.test_placeholders import backend
from tests.server.conftest import Reply, Running, starting

ANSWERED = 2.5  # seconds on a machine that runs other tests too
LISTS = (  # SmolVLM's: it leaves out content that is a text
    "{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]['type'] == 'image' %}"
    "{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
EITHER = (  # Qwen2-VL's way
    "{% for message in messages %}{{ message['role'] }}\n{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}"
)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FIRST, SECOND = file(picture(100, 37)), file(picture(31, 65, 1), "JPEG")
TEXT = "What is this?"


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def vision(template: str = LISTS) -> Tokenizer:
    return Tokenizer(backend(), "<s>", "</s>", {"default": template})


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ImageSettings:
    found = read_settings(oracle.write("smolvlm", tmp_path_factory.mktemp("model")))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def serve(settings: ImageSettings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Running]]:
    with starting(vision(), tmp_path_factory) as make:

        def start(options: dict[str, Any] | None = None, **engine: Any) -> Running:
            found = ServerOptions(port=0, images=settings, **(options or {}))
            return make(found, **{"images": True, "context": 4096, **engine})

        yield start


@pytest.fixture(scope="module")
def seeing(serve: Callable[..., Running]) -> Running:
    return serve()


def last(running: Running) -> Submit:
    command = running.engine.commands[-1]
    assert isinstance(command, Submit)
    return command


def bodies() -> list[tuple[str, dict[str, Any], str | None]]:
    """Return the same conversation in every API, with the route that counts its tokens."""
    first, second = url(FIRST), url(SECOND, "jpeg")
    parts = [
        {"type": "image_url", "image_url": {"url": first}}, {"type": "image_url", "image_url": second},
        {"type": "text", "text": TEXT},
    ]  # fmt: skip
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": f"image/{kind}", "data": base64_of(data)}}
        for kind, data in (("png", FIRST), ("jpeg", SECOND))
    ]
    bare = [base64_of(FIRST), base64_of(SECOND)]
    items = [
        {"type": "input_image", "image_url": first}, {"type": "input_image", "image_url": second, "detail": "auto"},
        {"type": "input_text", "text": TEXT},
    ]  # fmt: skip
    chat = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    return [
        (CHAT, chat, "/chat/completions/input_tokens"),
        ("/chat/completions", chat, "/tokenize"),
        (MESSAGES, {"messages": [{"role": "user", "content": [*blocks, {"type": "text", "text": TEXT}]}],
                    "max_tokens": 2}, "/v1/messages/count_tokens"),
        (RESPONSES, {"input": [{"role": "user", "content": items}], "max_output_tokens": 2}, None),
        ("/api/chat", {"messages": [{"role": "user", "content": TEXT, "images": bare}], "stream": False,
                       "options": {"num_predict": 2}}, None),
        ("/api/generate", {"prompt": TEXT, "images": bare, "stream": False, "options": {"num_predict": 2}}, None),
    ]  # fmt: skip


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("path, body, counts", bodies(), ids=[path for path, _, _ in bodies()])
def test_images_of_every_api_reach_the_engine(
    path: str, body: dict[str, Any], counts: str | None, seeing: Running, settings: ImageSettings
) -> None:
    reply = seeing.post(path, body)
    assert reply.status == 200, reply.body
    command = last(seeing)
    made = decode(settings, [ImageSource.of_bytes(FIRST), ImageSource.of_bytes(SECOND)])
    assert command.images == made
    places = Placeholders(settings, seeing.server.prompts.tokenizer)
    text = places.expand(f"User:<image><image>{TEXT}</s>\nAssistant:", made)
    assert command.prompt == tuple(vision().encode_chat(text))
    assert command.prompt.count(settings.image_token) == sum(each.rows for each in made)
    if counts is not None:
        asked = {name: value for name, value in body.items() if name == "messages"}
        counted = seeing.post(counts, asked)
        assert counted.status == 200, counted.body
        assert len(command.prompt) in (counted.json.get("input_tokens"), counted.json.get("count"))
    if "usage" in reply.json:
        usage = reply.json["usage"]
        asked_for = usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0)
        assert len(command.prompt) == usage.get("prompt_tokens", asked_for)


def test_bytes_are_held_as_long_as_a_request(seeing: Running) -> None:
    reader = seeing.server.images
    assert reader is not None
    seeing.engine.held = True
    connection = http.client.HTTPConnection("127.0.0.1", seeing.port, timeout=60)
    connection.request("POST", CHAT, said(image(FIRST)), {"Content-Type": "application/json"})
    seeing.wait(lambda: reader.held > 0 and reader.waiting == 0)
    seeing.engine.held = False
    seeing.call(seeing.engine._work.set)
    assert connection.getresponse().status == 200
    connection.close()
    seeing.wait(lambda: reader.held == 0)


def said(*parts: Any, role: str = "user") -> bytes:
    import json

    return json.dumps({"messages": [{"role": role, "content": list(parts)}], "max_tokens": 1}).encode()


def image(data: bytes, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data, kind)}}


def picture_file(side: int) -> bytes:
    """Return a square picture as a PNG, of nearly 3 bytes a pixel."""
    return file(picture(side, side))


def word(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def test_a_text_that_spells_the_image_token_stays_text(seeing: Running, settings: ImageSettings) -> None:
    assert seeing.post(CHAT, said(word("<image>"), image(FIRST), word("<image><row_1_col_1>"))).status == 200
    command = last(seeing)
    assert command.prompt.count(settings.image_token) == command.images[0].rows
    assert seeing.post(CHAT, said(word("<image>"))).status == 200
    assert settings.image_token not in last(seeing).prompt


def test_texts_reach_a_template_that_takes_lists_alone(seeing: Running) -> None:
    assert lists_only(LISTS)
    assert not lists_only(EITHER)
    assert seeing.post(CHAT, {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}).status == 200
    assert last(seeing).prompt == tuple(vision().encode_chat(f"User: {TEXT}</s>\nAssistant:"))


def test_content_is_parted_at_its_marks() -> None:
    assert in_parts("a") == "a"
    assert in_parts("a", always=True) == [word("a")]
    assert in_parts("", always=True) == [word("")]
    shown = {"type": "image"}
    assert in_parts(f"{MARK}a{MARK}{MARK}b") == [shown, word("a"), shown, shown, word("b")]


@pytest.mark.parametrize("name", hostile.CORPUS)
def test_a_hostile_image_is_answered_and_harms_nothing(name: str, seeing: Running) -> None:
    make, code = hostile.CORPUS[name]
    data = make()
    kind = {b"\xff\xd8": "jpeg", b"RI": "webp"}.get(data[:2], "png")
    began = time.monotonic()
    reply = seeing.post(CHAT, said(image(data, kind), word("?")))
    assert time.monotonic() - began < ANSWERED
    assert reply.status == (200 if code is None else 400), reply.body
    canary(seeing)


def canary(running: Running) -> None:
    assert running.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).status == 200
    reader = running.server.images
    assert reader is not None
    running.wait(lambda: reader.held == 0 and reader.waiting == 0)


@pytest.mark.parametrize("given", BAD_URLS, ids=lambda given: given[:24])
def test_no_url_is_fetched(given: str, seeing: Running) -> None:
    reply = seeing.post(CHAT, said({"type": "image_url", "image_url": {"url": given}}))
    assert (reply.status, reply.code) == (400, "invalid_value"), reply.body
    assert len(reply.body) < 500
    for scheme in ("http:", "https:", "file:"):
        if given.lower().startswith(scheme):
            assert scheme in reply.json["error"]["message"]


def test_an_image_has_its_place_and_its_number(seeing: Running) -> None:
    tiny = image(file(picture(4, 4)))
    for role in ("system", "assistant"):
        assert seeing.post(CHAT, said(tiny, role=role)).code == "invalid_value"
    reply = seeing.post(CHAT, said(*[tiny] * 9))
    assert (reply.status, reply.code) == (400, "invalid_length")
    assert "8" in reply.json["error"]["message"]
    assert seeing.post(CHAT, said(*[tiny] * 8)).status == 200
    assert seeing.post(CHAT, said(*[tiny] * 100)).status == 400
    wrong = seeing.post(CHAT, said(image(FIRST, "webp")))
    assert (wrong.status, "PNG" in wrong.json["error"]["message"]) == (400, True)


def declared(running: Running, path: str, length: int) -> int:
    """Return the status of a request that declares a body of this length, and sends none of it."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    connection.putrequest("POST", path)
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(length))
    connection.endheaders()
    status = connection.getresponse().status
    connection.close()
    return status


def test_large_bodies_are_for_images_of_models_that_take_them(seeing: Running, server: Running) -> None:
    body = said(image(picture_file(1900)))
    assert MAX_BODY < len(body) < MAX_IMAGE_BODY
    assert seeing.post(CHAT, body).status == 200
    assert declared(seeing, "/v1/completions", len(body)) == 413
    assert declared(server, CHAT, len(body)) == 413
    reply = server.post(CHAT, said(image(FIRST)))
    assert (reply.status, reply.code) == (400, "unsupported_field")
    assert "takes no images" in reply.json["error"]["message"]
    assert declared(seeing, CHAT, MAX_IMAGE_BODY + 1) == 413
    canary(seeing)


def test_a_large_body_comes_after_its_key(serve: Callable[..., Running]) -> None:
    key = "k" * 32
    running = serve(options={"keys": Keys.of([key])})
    body = said(image(picture_file(1300)))
    assert len(body) > MAX_BODY
    try:
        status = running.post(CHAT, body).status
    except ConnectionError:  # it was refused before it had come
        status = 401
    assert status == 401
    assert running.post(CHAT, body, {"Authorization": f"Bearer {key}"}).status == 200


@pytest.mark.parametrize("name, most", [("MAX_WAITING", 0), ("MAX_HELD", 100), ("MAX_HELD", len(FIRST) * 2)])
def test_images_that_there_is_no_room_for_are_refused(
    name: str, most: int, seeing: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, name, most)
    reply: Reply = seeing.post(CHAT, said(image(FIRST)))
    assert (reply.status, reply.code) == (429, "overloaded")
    monkeypatch.undo()
    canary(seeing)


def test_an_engine_that_takes_no_images_says_why(serve: Callable[..., Running]) -> None:
    running = serve(images=False, no_images="--tp 2 splits no vision tower")
    reply = running.post(CHAT, said(image(FIRST)))
    assert (reply.status, reply.code) == (400, "unsupported_field")
    assert "--tp 2" in reply.json["error"]["message"]
    assert running.post(CHAT, said(word("hi"))).status == 200


def test_a_stored_answer_goes_on_from_its_image(serve: Callable[..., Running], settings: ImageSettings) -> None:
    running = serve(options={"response_store": 1 << 24})
    shown = [{"role": "user", "content": [{"type": "input_image", "image_url": url(FIRST)}]}]
    first = running.post(RESPONSES, {"input": shown, "max_output_tokens": 1}).json
    listed = running.get(f"{RESPONSES}/{first['id']}/input_items").json["data"]
    assert listed[0]["content"] == [{"type": "input_image", "image_url": url(FIRST), "detail": "auto"}]
    more = {"previous_response_id": first["id"], "input": "and?", "max_output_tokens": 1}
    assert running.post(RESPONSES, more).status == 200
    assert last(running).images == decode(settings, [ImageSource.of_bytes(FIRST)])


def test_a_folder_without_images_has_no_settings(tmp_path: Path) -> None:
    assert read_settings(tmp_path) is None
    oracle.put(tmp_path / "config.json", {"model_type": "llama"})
    assert read_settings(tmp_path) is None
    assert read_settings(tmp_path / "config.json") is None
