"""The OpenAPI document, made of the types by which requests are read and answers described.

Two things that the types cannot express are added: rules between fields (`rules.py`), and what depends on the served
model, whose name and vocabulary the document has once it is loaded. The document is exact: a body that fits it is
accepted, any other is refused, and schemathesis tests that. Some limits have no schema. Whether a constraint can be
kept is known once it is compiled. That a request has one at most, and then no `ignore_eos` or `min_tokens`, is said in
words: generators of test cases give up on rules of eight fields. So are `n_predict` beside `max_tokens`,
`add_generation_prompt` beside `continue_final_message`, and `guided_whitespace_pattern` without `guided_json`:
generators give up on a fifth rule of a chat's 120 fields. The same holds for tools that may be called. Their names
differ, a call is required of some alone, a choice names one of them, their size in bytes is bounded, and results belong
to calls. A prompt's length is counted in tokens, so a text that fits here may exceed the model's context, or have more
log probabilities than an answer may hold. A stop string's length is counted in bytes, and stated here in characters of
the widest kind, so one of mixed widths may be longer than stated. The number of lists, objects and keys in a body
(`strict_json.MAX_PARTS`) is described in words. Integers have 64 bits, also in fields whose values are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from attar.protocol.messages import Ready
from attar.server.api.body import Body
from attar.server.api.dialects.answers import OllamaError
from attar.server.api.dialects.llamacpp.answers import NativeError
from attar.server.api.dialects.llamacpp.fields import NAMED_BIASES
from attar.server.api.images.document import describe_images
from attar.server.api.openapi.examples import EXAMPLES
from attar.server.api.openapi.rules import REF, Schema, add_rules, parts
from attar.server.api.response_types import anthropic as anthropic_types
from attar.server.api.response_types import openai as openai_types
from attar.server.api.response_types.answer import Answer
from attar.server.api.schemas import MAX_CHOICES
from attar.server.errors import ANTHROPIC, CATALOGUE, LLAMACPP, OLLAMA
from attar.server.http.middleware import OPEN_TO_ALL
from attar.server.options import pattern

_BODIES: dict[str, type[Body]] = {}
_ANSWERS: set[type[Answer]] = {
    openai_types.Error, anthropic_types.AnthropicError, OllamaError, NativeError
}  # fmt: skip

_NAMED: Schema = {"X-Request-Id": {"required": True, "schema": {"type": "string"}}}
_NAMED_THEIRS: Schema = {"request-id": {"required": True, "schema": {"type": "string"}}}
_WHETHER = {
    "Retry-After": {"schema": {"type": "integer", "minimum": 1}},
    "x-should-retry": {"schema": {"const": "false"}},
}
_LATER = {"Retry-After": {"required": True, "schema": {"type": "integer", "minimum": 1}}}
_HEADERS: dict[int, Schema] = {
    **dict.fromkeys((200, 403, 404, 415, 500), _NAMED),
    401: {**_NAMED, "WWW-Authenticate": {"required": True, "schema": {"const": "Bearer"}}},
    429: {**_NAMED, **_LATER},
    503: {**_NAMED, **_WHETHER},
}  # the others may come from the connection, before a request has a name
_BY_CONNECTION = (400, 408, 413, 414, 431)


@dataclass(frozen=True)
class Served:
    """Facts of this server for its document. `shortest`: characters of the shortest text that has a token; `most`:
    choices of a prompt that can wait together; `aliases`: further names of the model; `root_path`: prefix of paths;
    `infill`: whether the model can fill in the middle; `images`: whether it takes images."""

    keyed: bool = False
    ready: Ready | None = None
    shortest: int = 0
    most: int = MAX_CHOICES
    aliases: Sequence[str] = ()
    root_path: str = ""
    infill: bool = False
    images: bool = False


class Form(Enum):
    """Form of an answer: one object, a list of them, or by the request: a list, or some of an object's fields."""

    ONE = "one"
    MANY = "many"
    CHOSEN = "chosen"


