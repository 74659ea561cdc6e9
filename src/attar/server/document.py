"""The OpenAPI document, made of the types that requests are read by, so that it cannot promise anything else."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from attar.server.errors import CATALOGUE
from attar.server.schemas import Body

_BODIES: dict[str, type[Body]] = {}

_ERROR = {
    "title": "Error",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"enum": sorted(CATALOGUE)},
            },
        }
    },
}


def taking(kind: type[Body], streams: bool = False) -> dict[str, Any]:
    """What a route that reads `kind` adds to its entry; `streams`: it may answer with server-sent events."""
    _BODIES[kind.__name__] = kind
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    found: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    if streams:
        found["responses"] = {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
    return found


def document(app: FastAPI) -> dict[str, Any]:
    """The document of `app`'s routes."""
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, components = msgspec.json.schema_components(_BODIES.values(), ref_template="#/components/schemas/{name}")
        for name, kind in _BODIES.items():
            for field, harmless in kind.unbuilt.items():
                components[name]["properties"][field] = {"enum": [None, *harmless]}
        made["components"] = {"schemas": {**components, "Error": _ERROR}}
        for path in made["paths"].values():
            for method, operation in path.items():
                _add_errors(operation, posting=method == "post")
        app.openapi_schema = made
    return app.openapi_schema


def _add_errors(operation: dict[str, Any], posting: bool) -> None:
    operation["responses"].pop("422", None)  # FastAPI's own validation, which nothing here uses
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    statuses = [400, 401, 403, 404, 408, 414, 431, 500, 503] + ([411, 413, 415, 429] if posting else [])
    for status in statuses:
        codes = sorted(code for code, kind in CATALOGUE.items() if kind.status == status)
        operation["responses"][str(status)] = {"description": " or ".join(codes), "content": content}
