"""The page at `/`, without a browser; `test_browser.py` has one."""

from __future__ import annotations

import base64
import hashlib
import re

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
