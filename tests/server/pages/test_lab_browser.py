"""The lab of a running server in a real browser: key, engine state, and the caller's requests, by keyboard."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator

import pytest

from attar.server.http.security import Keys
from attar.server.options import ServerOptions
from tests.lab.browser import Browser, need_chromium
from tests.server.conftest import Running

KEY = "a-key-" + "k" * 32
HOSTILE = "</script><img src=x onerror=alert(1)>\u202e<!--"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    need_chromium()
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_a_key_is_asked_for_and_then_the_state_is_shown(browser: Browser, start: Callable[..., Running]) -> None:
    server = start(ServerOptions(keys=Keys.of([KEY])), step=0.05, batch=2, name=HOSTILE)
    browser.show(1280)
    browser.open(f"http://127.0.0.1:{server.port}/lab#paging")
    browser.until("!document.getElementById('login').hidden")
    assert browser.run("heard") == ""
    body = json.dumps({"prompt": "a b c", "max_tokens": 400, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", "/v1/completions", body, headers)
    reply = connection.getresponse()
    browser.press("Tab", "Tab")  # past the link that skips
    assert browser.run("document.activeElement.id") == "key"
    browser.type(KEY)
    browser.press("Enter")
    browser.until("document.getElementById('login').hidden && data.sequences && data.sequences.length === 1")
    browser.until("document.getElementById('figures').textContent.includes('blocks now')")
    assert browser.run("data.sequences[0].id") == reply.headers["x-request-id"]
    assert browser.run("data.engine.ready.model") == HOSTILE
    # A stepper keeps its place while the engine's state comes in.
    browser.run("[...document.querySelectorAll('figure button')].find(e => e.textContent === 'Step').click()")
    first = browser.run("data.sequences[0].tokens")
    browser.until(f"data.sequences.length && data.sequences[0].tokens > {first}")
    assert browser.run("document.querySelector('figure .unit').textContent.trim()") == "step 2 of 5"
    connection.close()
    browser.until("data.sequences.length === 0")
    own = f"http://127.0.0.1:{server.port}/"
    assert all(each.startswith(own) for each in browser.requests)
    assert not [each for each in browser.errors if "401" not in each]
    assert browser.run("document.scripts.length") == 2


def test_a_value_survives_the_polls(browser: Browser, start: Callable[..., Running]) -> None:
    server = start()
    browser.errors.clear()
    browser.open(f"http://127.0.0.1:{server.port}/lab#speculation?K=7")
    browser.until("heard !== ''")
    browser.run("document.getElementById('c-K').focus()")
    browser.press("ArrowRight")
    heard = browser.run("heard")
    server.post("/v1/completions", {"prompt": "a b", "max_tokens": 3})
    browser.until(f"heard !== {json.dumps(heard)}")
    assert browser.run("[values.K, document.activeElement.id]") == [8, "c-K"]
    assert browser.errors == []