def giving(answer: type[Answer], form: Form = Form.ONE) -> Schema:
    """Return the OpenAPI entry of a route that answers with `answer`, in a `form`."""
    _ANSWERS.add(answer)
    one, many = _ref(answer), {"type": "array", "items": _ref(answer)}
    schema = {Form.ONE: one, Form.MANY: many, Form.CHOSEN: {"anyOf": [one, {"type": ["object", "array"]}]}}[form]
    return {"responses": {"200": {"content": {"application/json": {"schema": schema}}}}}


def taking(kind: type[Body], answer: type[Answer], *events: type[Answer], form: Form = Form.ONE) -> Schema:
    """Return the OpenAPI entry of a route that reads `kind`; `events`: the types of its stream, where it has one."""
    _BODIES[kind.__name__] = kind
    _ANSWERS.update(events)
    found = giving(answer, form)
    if events:
        found["responses"]["200"]["content"]["text/event-stream"] = {"schema": _event(events)}
    examples = {str(number): {"value": value} for number, value in enumerate(EXAMPLES[kind.__name__], 1)}
    body = {"schema": {"$ref": REF.format(name=kind.__name__)}, "examples": examples}
    return {**found, "requestBody": {"required": True, "content": {"application/json": body}}}


def document(app: FastAPI, served: Served) -> Schema:
    """Return the document of `app`'s routes."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [*_BODIES.values(), *sorted(_ANSWERS, key=lambda kind: kind.__name__)]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=REF)
    for name, kind in _BODIES.items():
        fields = schemas[name]["properties"]
        for field, values in kind.neutral.items():
            fields[field] = {"anyOf": [fields[field], _neutral(values)]} if field in fields else _neutral(values)
        if served.ready is not None:
            fields["model"] = _names(served.ready, served.aliases)
            if "kv_eviction" in fields:
                fields["kv_eviction"] = {"enum": [None, "none", *(policy for policy, _ in served.ready.kv_evictions)]}
    add_rules(schemas, served.shortest)
    describe_images(schemas, served.images)
    if not served.infill:
        for name in ("CompletionBody", "OllamaGenerateBody"):
            schemas[name]["properties"]["suffix"] = {"enum": [None, ""]}
    if served.ready is not None:
        _add_numbers(schemas, served.ready, served.most)
    made["components"] = {"schemas": schemas}
    for path, methods in made["paths"].items():
        for method, operation in methods.items():
            _add_errors(operation, path, method == "post", served.keyed)
            if method == "head":
                for response in operation["responses"].values():
                    response.pop("content", None)
    _add_links(made["paths"])
    if served.root_path:
        made["servers"] = [{"url": served.root_path}]
    if served.keyed:
        schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
        schemes["key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        made["components"]["securitySchemes"] = schemes
        made["security"] = [{name: []} for name in schemes]
        for path in OPEN_TO_ALL & made["paths"].keys():
            for operation in made["paths"][path].values():
                operation["security"] = []
    return made


def _names(ready: Ready, aliases: Sequence[str]) -> Schema:
    """Describe what a request may call a model: `*` in an alias stands for any letters."""
    whole = {"enum": [None, ready.model, *ready.adapters, *(alias for alias in aliases if "*" not in alias)]}
    patterns = [f"^{pattern(alias)}$" for alias in aliases if "*" in alias]
    most = {"type": "string", "maxLength": 256}
    return {"anyOf": [whole, *({**most, "pattern": each} for each in patterns)]} if patterns else whole


def _ref(kind: type[Answer]) -> Schema:
    return {"$ref": REF.format(name=kind.__name__)}


def _event(kinds: tuple[type[Answer], ...]) -> Schema:
    """Describe one server-sent event, as OpenAPI 3.1 does streams. OpenAI's streams end with one that is no JSON."""
    one_of = {"anyOf": [_ref(kind) for kind in kinds]}
    data: Schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": one_of}
    if openai_types.Error in kinds:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _neutral(values: tuple[Any, ...]) -> Schema:
    alike = [values.index(value) for value in values]  # 1 and 1.0 are one number in JSON
    return {"enum": [None, *(values[at] for at in sorted(set(alike)))]}


