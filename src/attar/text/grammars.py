"""Grammars as llguidance compiles them: the bytes of a model's tokens, and the tokens that may come next.

Every kind of constraint becomes one text in llguidance's dialect of Lark. Three of its habits are switched off. A
schema's own `x-guidance` could weaken the schema, and is refused. White space in JSON would be unbounded. And forced
bytes would be spelled by a tokenizer: here a mask holds every token whose bytes keep the text possible.

Limits are counts, not times, a quarter of llguidance's own: what compiled once compiles everywhere. They do not bound
its stack, so a grammar is proven in a child process first (`grammar_proof.py`).

Regular expressions are Rust's, without look-around and back-references, and match the whole answer. JSON comes with
its keys in the schema's order, additional ones last.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from attar.errors import UserError
from attar.protocol.grammar import Grammar
from attar.text.schemas.equivalent import equivalent

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from attar.text.tokenizer import Tokenizer

LIMITS = {
    "max_items_in_row": 500, "initial_lexer_fuel": 250_000, "step_lexer_fuel": 50_000, "step_max_items": 12_500,
    "max_lexer_states": 62_500, "max_grammar_size": 125_000,
}  # fmt: skip
LIMITS_VERSION = json.dumps(LIMITS).encode()
MAX_SHOWN = 300  # characters of an error
MAX_LINES = 10_000  # of a grammar in GBNF or Lark's format: a count, so that a faster machine refuses the same

_HEAD = '%llguidance {"no_forcing": true}\n'
_OWN = "%llguidance"
_SUBSCHEMAS = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
               "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


class GrammarError(UserError):
    """A refused constraint: one sentence, fit for showing. `pointer` is the place in a JSON schema, as a
    JSON pointer of at most `MAX_SHOWN` characters; None where there is none, or the text is no schema."""

    def __init__(self, message: str, pointer: str | None = None) -> None:
        super().__init__("grammar_invalid", message)
        self.pointer = None if pointer is None else _printable(pointer)


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of a model's tokens.

    tokens: one for each column of the logits, empty where there is no token. special: ids of tokens that no text shows,
    `ends` among them. ends: ids of those that end a text, at least one.
    """

    tokens: tuple[bytes, ...]
    special: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def make(cls, tokens: Iterable[bytes], special: Iterable[int], ends: Iterable[int]) -> Vocabulary:
        """Make a vocabulary. Where no token ends a text, one is added that no logits have a column for."""
        known = list(tokens)
        found = sorted({each for each in ends if each < len(known)})
        if not found:
            found = [len(known)]
            known.append(b"\0")
        hidden = sorted({*(each for each in special if each < len(known)), *found})
        return cls(tuple(known), tuple(hidden), tuple(found))

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, ends: Iterable[int]) -> Vocabulary:
        """Return the vocabulary of a model whose logits have `size` columns, of which `ends` end a text."""
        return cls.make((tokenizer.id_to_bytes(index) for index in range(size)), tokenizer.special_ids, ends)

    @classmethod
    def from_json(cls, text: str | bytes) -> Vocabulary:
        """Read what `to_json` wrote."""
        tokens, special, ends = json.loads(text)
        return cls(tuple(token.encode("latin-1") for token in tokens), tuple(special), tuple(ends))

    def to_json(self) -> bytes:
        """Return the vocabulary as JSON, a character a byte."""
        tokens = [token.decode("latin-1") for token in self.tokens]
        return json.dumps([tokens, self.special, self.ends], ensure_ascii=False).encode()

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of the vocabulary."""
        return hashlib.sha256(self.to_json()).digest()

    @cached_property
    def compiler(self) -> LLTokenizer:
        """The trie of the tokens, as llguidance makes it; half a second for 150,000."""
        return _library().LLTokenizer(_Tokens(self), eos_token=list(self.ends))  # type: ignore[no-any-return]


class _Tokens:
    """A vocabulary as llguidance reads one."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids = list(vocabulary.tokens), list(vocabulary.special)
        self.eos_token_id, self.bos_token_id = vocabulary.ends[0], None

    def __call__(self, text: object) -> NoReturn:
        raise AssertionError("no text is tokenized for a grammar without forced tokens")


def matcher(vocabulary: Vocabulary, grammar: Grammar) -> LLMatcher:
    """Return the matcher of a grammar at its beginning. Raises GrammarError where it cannot be compiled.

    Only for grammars that are proven: others may overflow the stack.
    """
    library = _library()
    limits = library.LLParserLimits(**LIMITS, verbose_errors=False)
    found: LLMatcher = library.LLMatcher(vocabulary.compiler, lark(grammar), limits=limits, log_level=0)
    if found.is_error():
        raise refusal(grammar, found.get_error())
    return found


def lark(grammar: Grammar) -> str:
    """Return a grammar in llguidance's dialect of Lark. Raises GrammarError where it cannot be translated."""
    text = grammar.text
    if grammar.kind in ("gbnf", "lark") and (lines := text.count("\n") + 1) > MAX_LINES:
        raise GrammarError(f"the grammar has {lines:,} lines, more than {MAX_LINES:,}")
    match grammar.kind:
        case "json_object":
            return _json({"type": "object"}, grammar.whitespace)
        case "json_schema":
            return _json(schema_of(grammar), grammar.whitespace)
        case "regex":
            made = json.loads(_library().LLMatcher.grammar_from_regex(text))
            return _HEAD + str(made["grammars"][0]["lark_grammar"])
        case "choice":
            return _HEAD + "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(text))
        case "gbnf":
            text = _from_gbnf(text)
        case "lark" if _OWN in text:
            raise GrammarError(f"{_OWN} is not for grammars of a request: leave it out")
    return _HEAD + text


