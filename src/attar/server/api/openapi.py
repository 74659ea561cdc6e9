"""The OpenAPI document, made of the types by which requests are read and answers described.

Two things that the types cannot express are added here: rules between fields, and what depends on the served model,
whose name and vocabulary the document has once it is loaded. The document is exact: a body that fits it is accepted,
any other is refused, and schemathesis tests that. Some limits have no schema. Whether a constraint can be kept is
known once it is compiled. That a request has one at most, and then no `ignore_eos` or `min_tokens`, is said in words:
generators of test cases give up on rules of eight fields. So are `n_predict` beside `max_tokens`,
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

from attar.protocol.grammar import WHITESPACE
from attar.protocol.messages import Ready
from attar.server.api.body import Body
from attar.server.api.dialects.answers import OllamaError
from attar.server.api.dialects.llamacpp.answers import NativeError
from attar.server.api.dialects.llamacpp.fields import NAMED_BIASES
from attar.server.api.images.document import describe_images
from attar.server.api.response_types import anthropic as anthropic_types
from attar.server.api.response_types import openai as openai_types
from attar.server.api.response_types.answer import Answer
from attar.server.api.schemas import ALL_THAT_FIT, MAX_CHOICES, MAX_INPUTS, MAX_PROMPTS, MAX_STOP_BYTES, MAX_TOKENS
from attar.server.errors import ANTHROPIC, CATALOGUE, LLAMACPP, OLLAMA
from attar.server.http.middleware import OPEN_TO_ALL
from attar.server.options import pattern

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
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

_SAID = [{"role": "user", "content": "Why is the sky blue?"}]
_TOOL: Schema = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
_CALLED: list[Schema] = [
    {
        "role": "assistant", "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
]  # fmt: skip
_TOLD: Schema = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
_EXAMPLES: dict[str, list[Schema]] = {
    "ChatBody": [
        {"messages": _SAID},
        {"messages": _SAID, "temperature": 0.7, "seed": 1, **_TOLD},
        {"messages": [*_SAID, *_CALLED], "tools": [_TOOL]},
    ],
    "CompletionBody": [{"prompt": "Once upon a time"}, {"prompt": ["One", "Two"], "max_tokens": 8, "logprobs": 2}],
    "AnthropicPrompt": [{"messages": _SAID, "system": "Be brief."}],
    "AnthropicBody": [
        {"messages": _SAID, "max_tokens": 64, "system": "Be brief."},
        {"messages": _SAID, "max_tokens": 64, "tools": [{"name": "now", "input_schema": {"type": "object"}}]},
    ],
    "ResponsesBody": [{"input": "Why is the sky blue?"}, {"input": _SAID, "instructions": "Be brief.", "stream": True}],
    "EmbeddingBody": [{"input": ["One text", "another"], "pooling": "last"}],
    "TokenizeBody": [{"prompt": "Once upon a time"}, {"messages": _SAID}],
    "TemplateBody": [{"messages": _SAID}, {"messages": _SAID, "tools": [_TOOL], "add_generation_prompt": False}],
    "DetokenizeBody": [{"tokens": [1, 2, 3]}],
    "InfillBody": [{"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n", "n_predict": 8}],
    "NativeCompletionBody": [
        {"prompt": "Once upon a time", "n_predict": 8},
        {"prompt": ["One", [1, 2, "two"]], "n_predict": 2, "n_probs": 2},
    ],
    "NativeEmbeddingBody": [{"content": "One text"}, {"input": ["One", {"prompt_string": "two"}, [1, "three"]]}],
    "OllamaShowBody": [{}],
    "OllamaChatBody": [{"messages": _SAID}, {"messages": _SAID, "stream": False, "options": {"num_predict": 8}}],
    "OllamaGenerateBody": [{"prompt": "Once upon a time", "raw": True}, {"prompt": "Hello", "stream": False}],
    "OllamaEmbedBody": [{"input": ["One text", "another"]}],
    "OllamaEmbeddingsBody": [{"prompt": "One text"}],
    "RerankBody": [{"query": "a pet", "documents": ["a cat", "a car"], "top_n": 1}],
}


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
    examples = {str(number): {"value": value} for number, value in enumerate(_EXAMPLES[kind.__name__], 1)}
    body = {"schema": {"$ref": _REF.format(name=kind.__name__)}, "examples": examples}
    return {**found, "requestBody": {"required": True, "content": {"application/json": body}}}


def document(app: FastAPI, served: Served) -> Schema:
    """Return the document of `app`'s routes."""
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    kinds = [*_BODIES.values(), *sorted(_ANSWERS, key=lambda kind: kind.__name__)]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for name, kind in _BODIES.items():
        fields = schemas[name]["properties"]
        for field, values in kind.neutral.items():
            fields[field] = {"anyOf": [fields[field], _neutral(values)]} if field in fields else _neutral(values)
        if served.ready is not None:
            fields["model"] = _names(served.ready, served.aliases)
            if "kv_eviction" in fields:
                fields["kv_eviction"] = {"enum": [None, "none", *(policy for policy, _ in served.ready.kv_evictions)]}
    _add_rules(schemas, served.shortest)
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
    return {"$ref": _REF.format(name=kind.__name__)}


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