def _add_numbers(schemas: Schema, ready: Ready, most: int) -> None:
    """Add the served model's bounds: token ids, keys of biases, and choices that its queue can hold."""
    for found in parts(schemas):
        if found.get("title") == "Token":
            found["maximum"] = ready.vocab_size - 1
        elif found.get("title") == "Choices":
            found["maximum"] = min(MAX_CHOICES, most)
        elif found.get("title") == "Biases":
            found["propertyNames"] = {"pattern": f"^({'|'.join(_below(ready.vocab_size))})$"}
        elif found.get("title") == NAMED_BIASES:
            ids = {"pattern": f"^0*({'|'.join(_below(ready.vocab_size))})$"}
            found["propertyNames"] = {"minLength": 1, "maxLength": 64, "anyOf": [ids, {"not": {"pattern": "^[0-9]+$"}}]}
    for name in ("EmbeddingBody", "OllamaEmbedBody"):
        schemas[name]["properties"]["dimensions"]["anyOf"][0]["maximum"] = ready.dimensions


def _below(end: int) -> Iterator[str]:
    """Yield patterns of the whole numbers below `end`, without leading zeros: shorter ones, then digit by digit."""
    yield "0"
    digits = str(end)
    for length in range(1, len(digits)):
        yield f"[1-9][0-9]{{{length - 1}}}"
    for at, digit in enumerate(map(int, digits)):
        least = 1 if at == 0 else 0
        if digit > least:
            yield f"{digits[:at]}[{least}-{digit - 1}][0-9]{{{len(digits) - at - 1}}}"


def _add_errors(operation: Schema, path: str, posting: bool, keyed: bool) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own validation, unused here
    statuses = [400, 403, 408, 414, 431, 500, 503] + ([404, 413, 415, 429] if posting else [])
    if "{" in path:
        statuses.append(404)
    if keyed and path not in OPEN_TO_ALL:
        statuses.append(401)
    theirs = path.startswith(ANTHROPIC)
    own: type[Answer] = anthropic_types.AnthropicError if theirs else openai_types.Error
    if path.startswith(OLLAMA):
        own = OllamaError
    elif path in LLAMACPP:
        own = NativeError
    for status in sorted(statuses):
        shapes: list[type[Answer]] = [own]
        if status in _BY_CONNECTION and own is not openai_types.Error:
            shapes.append(openai_types.Error)
        content = {"application/json": {"schema": {"anyOf": [_ref(shape) for shape in shapes]}}}
        codes = sorted(code for code, kind in CATALOGUE.items() if kind.status == status)
        responses[str(status)] = {"description": " or ".join(codes), "content": content}
    for number, headers in _HEADERS.items():
        if str(number) in responses:
            responses[str(number)]["headers"] = {**headers, **_NAMED_THEIRS} if theirs else headers


def _add_links(paths: Schema) -> None:
    """Add the links between routes: a request to /why, the model list to each model, token ids to their text."""
    name = {"parameters": {"name": "$response.header.X-Request-Id"}}
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"):
        why = {"operationId": paths["/v1/requests/{name}/why"]["get"]["operationId"], **name}
        paths[path]["post"]["responses"]["200"]["links"] = {"why": why}
    model = {"operationId": paths["/v1/models/{name}"]["get"]["operationId"]}
    first = {"parameters": {"name": "$response.body#/data/0/id"}}
    paths["/v1/models"]["get"]["responses"]["200"]["links"] = {"model": model | first}
    one = paths["/v1/responses/{name}"]
    made = {"parameters": {"name": "$response.body#/id"}}
    stored = {method: {"operationId": one[method]["operationId"], **made} for method in ("get", "delete")}
    stored["input_items"] = {"operationId": paths["/v1/responses/{name}/input_items"]["get"]["operationId"], **made}
    paths["/v1/responses"]["post"]["responses"]["200"]["links"] |= stored
    text = {"operationId": paths["/detokenize"]["post"]["operationId"]}
    back = {"requestBody": {"tokens": "$response.body#/tokens"}}
    paths["/tokenize"]["post"]["responses"]["200"]["links"] = {"text": text | back}
