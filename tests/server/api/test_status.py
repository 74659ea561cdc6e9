"""Routes about the server, and its page without a browser; `test_browser.py` has one."""

from __future__ import annotations

import base64
import hashlib
import http.client
import re
from collections.abc import Callable

import pytest

from tests.server.conftest import Running


def test_the_page_runs_its_own_script_and_nothing_else(server: Running) -> None:
    reply = server.get("/")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/html")
    page = reply.body.decode()
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = reply.headers["content-security-policy"]
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert not re.findall(r"https?://|//cdn|\bon\w+=|innerHTML|eval\(", page)


def test_every_field_of_the_page_has_a_name_for_those_who_cannot_see_it(server: Running) -> None:
    page = server.get("/").body.decode()
    labelled = re.findall(r"<label>(.*?)<input id=\"(\w+)\"", page)
    assert {name for _, name in labelled} == set(re.findall(r"<input id=\"(\w+)\"", page))
    assert all(text.strip() for text, _ in labelled)
    assert 'aria-label="Message"' in page


@pytest.mark.parametrize("path", ["/", "/livez", "/readyz", "/health", "/v1/models", "/v1/models/fake"])
def test_a_balancer_may_ask_for_the_head_alone(start: Callable[..., Running], path: str) -> None:
    made = start()
    connection = http.client.HTTPConnection("127.0.0.1", made.port, timeout=20)

    def ask(method: str) -> tuple[int, dict[str, str], bytes]:
        connection.request(method, path)
        reply = connection.getresponse()
        found = {name.lower(): value for name, value in reply.getheaders()}
        return reply.status, {name: found.get(name, "") for name in ("content-type", "content-length")}, reply.read()

    def agree(status: int) -> None:
        """All over one connection: a body that came all the same would be taken for the next answer."""
        for _ in range(2):
            whole, head = ask("GET"), ask("HEAD")
            assert head == (status, whole[1], b"")
            assert whole[0] == status
            assert whole[2]

    agree(200)
    if path in ("/readyz", "/health"):
        made.call(lambda: setattr(made.engine, "beats", False))
        made.call(lambda: setattr(made.engine, "held", True))
        made.wait(lambda: made.get(path).status == 503)
        agree(503)
    refused = made.request("DELETE", path)
    assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
    connection.close()
