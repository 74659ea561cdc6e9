"""Requests of a run: prompts with the lengths and shared prefixes of real traffic, or synthetic ones.

Three kinds of trace files are read and recognized by their content; a name that ends in .xz is decompressed on the way.

* Token ids (JSON lines with `input_tok_ids`, `output_toks`, `arrival_time_ns`): ShareGPT conversations as ids.
* Hash blocks (JSON lines with `timestamp` in ms, `input_length`, `output_length`, `hash_ids`): Mooncake's production
  traces. A hash stands for 512 tokens, the same wherever it appears. Here each becomes tokens drawn from it, so that
  prompts share exactly what the prompts behind the trace did. The last block of a prompt may be partly filled.
* Lengths (CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`): Azure's traces. Nothing is shared.

`divisor` makes everything shorter by that factor, so that a trace of long prompts runs on a small machine: a block of
512 becomes one of 512 / divisor, and shared prefixes stay shared. Times stay; the rate is set when a run is made.

Synthetic ids lie in `LOW` .. `HIGH`, ordinary tokens in every larger vocabulary. All randomness is seeded.
"""

from __future__ import annotations

import csv
import json
import lzma
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from attar.errors import Code, UserError

HASH_BLOCK = 512  # tokens that a hash of a Mooncake trace stands for
MAX_LINE = 32 << 20  # characters
MAX_TOKENS = 1 << 22  # of one prompt or answer
LOW, HIGH = 100, 1000


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a prompt of ids, due `at` seconds from the beginning of the trace, with `output` tokens wanted."""

    at: float
    prompt: tuple[int, ...]
    output: int


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Synthetic requests of `prompt` and `output` tokens, each by up to the fraction `spread` more or less.

    With `prefixes`, each prompt begins with one of that many prefixes of `prefix_tokens`, which count as part of it.
    Raises ValueError for impossible sizes.
    """

    prompt: int = 256
    output: int = 64
    spread: float = 0.0
    prefixes: int = 0
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1:
            raise UserError("option_out_of_range", "prompts and answers have at least one token")
        if not 0 <= self.spread < 1:
            raise UserError("option_out_of_range", f"a spread is a fraction from 0 to below 1, not {self.spread:g}")
        if (self.prefixes > 0) != (self.prefix_tokens > 0):
            raise UserError("option_missing", "shared beginnings need a number of them and their length, both above 0")
        if self.prefix_tokens >= self.prompt * (1 - self.spread):
            message = f"a beginning of {self.prefix_tokens} tokens leaves nothing of the shortest prompt"
            raise UserError("option_conflict", message)


def synthetic(what: Synthetic, count: int, seed: int = 0) -> list[Ask]:
    """Return `count` synthetic requests, all due at time 0."""
    numbers = random.Random(f"synthetic {seed}")
    beginnings = [_tokens(f"{seed} beginning {i}", what.prefix_tokens) for i in range(what.prefixes)]

    def about(size: int) -> int:
        return max(1, round(size * numbers.uniform(1 - what.spread, 1 + what.spread)))

    asks = []
    for i in range(count):
        length, output = about(what.prompt), about(what.output)
        beginning = numbers.choice(beginnings) if beginnings else ()
        asks.append(Ask(0.0, beginning + _tokens(f"{seed} {i}", length - len(beginning)), output))
    return asks


def read(path: Path, count: int | None = None, divisor: int = 1, seed: int = 0) -> list[Ask]:
    """Return the first `count` requests of a trace file, in order of arrival.

    Raises ValueError where the file is none of the three kinds or holds invalid numbers, or `divisor` does not divide a
    hash block; OSError where it cannot be read.
    """
    if divisor < 1:
        raise UserError("option_out_of_range", f"a divisor is at least 1, not {divisor}")
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            asks = list(islice(_parse(path, file, divisor, seed), count))
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise UserError("trace_malformed", f"{path}: {error}") from None
    if not asks:
        raise UserError("trace_malformed", f"{path}: holds no requests")
    first = min(ask.at for ask in asks)
    return sorted((replace(ask, at=ask.at - first) for ask in asks), key=lambda ask: ask.at)


def shifted(asks: Sequence[Ask], by: int) -> list[Ask]:
    """Return the requests with every token replaced by another one, so that a server has none of them in its cache.

    A trace that runs twice otherwise measures the cache. Equal prefixes stay equal, and no id exceeds the largest
    before.
    """
    size = 1 + max((max(ask.prompt) for ask in asks if ask.prompt), default=0)
    low = LOW if size > LOW else 0
    turned = [low + (i - low + by) % (size - low) if i >= low else i for i in range(size)]
    return [replace(ask, prompt=tuple(turned[i] for i in ask.prompt)) for ask in asks]


