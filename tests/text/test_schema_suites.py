"""Suites of schemas with instances: no invalid instance is accepted, and the schemas that are refused are known.

JSON-Schema-Test-Suite of draft 2020-12, without its optional part, and 500 schemas of MaskBench. A refusal is an error
before any token. Of the first suite each refused schema is in a file, which may only become shorter; of real schemas
their share is bounded. `TEST_SCHEMA_EVERY=1` judges all rather than a sample, and writes the figures.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from attar.protocol.grammar import Grammar
from attar.text import _proof_child, grammars
from attar.text.grammars import GrammarError, Vocabulary

EVERY = int(os.environ.get("TEST_SCHEMA_EVERY", "12"))
BYTES = Vocabulary.make([bytes([byte]) for byte in range(256)], (), ())
REFUSED = Path(__file__).with_name("schema_suite_refused.txt")
MOST_REFUSED = 663  # cases of the suite
MOST_REFUSED_REAL = 0.13  # of real schemas


class Group(NamedTuple):
    """A schema, and instances with their verdicts."""

    name: str
    schema: Any
    tests: list[dict[str, Any]]


@dataclass
class Verdicts:
    """Refused schemas, and what was said of instances of the others: how many times it was right, and where not."""

    refused: list[Group] = field(default_factory=list)
    right: int = 0
    accepted: list[str] = field(default_factory=list)  # although invalid
    rejected: list[str] = field(default_factory=list)  # although valid


def text_of(instance: Any) -> bytes:
    """A value as JSON text. llguidance takes a DEL as an escape alone."""
    return json.dumps(instance, ensure_ascii=False).replace("\x7f", "\\u007f").encode("utf-8", "surrogatepass")


def fits(start: Any, text: bytes) -> bool:
    found = start.deep_copy()
    return bool(found.try_consume_tokens(list(text)) == len(text) and found.is_accepting())


def judge(groups: Iterable[Group]) -> Verdicts:
    found = Verdicts()
    for group in groups:
        grammar = Grammar.json_schema(group.schema)
        try:
            _proof_child.prove(BYTES, grammar)
        except GrammarError:
            found.refused.append(group)
            continue
        start = grammars.matcher(BYTES, grammar)
        for test in group.tests:
            accepted = fits(start, text_of(test["data"]))
            if accepted == test["valid"]:
                found.right += 1
            else:
                (found.accepted if accepted else found.rejected).append(f"{group.name}: {test['description']}")
    return found


def lines(shared: Path, name: str) -> list[Any]:
    with lzma.open(shared / "data" / "schemas" / name) as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def suite(shared: Path) -> list[Group]:
    files = lines(shared, "json_schema_test_suite_2020-12.jsonl.xz")
    groups = [
        Group(f"{Path(file['file']).stem}: {group['description']}", group["schema"], group["tests"])
        for file in files
        if file["file"].startswith("tests/") and "/optional/" not in file["file"]
        for group in file["content"]
    ]
    return groups[::EVERY]


@pytest.fixture(scope="module")
def real(shared: Path) -> list[Group]:
    groups = lines(shared, "maskbench_500.jsonl.xz")
    return [Group(group["name"], group["schema"], group["tests"]) for group in groups][::EVERY]


@pytest.fixture(scope="module")
def of_suite(suite: list[Group]) -> Verdicts:
    return judge(suite)


@pytest.fixture(scope="module")
def of_real(real: list[Group]) -> Verdicts:
    return judge(real)


def told(name: str, groups: list[Group], found: Verdicts) -> None:
    print(
        f"\n{name}: {len(groups)} schemas, {len(found.refused)} refused with "
        f"{sum(len(group.tests) for group in found.refused)} cases; {found.right} right, "
        f"{len(found.accepted)} invalid accepted, {len(found.rejected)} valid rejected"
    )


def test_no_invalid_case_of_the_suite_is_accepted(suite: list[Group], of_suite: Verdicts) -> None:
    told("JSON-Schema-Test-Suite", suite, of_suite)
    assert of_suite.accepted == []
    assert of_suite.right > 500 / EVERY
    assert len(of_suite.rejected) <= of_suite.right / 10


def test_the_refused_schemas_of_the_suite_are_those_of_the_list(suite: list[Group], of_suite: Verdicts) -> None:
    known = REFUSED.read_text().splitlines()
    judged = {group.name for group in suite}
    assert [group.name for group in of_suite.refused] == [name for name in known if name in judged]
    assert sum(len(group.tests) for group in of_suite.refused) <= MOST_REFUSED


def test_no_invalid_instance_of_real_schemas_is_accepted(real: list[Group], of_real: Verdicts) -> None:
    told("MaskBench", real, of_real)
    assert of_real.accepted == []
    assert of_real.right > 1000 / EVERY
    assert len(of_real.refused) <= MOST_REFUSED_REAL * len(real) + (EVERY > 1)


def test_instances_of_refused_schemas_are_well_formed_json(of_suite: Verdicts, of_real: Verdicts) -> None:
    """So a tool whose schema is refused still gets every argument that the schema allows, if it is not strict."""
    start = grammars.matcher(BYTES, Grammar.json_object())
    count = 0
    for group in (*of_suite.refused, *of_real.refused):
        for test in group.tests:
            if isinstance(test["data"], dict):
                count += 1
                assert fits(start, text_of(test["data"])), group.name
            else:
                assert not fits(start, text_of(test["data"])), group.name
    assert count > 100 / EVERY
