"""What the application answers where no route does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.server.conftest import Running


def test_what_is_not_there_is_told_with_what_is(start: Callable[..., Running]) -> None:
    server = start(adapters=tuple(f"a{number}" for number in range(20)))

    def says(method: str, path: str, body: Any = None, **headers: str) -> str:
        return str(server.request(method, path, body, headers).json["error"]["message"])

    assert "did you mean /chat/completions?" in says("POST", "/chat/completion", {})
    assert "did you mean /v1/chat/completions?" in says("POST", "/v1/v1/chat/completions", {})
    assert "did you mean /v1/completions?" in says("POST", "/v1/completion", {})
    assert "/openapi.json" in says("GET", "/admin")
    assert says("DELETE", "/v1/models") == "/v1/models takes GET, HEAD, not DELETE"
    assert "?" in says("GET", "/a%00b")
    unknown = says("POST", "/v1/completions", {"prompt": "a"} | {"model": "gpt-4o"})
    assert "gpt-4o is not served here, but fake, a0," in unknown
    assert "a8" not in unknown
    host = says("GET", "/v1/models", Host="host.docker.internal:80")
    assert "--allowed-host host.docker.internal" in host