def _add_rules(schemas: Schema, shortest: int) -> None:
    """Add the checks of `schemas.py` on several fields together, and on lists of several kinds."""
    text: Schema = {"type": "string", "minLength": shortest}
    token = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS, "title": "Token"}
    ids = {"type": "array", "items": token, "minItems": 1}

    def texts(most: int) -> list[Schema]:
        many = [{"type": "array", "items": each, "minItems": 1, "maxItems": most} for each in (text, ids)]
        return [text, ids, *many]

    streamed = [_has(stream={"const": True}), _may(stream_options={"type": "null"})]
    filled = {"type": "integer", "minimum": ALL_THAT_FIT, "maximum": MAX_TOKENS, "not": {"const": 0}}
    completion, chat = schemas["CompletionBody"], schemas["ChatBody"]
    completion["properties"]["prompt"] = {"anyOf": texts(MAX_PROMPTS)}
    some = {"anyOf": [filled, {"type": "null"}]}
    # Two numbers cannot be compared, but some number from 1 on is between n and best_of, or between best_of and n. A
    # bound ignores null.
    enough = [_may(n={"maximum": each}, best_of={"minimum": each}) for each in range(1, MAX_CHOICES + 1)]
    all_kept = [
        _may(best_of={"maximum": 1}),
        *(
            {**_may(n={"type": "integer", "minimum": each}, best_of={"maximum": each}), "required": ["n"]}
            for each in range(2, MAX_CHOICES + 1)
        ),
    ]
    unnamed = _may(logprob_token_ids={"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]})
    untrusting = _may(
        speculation={"anyOf": [{"type": "null"}, {"type": "object", **_may(trust_forced={"const": False})}]}
    )
    completion |= _all(
        {"anyOf": [untrusting, _may(logprobs={"type": "null"}, best_of={"enum": [None, 1]})]},
        {"anyOf": [unnamed, _given("logprobs")]},
        {"anyOf": [unnamed, _may(max_tokens=some, n_predict=some)]},
        {"anyOf": streamed},
        {"anyOf": [_has(echo={"const": True}), _may(max_tokens=some, n_predict=some)]},
        {"anyOf": enough},
        {"anyOf": [_may(stream={"enum": [None, False]}), *all_kept]},
    )
    limits = ("max_tokens", "max_completion_tokens", "n_predict")
    for field in limits:
        chat["properties"][field] = {**some, "default": None}
    none: Schema = {"type": "null"}
    chat |= _all(
        {"anyOf": streamed},
        {"anyOf": [_has(logprobs={"const": True}), _may(top_logprobs={"type": "null"})]},
        {"anyOf": [_has(logprobs={"const": True}), unnamed]},
        {"anyOf": [untrusting, _may(logprobs={"enum": [None, False]})]},
    )
    told_once = [
        _may(prompt_logprobs={"type": "null"}),
        _may(echo={"enum": [None, False]}),
        _may(logprobs={"type": "null"}),
    ]
    completion["not"]["not"]["allOf"].append({"anyOf": told_once})
    before_middle = [_may(echo={"enum": [None, False]}), _may(suffix={"enum": [None, ""]})]
    completion["not"]["not"]["allOf"].append({"anyOf": before_middle})
    uncut = _may(truncate_prompt_tokens={"type": "null"})
    completion["not"]["not"]["allOf"] += [{"anyOf": [uncut, each]} for each in before_middle]
    for found in list(_parts(schemas)):
        if found.get("title") == "StopString":
            found.pop("maxLength")
            found |= _short()
        elif found.get("title") == "Whitespace":
            found["pattern"] = f"^{WHITESPACE}$"
    schemas["StreamOptions"]["properties"]["include_obfuscation"] = {"const": False, "default": False}
    schemas["ResponseStreamOptions"]["properties"]["include_obfuscation"] = {"enum": [None, False], "default": None}
    scored = {"type": "array", "contains": {"const": "message.output_text.logprobs"}}
    unscored = _may(top_logprobs={"enum": [None, 0]})
    schemas["ResponsesBody"] |= _all({"anyOf": streamed}, {"anyOf": [_has(include=scored), unscored]})
    schemas["MessageItem"]["required"].remove("type")
    made = [_given(name) for name in ("json", "regex", "choice", "grammar")] + [_has(json_object={"const": True})]
    spaced = {"anyOf": [_may(whitespace_pattern={"type": "null"}), made[0], made[-1]]}
    schemas["StructuredOutputs"] |= _all({"oneOf": made}, spaced)
    content: Schema = {"type": ["string", "array"]}
    uncalled: Schema = {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}
    schemas["Message"]["anyOf"] = [
        _may(role={"const": "assistant"}, tool_call_id={"type": "null"}),
        {
            **_may(role={"const": "tool"}, content=content, tool_call_id={"type": "string"}, tool_calls=uncalled),
            "required": ["content", "tool_call_id"],
        },
        {
            **_may(
                role={"enum": ["system", "developer", "user"]}, content=content, tool_call_id={"type": "null"},
                tool_calls=uncalled,
            ),
            "required": ["content"],
        },
    ]  # fmt: skip
    blocks = {"type": "array", "items": {"properties": {"type": {"not": {"const": "tool_use"}}}}}
    own = {"type": "array", "items": {"properties": {"type": {"not": {"const": "tool_result"}}}}}
    schemas["AnthropicMessage"]["anyOf"] = [
        _may(role={"const": "user"}, content={"anyOf": [{"type": "string"}, blocks]}),
        _may(role={"const": "assistant"}, content={"anyOf": [{"type": "string"}, own]}),
    ]
    schemas["OllamaMessage"]["anyOf"] = [_may(role={"const": "assistant"}), _may(tool_calls=uncalled)]
    _add_llamacpp(schemas, text, token)
    many = {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_INPUTS}
    schemas["OllamaEmbedBody"]["properties"]["input"] = {"anyOf": [text, many]}
    schemas["OllamaEmbeddingsBody"]["properties"]["prompt"] = text
    forms = {"prompt": "string", "messages": "array", "content": "string"}
    schemas["TokenizeBody"]["anyOf"] = [
        {**_may(**{**dict.fromkeys(forms, none), own: {"type": kind}}), "required": [own]}
        for own, kind in forms.items()
    ]


def _add_llamacpp(schemas: Schema, text: Schema, token: Schema) -> None:
    """Add the forms of inputs, and the rules of llama.cpp's bodies."""
    words = {"type": "array", "items": {"type": "string"}, "contains": text, "minItems": 1}
    pieces = {"type": "array", "items": {"anyOf": [{"type": "string"}, token]}, "contains": token, "minItems": 1}
    part = schemas["InputObject"]["properties"]["content"]
    part |= {"minItems": 1, "contains": _has(text=text)}
    schemas["InputObject"]["properties"]["prompt_string"] = text
    schemas["InputObject"]["oneOf"] = [{"required": [name]} for name in ("prompt_string", "content")]
    said = {"$ref": _REF.format(name="InputObject")}

    def inputs(most: int) -> list[Schema]:
        each = {"anyOf": [text, said, pieces, words]}
        return [text, said, pieces, {"type": "array", "items": each, "minItems": 1, "maxItems": most}]

    schemas["EmbeddingBody"]["properties"]["input"] = {"anyOf": inputs(MAX_INPUTS)}
    schemas["NativeCompletionBody"]["properties"]["prompt"] = {"anyOf": inputs(MAX_PROMPTS)}
    embedding = schemas["NativeEmbeddingBody"]
    for name in ("content", "input"):
        embedding["properties"][name] = {"anyOf": [*inputs(MAX_INPUTS), {"type": "null"}], "default": None}
    embedding["oneOf"] = [_given("content"), _given("input")]
    penalty = [
        _may(repeat_penalty={"enum": [None, 1]}),
        {**_has(repeat_last_n={"enum": [-1, 0]}), "allOf": [_may(repetition_penalty={"type": "null"})]},
    ]
    for name in ("NativeCompletionBody", "InfillBody"):
        schemas[name] |= _all({"anyOf": penalty})


def _given(name: str) -> Schema:
    return _has(**{name: {"not": {"type": "null"}}})


def _short() -> Schema:
    """Return the schema of a string limited in bytes, in characters: the wider the widest, the fewer."""
    bounds = [
        (f"^[\\u0000-\\u{last:04x}]*$", MAX_STOP_BYTES // len(chr(last).encode())) for last in (0x7F, 0x7FF, 0xFFFF)
    ]
    narrow = [{"pattern": pattern, "maxLength": most} for pattern, most in bounds]
    return {"type": "string", "minLength": 1, "anyOf": [*narrow, {"maxLength": MAX_STOP_BYTES // 4}]}


def _may(**fields: Schema) -> Schema:
    return {"properties": fields}


def _has(**fields: Schema) -> Schema:
    return {"properties": fields, "required": list(fields)}


def _all(*rules: Schema) -> Schema:
    """Require all rules, as `not` twice. A plain `allOf` beside the fields keeps schemathesis from going through their
    values, and generators of clients make a type of every branch of it."""
    return {"not": {"not": {"allOf": list(rules)}}}


def _add_numbers(schemas: Schema, ready: Ready, most: int) -> None:
    """Add the served model's bounds: token ids, keys of biases, and choices that its queue can hold."""
    for found in _parts(schemas):
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


def _parts(value: Any) -> Iterator[Schema]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(inner)


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
