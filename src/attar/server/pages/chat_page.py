"""The chat page as the server gives it: one HTML file made of the parts in `chat/`, which loads nothing.

`markdown.js` draws answers and `inline.js` their text, `store.js` keeps conversations in the browser, `chat.js` talks,
and `engine.js` watches.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources

SCRIPTS = ("inline", "markdown", "store", "chat", "engine", "start")
"""The parts of the page's script, in their order."""


def _read(name: str) -> str:
    return importlib.resources.files("attar.server.pages").joinpath("chat", name).read_text(encoding="utf-8")


_SCRIPT = '\n"use strict";\n' + "".join(_read(f"{name}.js") for name in SCRIPTS)
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

PAGE = _read("page.html").replace("@STYLE@", _read("style.css")).replace("@SCRIPT@", _SCRIPT).encode()
"""The page to chat with the model and to watch the engine."""

POLICY = (
    f"default-src 'none'; script-src 'sha256-{_DIGEST}'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page's content security policy: it may run its own script, show images that it holds, and connect to this server.
"""