def schema_of(grammar: Grammar) -> dict[str, Any]:
    """Return a grammar's JSON schema. Raises GrammarError where it is none, or holds what no compiler may see."""
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {_shown(str(error))}", "") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object, and not one that forbids every value", "")
    for pointer, each in subschemas(schema):
        if "x-guidance" in each:
            raise GrammarError("x-guidance is not for schemas of a request: leave it out", f"{pointer}/x-guidance")
        if isinstance(reference := each.get("$ref"), str) and not reference.startswith("#"):
            message = "$ref may only point into the schema itself (#...): nothing is fetched"
            raise GrammarError(message, f"{pointer}/$ref")
        for key in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(each.get(key), bool):
                raise GrammarError(f"{key} must be a number", f"{pointer}/{key}")
    return schema


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and those within it, each with its JSON pointer, in the order of the text."""
    left: list[tuple[str, Any]] = [("", schema)]
    while left:
        pointer, each = left.pop()
        if not isinstance(each, dict):
            continue
        yield pointer, each
        inner: list[tuple[str, Any]] = []
        for key, value in each.items():
            if key in _SUBSCHEMAS and isinstance(value, dict):
                inner.append((f"{pointer}/{key}", value))
            elif key in _LISTS and isinstance(value, list):
                inner += [(f"{pointer}/{key}/{at}", one) for at, one in enumerate(value)]
            elif key in _MAPS and isinstance(value, dict):
                inner += [(f"{pointer}/{key}/{_escaped(name)}", one) for name, one in value.items()]
        left += reversed(inner)


def refusal(grammar: Grammar, message: str) -> GrammarError:
    """Make the error of a grammar that llguidance refuses with `message`, with the place of what it names."""
    for quoted in ("\n   1 | ", "<non-verbose/>"):  # the whole text
        message = message.partition(quoted)[0]
    message = message.rpartition("failed to compile JSON schema: ")[2].strip()
    words = message
    if words.startswith("NoExtension"):
        words = "no text fulfils it, or none that ends"
    words = _shown(words) or "it is refused"
    if grammar.kind != "json_schema":
        return GrammarError(f"the {grammar.kind} cannot be enforced: {words}")
    schema = schema_of(grammar)
    pointer = next((found for found, each in subschemas(schema) if _names(message, each)), "")
    return GrammarError(f"the schema cannot be enforced at #{_printable(pointer)}: {words}", pointer)


def _names(message: str, schema: dict[str, Any]) -> bool:
    """Return whether a message of llguidance is about this schema, not those within it."""
    if message.startswith("Unimplemented keys: "):
        return any(json.dumps(key) in message for key in schema)
    if message.startswith("oneOf "):
        return "oneOf" in schema
    if message.startswith("Unknown format: "):
        return schema.get("format") == message.removeprefix("Unknown format: ").strip()
    if message.startswith("Pointer "):
        return isinstance(schema.get("$ref"), str) and schema["$ref"].removeprefix("#") in message
    return isinstance(pattern := schema.get("pattern"), str) and "regex parse error" in message and pattern in message


def json_rule(schema: dict[str, Any], whitespace: str | None = None, ascii: bool = False) -> str:
    """Return the right side of a rule of Lark for JSON by a schema, which `schema_of` has checked. Only with `ascii`
    may it hold a lone surrogate."""
    options: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    if whitespace is not None:
        options = {"whitespace_flexible": bool(whitespace), "item_separator": ",", "key_separator": ":"}
        options |= {"whitespace_pattern": whitespace} if whitespace else {}
    own = {"x-guidance": {**options, "lenient": False, "coerce_one_of": False}}
    return f"%json {json.dumps({**equivalent(schema), **own}, ensure_ascii=ascii)}"


def _json(schema: dict[str, Any], whitespace: str | None) -> str:
    return f"{_HEAD}start: {json_rule(schema, whitespace, ascii=True)}"


def _library() -> ModuleType:
    """Return llguidance, which only constraints need. Raises UserError where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        message = "a constraint needs the package llguidance: pip install llguidance"
        raise UserError("package_missing", message) from error
    return llguidance


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text)).replace("%llguidance {}\n", "")
    except RecursionError as error:
        raise GrammarError("the grammar is nested too deeply") from error
    except Exception as error:  # its errors have no type of their own
        raise GrammarError(f"the gbnf cannot be read: {_shown(str(error))}") from error


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:MAX_SHOWN])


def _shown(message: str) -> str:
    """Return the first line of a message, printable and short."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    rest = [line.strip() for line in message.splitlines() if line.startswith("error: ")]
    line = rest[0].removeprefix("error: ") if rest else line
    return _printable(line)


def mask(found: LLMatcher) -> bytes | None:
    """Return the tokens that may come next: a bit each, the lowest first; None where the matcher has passed a limit, or
    was given a token that is not one of them."""
    bits = found.compute_bitmask()
    return None if found.is_error() else bits