def within(asks: Sequence[Ask], longest: int) -> list[Ask]:
    """Return the requests whose prompt and answer together have at most `longest` tokens."""
    return [ask for ask in asks if len(ask.prompt) + ask.output <= longest]


def folded(asks: Sequence[Ask], vocabulary: int) -> list[Ask]:
    """Return the requests with every id within a vocabulary; equal ids stay equal. Raises ValueError for a tiny
    vocabulary."""
    if vocabulary <= LOW:
        raise UserError("option_out_of_range", f"a vocabulary of {vocabulary} is too small: {LOW + 1} is the least")
    turn = vocabulary - LOW
    return [
        replace(ask, prompt=tuple(i if i < vocabulary else LOW + (i - LOW) % turn for i in ask.prompt)) for ask in asks
    ]


def _parse(path: Path, file: IO[str], divisor: int, seed: int) -> Iterator[Ask]:
    number, line = 1, file.readline(MAX_LINE)
    if not line.startswith("{"):
        yield from _csv(path, line, file, divisor, seed)
        return
    while line:
        try:
            if not line.isspace():
                yield _json(json.loads(line), divisor, seed)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            missing = f"no {error} in it" if isinstance(error, KeyError) else str(error)
            code: Code = error.code if isinstance(error, UserError) else "trace_malformed"
            raise UserError(code, f"{path}: line {number} is no request of a known kind: {missing}") from None
        number, line = number + 1, file.readline(MAX_LINE)


def _json(value: Any, divisor: int, seed: int) -> Ask:
    if "input_tok_ids" in value:
        ids = value["input_tok_ids"]
        if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
            raise UserError("trace_malformed", "token ids are whole numbers")
        kept = tuple(ids[: _shorter(len(ids), divisor)])
        return Ask(_seconds(value["arrival_time_ns"] / 1e9), kept, _shorter(value["output_toks"], divisor))
    if HASH_BLOCK % divisor:
        message = f"a block of {HASH_BLOCK} tokens cannot be divided by {divisor}: a power of two would do"
        raise UserError("option_out_of_range", message)
    length, block = _shorter(value["input_length"], divisor), HASH_BLOCK // divisor
    hashes = value["hash_ids"]
    if len(hashes) != -(-length // block):
        raise UserError("trace_malformed", f"{len(hashes)} hash blocks for a prompt of {value['input_length']} tokens")
    tokens = [token for each in hashes for token in _tokens(f"{seed} block {int(each)}", block)]
    return Ask(_seconds(value["timestamp"] / 1e3), tuple(tokens[:length]), _shorter(value["output_length"], divisor))


def _csv(path: Path, header: str, file: IO[str], divisor: int, seed: int) -> Iterator[Ask]:
    if [name.strip() for name in header.split(",")] != ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]:
        message = f"{path}: neither JSON lines nor columns TIMESTAMP,ContextTokens,GeneratedTokens"
        raise UserError("file_wrong_kind", message)
    for number, row in enumerate(csv.reader(file), 2):
        try:
            time, context, output = row
            at = datetime.fromisoformat(time.strip()[:26]).timestamp()  # fractions of a microsecond are of no use
            prompt = _tokens(f"{seed} row {number}", _shorter(int(context), divisor))
            yield Ask(at, prompt, _shorter(int(output), divisor))
        except (ValueError, TypeError) as error:
            raise UserError("trace_malformed", f"{path}: line {number} is no request: {error}") from None


def _shorter(length: Any, divisor: int) -> int:
    """Return a length over the divisor, at least one token. Raises ValueError for an invalid length."""
    if type(length) is not int or not 0 <= length <= MAX_TOKENS:
        raise UserError("trace_malformed", f"a length is a whole number up to {MAX_TOKENS}, not {length!r}")
    return max(1, -(-length // divisor))


def _seconds(value: float) -> float:
    if not 0 <= value < 1e12:
        raise UserError("trace_malformed", f"a time of {value!r} s")
    return float(value)


def _tokens(seed: str, count: int) -> tuple[int, ...]:
    """Return `count` ids that depend on the seed alone; a smaller count gives a prefix of a larger one's."""
    numbers = random.Random(seed)
    return tuple(LOW + int(numbers.random() * (HIGH - LOW)) for _ in range(count))
