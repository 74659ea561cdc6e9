"""Constraints of a request: fields of OpenAI's, vLLM's and llama.cpp's APIs, read as one `Grammar`.

A request has one constraint at most: two could contradict each other, and none is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta, Struct

from attar.errors import UserError
from attar.protocol.grammar import MAX_GRAMMAR, Grammar
from attar.server.api.body import Body
from attar.server.errors import APIError
from attar.text import grammars

_RULE = "The answer satisfies it. What cannot be enforced is refused. One at most, without ignore_eos."
SchemaObject = Annotated[dict[str, Any], Meta(description="A JSON schema, draft 2020-12. " + _RULE)]
AnySchema = SchemaObject | bool | Annotated[str, Meta(max_length=MAX_GRAMMAR, description="A JSON schema as text.")]
Expression = Annotated[str, Meta(max_length=MAX_GRAMMAR, description="A regular expression of the whole answer.")]
GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR, description="A grammar, in GBNF or Lark's format. " + _RULE)]
Choice = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, description="The possible answers.")]
Whitespace = Annotated[str, Meta(max_length=32, title="Whitespace", description="Space in JSON: [CHARACTERS]{0,N}.")]


class NamedSchema(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A schema of an answer. With `strict`, each of its objects forbids additional properties and requires all."""

    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    schema: SchemaObject
    strict: bool | None = None


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class ObjectFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """A JSON object: any, or by llama.cpp's `schema`."""

    schema: SchemaObject | None = None


class SchemaFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON by a schema."""

    json_schema: NamedSchema


ResponseFormat = TextFormat | ObjectFormat | SchemaFormat


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Constraints as vLLM names them, of which one is given."""

    json: AnySchema | None = None
    regex: Expression | None = None
    choice: Choice | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    whitespace_pattern: Whitespace | None = None
    disable_any_whitespace: bool | None = None  # there is none by default


class Asked(NamedTuple):
    """A constraint, and the field that it came from."""

    grammar: Grammar
    field: str


class MayConstrain(Protocol):
    """A body that may have a constraint."""

    def constraint(self) -> Asked | None:
        """Return the constraint of the answer; None where there is none. Raises APIError where it is malformed."""
        ...


class Constrained(Body, frozen=True, kw_only=True):
    """Fields of a request that constrain its answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: AnySchema | None = None
    guided_regex: Expression | None = None
    guided_choice: Choice | None = None
    guided_grammar: GrammarText | None = None
    guided_whitespace_pattern: Whitespace | None = None
    grammar: GrammarText | None = None
    json_schema: SchemaObject | None = None

    def constraint(self) -> Asked | None:
        """Return the constraint of the answer; None where there is none. Raises APIError where there are several, or
        one is malformed."""
        return only_one(list(self._constraints()))

    def _constraints(self) -> Iterator[Asked]:
        match self.response_format:
            case ObjectFormat(schema=None):
                yield Asked(Grammar.json_object(), "response_format")
            case ObjectFormat(schema=schema):
                yield _asked("response_format.schema", Grammar.json_schema, schema)
            case SchemaFormat(json_schema=named):
                where = "response_format.json_schema.schema"
                yield of_schema(where, named.schema, named.strict)
        space = self.guided_whitespace_pattern
        given: dict[str, Any] = {name: getattr(self, f"guided_{name}") for name in _MAKERS if name != "json_object"}
        yield from _made("guided_", given, space)
        if (outputs := self.structured_outputs) is not None:
            given = {name: getattr(outputs, name) for name in _MAKERS}
            made = list(_made("structured_outputs.", given, outputs.whitespace_pattern))
            if not made:
                message = f"structured_outputs: one of {', '.join(_MAKERS)}"
                raise APIError("invalid_value", message, "structured_outputs")
            yield from made
        yield from of_llamacpp(self.grammar, self.json_schema)


_MAKERS: dict[str, Callable[[Any, str | None], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": lambda _, space: Grammar.json_object(space),
    "regex": lambda text, _: Grammar("regex", text),
    "choice": lambda texts, _: Grammar.choice(texts),
    "grammar": lambda text, _: Grammar.of_text(text),
}


def _made(prefix: str, given: Mapping[str, Any], whitespace: str | None) -> Iterator[Asked]:
    """Yield the constraints among vLLM's fields, whose names begin with `prefix`. Raises APIError."""
    check_whitespace(prefix, given, whitespace)
    for name, value in given.items():
        if value is not None and not (name == "json_object" and value is False):
            yield _asked(prefix + name, _MAKERS[name], value, whitespace)


def check_whitespace(prefix: str, given: Mapping[str, Any], whitespace: str | None) -> None:
    """Raise APIError for a pattern of whitespace where none of the fields asks for JSON."""
    if whitespace is not None and given["json"] is None and not given.get("json_object"):
        name = prefix + "whitespace_pattern"
        raise APIError("invalid_value", f"{name}: only with JSON", name)


def of_llamacpp(grammar: str | None, schema: dict[str, Any] | None) -> Iterator[Asked]:
    """Yield the constraints of llama.cpp's fields `grammar` and `json_schema`. Raises APIError where one is
    malformed."""
    if grammar:
        yield _asked("grammar", Grammar, "gbnf", grammar)
    if schema is not None:
        yield _asked("json_schema", Grammar.json_schema, schema)


def only_one(found: list[Asked]) -> Asked | None:
    """Return the constraint of a request; None where there is none. Raises APIError for several."""
    _check_one(found)
    return found[0] if found else None


def of_schema(field: str, schema: dict[str, Any], strict: bool | None) -> Asked:
    """Return the constraint to the schema of a `field`, with OpenAI's rules where it is `strict`. Raises APIError where
    it is malformed."""
    if strict:
        _check_strict(schema, field)
    return _asked(field, Grammar.json_schema, schema)


def _asked(field: str, make: Callable[..., Grammar], *values: Any) -> Asked:
    """Return the constraint that a field asks for. Raises APIError where it is malformed."""
    try:
        return Asked(make(*values), field)
    except UserError as error:
        raise APIError("invalid_value", f"{field}: {error}", field) from error


def _check_one(found: list[Asked]) -> None:
    """Raise APIError for several constraints."""
    if len(found) > 1:
        names = " and ".join(asked.field for asked in found)
        raise APIError("invalid_value", f"{found[1].field}: one constraint at most, not {names}", found[1].field)


def _check_strict(schema: dict[str, Any], where: str) -> None:
    """Raise APIError for an object of a schema that allows or omits a property, which OpenAI's `strict` forbids."""
    for pointer, each in grammars.subschemas(schema):
        if "properties" not in each and each.get("type") != "object":
            continue
        if each.get("additionalProperties") is not False:
            message = f"{where}: at #{pointer}, strict needs additionalProperties to be false"
            raise APIError("invalid_value", message, where)
        properties, required = each.get("properties", {}), each.get("required", [])
        if isinstance(properties, dict) and isinstance(required, list):
            missing = [name for name in properties if name not in required]
            if missing:
                message = f"{where}: at #{pointer}, strict needs every property in required, also {missing[0][:80]!r}"
                raise APIError("invalid_value", message, where)


def refused(asked: Asked, error: UserError) -> APIError:
    """Make the refusal of a constraint that cannot be enforced."""
    return APIError("invalid_value", f"{asked.field}: {error}", asked.field)
