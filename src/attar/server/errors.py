"""All errors that a request can get: a closed catalogue, in the shapes of the APIs of OpenAI, Anthropic, Ollama and
llama.cpp.

A `APIError` names an entry of the catalogue and has a sentence, written for this purpose, about what was wrong. The
text of exceptions never gets into an answer: it reveals paths, addresses and versions, and has been the first half of
more than one exploit. The engine's message on a failed request is shown only where the catalogue allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Send

from attar.protocol.messages import Failed
from attar.strict_json import shown


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry: HTTP status, OpenAI's type, Anthropic's type, and seconds after which a retry makes sense.

    vain: a retry makes no sense, although clients would retry by the status.
    """

    status: int
    openai: str
    anthropic: str
    retry_after: int | None = None
    vain: bool = False


_INVALID = Kind(400, "invalid_request_error", "invalid_request_error")
_BUSY = Kind(503, "service_unavailable_error", "overloaded_error", 2)

CATALOGUE: dict[str, Kind] = {
    **dict.fromkeys((
        "invalid_json", "invalid_type", "invalid_value", "out_of_range", "invalid_length", "missing_field",
        "unknown_field", "unsupported_field", "empty_prompt", "context_length_exceeded", "no_chat_template",
        "template_error", "invalid_http", "grammar_limit",
    ), _INVALID),
    "invalid_api_key": Kind(401, "authentication_error", "authentication_error"),
    "host_not_allowed": Kind(403, "permission_error", "permission_error"),
    "not_found": Kind(404, "invalid_request_error", "not_found_error"),
    "model_not_found": Kind(404, "invalid_request_error", "not_found_error"),
    "method_not_allowed": Kind(405, "invalid_request_error", "invalid_request_error"),
    "receipt_timeout": Kind(408, "invalid_request_error", "invalid_request_error"),
    "body_too_large": Kind(413, "invalid_request_error", "request_too_large"),
    "target_too_long": Kind(414, "invalid_request_error", "invalid_request_error"),
    "unsupported_media_type": Kind(415, "invalid_request_error", "invalid_request_error"),
    "headers_too_large": Kind(431, "invalid_request_error", "invalid_request_error"),
    "overloaded": Kind(429, "rate_limit_error", "rate_limit_error", 1),
    "rate_limit_exceeded": Kind(429, "rate_limit_error", "rate_limit_error", 1),
    "cancelled": Kind(499, "invalid_request_error", "invalid_request_error"),
    "slow_reader": Kind(499, "invalid_request_error", "invalid_request_error"),
    "internal": Kind(500, "server_error", "api_error"),
    "bad_logits": Kind(500, "server_error", "api_error"),
    "not_implemented": Kind(501, "invalid_request_error", "api_error", vain=True),
    "loading": _BUSY,
    "model_failed": _BUSY,
    "draining": _BUSY,
    "engine_down": _BUSY,
    "busy": _BUSY,
    "loop_detected": Kind(508, "invalid_request_error", "api_error", vain=True),
    "deadline": Kind(503, "service_unavailable_error", "overloaded_error", vain=True),  # it would take as long again
}  # fmt: skip

ANTHROPIC = "/v1/messages"  # prefix of Anthropic's API
OLLAMA = "/api/"  # and of Ollama's
LLAMACPP = frozenset((
    "/completion", "/completions", "/chat/completions", "/chat/completions/input_tokens", "/apply-template",
    "/embedding", "/embeddings", "/props", "/slots",
))  # fmt: skip
"""Paths of llama.cpp's own routes."""
_LLAMACPP_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 500: "server_error",
    501: "not_supported_error", 503: "unavailable_error",
}  # fmt: skip
"""Types of errors there, by status; others are invalid_request_error."""

INTERNAL = "the request failed inside the server; the log has its id"
INVALID_KEY = "send a valid key: Authorization: Bearer KEY"
CANCELLED = "the request was cancelled"
FULL = "the server is full: try again later"

_FAILURES = {  # the engine's code: entry, and our words, or None to show the engine's
    "full": ("overloaded", FULL),
    "too_long": ("context_length_exceeded", None),
    "invalid": ("invalid_value", None),
    "deadline": ("deadline", "the request took longer than the server allows"),
    "bad_logits": ("bad_logits", "the model gave no valid numbers for this prompt"),
    "grammar_limit": ("grammar_limit", None),
    "internal": ("internal", INTERNAL),
    "cancelled": ("cancelled", CANCELLED),
    "key": ("invalid_api_key", INVALID_KEY),
    "shutdown": ("engine_down", "the engine is going down: the request was ended"),
    "slow_reader": ("slow_reader", "the stream was ended because its reader took too little for too long"),
}


class APIError(Exception):
    """An error that answers a request: a `code` of CATALOGUE, a sentence, and the field concerned.

    retry_after: seconds, where they are known better than in the catalogue. beyond: tokens of a prompt that is too
    long, and of the context.
    """

    def __init__(
        self, code: str, message: str, param: str | None = None, *, retry_after: int | None = None,
        beyond: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(code)  # logs get the code: the message may name what the user sent
        self.code, self.message, self.param = code, message, param
        self.kind, self.beyond = CATALOGUE[code], beyond
        self.retry_after = self.kind.retry_after if retry_after is None else retry_after

    @classmethod
    def of(cls, failed: Failed) -> APIError:
        """Translate the engine's failure for the client."""
        code, words = _FAILURES.get(failed.code, _FAILURES["internal"])
        return cls(code, shown(failed.message, 300) if words is None else words)

    def body(self, anthropic: bool = False) -> bytes:
        """Return the error object, as JSON."""
        if anthropic:
            error = {"type": self.kind.anthropic, "message": self.message}
            return msgspec.json.encode({"type": "error", "error": error})
        error_ = {"message": self.message, "type": self.kind.openai, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error_})

    def llamacpp(self) -> bytes:
        """Return llama.cpp's error object, as JSON."""
        status = self.kind.status
        told: dict[str, Any] = {"code": status, "message": self.message, "param": self.param}
        told["type"] = _LLAMACPP_TYPES.get(status, "invalid_request_error")
        if self.beyond is not None:
            tokens, context = self.beyond
            words = f"the request ({tokens} tokens) exceeds the available context size ({context} tokens)"
            told |= {"type": "exceed_context_size_error", "n_prompt_tokens": tokens, "n_ctx": context}
            told["message"] = f"{words}: {self.message}"
        return msgspec.json.encode({"error": told})

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to this status."""
        if self.retry_after is not None:
            return {"Retry-After": str(self.retry_after)}
        if self.kind.vain:
            return {"x-should-retry": "false"}  # clients of both APIs obey it
        return {"WWW-Authenticate": "Bearer"} if self.kind.status == 401 else {}

    async def send(self, path: str, send: Send, allowed: str | None = None) -> None:
        """Answer a request with the error, in the shape of the API at `path`. `allowed`: the methods of the path, for a
        405."""
        body = self.body(anthropic=path.startswith(ANTHROPIC))
        if path.startswith(OLLAMA):
            body = msgspec.json.encode({"error": self.message})
        elif path in LLAMACPP:
            body = self.llamacpp()
        headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        headers += [(name.encode(), value.encode()) for name, value in self.headers().items()]
        headers += [] if allowed is None else [(b"allow", allowed.encode())]
        await send({"type": "http.response.start", "status": self.kind.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
