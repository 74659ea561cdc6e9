"""The page to chat with the model and to watch the engine, and its content security policy."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources

PAGE = importlib.resources.files("attar.server.pages").joinpath("chat.html").read_bytes()


def _policy(page: bytes) -> str:
    """Return the policy: the page may run its own script, and connect to this server."""
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


POLICY = _policy(PAGE)
