"""Rules between fields, which the types of bodies cannot express, as JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attar.protocol.grammar import WHITESPACE
from attar.server.api.schemas import ALL_THAT_FIT, MAX_CHOICES, MAX_INPUTS, MAX_PROMPTS, MAX_STOP_BYTES, MAX_TOKENS

Schema = dict[str, Any]
REF = "#/components/schemas/{name}"


def add_rules(schemas: Schema, shortest: int) -> None:
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
    for found in list(parts(schemas)):
        if found.get("title") == "StopString":
            found.pop("maxLength")
            found |= short()
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
    said = {"$ref": REF.format(name="InputObject")}

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


def short() -> Schema:
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


def parts(value: Any) -> Iterator[Schema]:
    """Yield every object within a schema, itself included."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(inner)
