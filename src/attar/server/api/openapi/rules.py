"""Rules between fields, which the types of bodies cannot express, as JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attar.protocol.grammar import WHITESPACE
from attar.server.api.schemas import ALL_THAT_FIT, MAX_CHOICES, MAX_INPUTS, MAX_PROMPTS, MAX_STOP_BYTES, MAX_TOKENS

Schema = dict[str, Any]
REF = "#/components/schemas/{name}"

_NONE: Schema = {"type": "null"}
_SOME: Schema = {
    "anyOf": [{"type": "integer", "minimum": ALL_THAT_FIT, "maximum": MAX_TOKENS, "not": {"const": 0}}, _NONE]
}
"""A limit of tokens that is given, or left out."""


def add_rules(schemas: Schema, shortest: int) -> None:
    """Add the checks of `schemas.py` on several fields together, and on lists of several kinds."""
    text: Schema = {"type": "string", "minLength": shortest}
    token = {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS, "title": "Token"}
    for found in list(parts(schemas)):
        if found.get("title") == "StopString":
            found.pop("maxLength")
            found |= short()
        elif found.get("title") == "Whitespace":
            found["pattern"] = f"^{WHITESPACE}$"
    _add_completions(schemas, text, token)
    _add_chats(schemas)
    _add_messages(schemas)
    _add_llamacpp(schemas, text, token)
    many = {"type": "array", "items": text, "minItems": 1, "maxItems": MAX_INPUTS}
    schemas["OllamaEmbedBody"]["properties"]["input"] = {"anyOf": [text, many]}
    schemas["OllamaEmbeddingsBody"]["properties"]["prompt"] = text
    forms = {"prompt": "string", "messages": "array", "content": "string"}
    schemas["TokenizeBody"]["anyOf"] = [
        {**_may(**{**dict.fromkeys(forms, _NONE), own: {"type": kind}}), "required": [own]}
        for own, kind in forms.items()
    ]


def _add_completions(schemas: Schema, text: Schema, token: Schema) -> None:
    """Add the forms of prompts, and the rules of text completions."""
    ids, completion = {"type": "array", "items": token, "minItems": 1}, schemas["CompletionBody"]
    many = [{"type": "array", "items": each, "minItems": 1, "maxItems": MAX_PROMPTS} for each in (text, ids)]
    completion["properties"]["prompt"] = {"anyOf": [text, ids, *many]}
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
    silent = _may(echo={"enum": [None, False]})
    before_middle = [silent, _may(suffix={"enum": [None, ""]})]
    uncut = _may(truncate_prompt_tokens=_NONE)
    completion |= _all(
        {"anyOf": [_untrusting(), _may(logprobs=_NONE, best_of={"enum": [None, 1]})]},
        {"anyOf": [_unnamed(), _given("logprobs")]},
        {"anyOf": [_unnamed(), _may(max_tokens=_SOME, n_predict=_SOME)]},
        {"anyOf": _streamed()},
        {"anyOf": [_has(echo={"const": True}), _may(max_tokens=_SOME, n_predict=_SOME)]},
        {"anyOf": enough},
        {"anyOf": [_may(stream={"enum": [None, False]}), *all_kept]},
        {"anyOf": [_may(prompt_logprobs=_NONE), silent, _may(logprobs=_NONE)]},
        {"anyOf": before_middle},
        *({"anyOf": [uncut, each]} for each in before_middle),
    )


def _add_chats(schemas: Schema) -> None:
    """Add the rules of chats and responses."""
    chat = schemas["ChatBody"]
    for field in ("max_tokens", "max_completion_tokens", "n_predict"):
        chat["properties"][field] = {**_SOME, "default": None}
    chat |= _all(
        {"anyOf": _streamed()},
        {"anyOf": [_has(logprobs={"const": True}), _may(top_logprobs=_NONE)]},
        {"anyOf": [_has(logprobs={"const": True}), _unnamed()]},
        {"anyOf": [_untrusting(), _may(logprobs={"enum": [None, False]})]},
    )
    schemas["StreamOptions"]["properties"]["include_obfuscation"] = {"const": False, "default": False}
    schemas["ResponseStreamOptions"]["properties"]["include_obfuscation"] = {"enum": [None, False], "default": None}
    scored = {"type": "array", "contains": {"const": "message.output_text.logprobs"}}
    unscored = _may(top_logprobs={"enum": [None, 0]})
    schemas["ResponsesBody"] |= _all({"anyOf": _streamed()}, {"anyOf": [_has(include=scored), unscored]})
    made = [_given(name) for name in ("json", "regex", "choice", "grammar")] + [_has(json_object={"const": True})]
    spaced = {"anyOf": [_may(whitespace_pattern=_NONE), made[0], made[-1]]}
    schemas["StructuredOutputs"] |= _all({"oneOf": made}, spaced)


def _add_messages(schemas: Schema) -> None:
    """Add the rules of messages of each API: what a role has, and has not."""
    schemas["MessageItem"]["required"].remove("type")
    content: Schema = {"type": ["string", "array"]}
    uncalled: Schema = {"anyOf": [_NONE, {"type": "array", "maxItems": 0}]}
    schemas["Message"]["anyOf"] = [
        _may(role={"const": "assistant"}, tool_call_id=_NONE),
        {
            **_may(role={"const": "tool"}, content=content, tool_call_id={"type": "string"}, tool_calls=uncalled),
            "required": ["content", "tool_call_id"],
        },
        {
            **_may(
                role={"enum": ["system", "developer", "user"]}, content=content, tool_call_id=_NONE,
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


def _streamed() -> list[Schema]:
    """Return the ways in which a body may have options of a stream: with one, or none."""
    return [_has(stream={"const": True}), _may(stream_options=_NONE)]


def _unnamed() -> Schema:
    """Return the schema of a body that names no tokens whose log probabilities it wants."""
    return _may(logprob_token_ids={"anyOf": [_NONE, {"type": "array", "maxItems": 0}]})


def _untrusting() -> Schema:
    """Return the schema of a body that trusts no forced tokens."""
    return _may(speculation={"anyOf": [_NONE, {"type": "object", **_may(trust_forced={"const": False})}]})


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
