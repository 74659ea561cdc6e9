"""The table of docs/replicas.md: each feature beside replicas, replay, roles and a disk cache is as alone, or refused.

Engines are real ones of the embedded model, in this process. `role` and `cache-dir` are run by the tests that the
table names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from attar.cli.main import app
from attar.cli.terminal import BAD_INPUT
from attar.engine.blocks import opening
from attar.engine.engine import Engine
from attar.engine.llm.llm import LLM
from attar.protocol.messages import Submit
from attar.protocol.settings import Settings
from tests.cli.test_commands import refused
from tests.engine.blocks import test_moves, test_peers
from tests.engine.conftest import run
from tests.engine.test_resume import FEATURES, answer, llm, make, submit
from tests.errors import user_error
from tests.server.replicas.engines import answered

__all__ = ["llm", "make"]  # fixtures
PAGE = Path(__file__).parents[3] / "docs" / "replicas.md"
COLUMNS = {
    "replica": "`--replicas`", "replay": "continued answer", "role": "`--role`", "cache-dir": "`--cache-dir`",
}  # fmt: skip
ROWS = {
    "n": "`n`", "grammar": "constraints", "tools": "tools", "LoRA": "LoRA adapters", "speculation": "speculation",
    "eviction": "`--kv-eviction`", "retrieval": "`--sparse-attention`", "klt": "`--kv klt2`, `klt4`",
    "tp": "`--tp`, `--pp`",
}  # fmt: skip
EQUAL = "equal"
TABLE: dict[str, dict[str, str]] = {
    **{
        row: dict.fromkeys(COLUMNS, EQUAL)
        for row in ("n", "grammar", "tools", "LoRA", "speculation", "eviction", "retrieval", "klt")
    },
    "tp": {
        "replica": "option_conflict", "replay": "option_conflict", "role": "feature_unsupported",
        "cache-dir": "feature_unsupported",
    },
}  # fmt: skip
"""`equal`, or the code of the refusal at the start."""
RUN_AS = {
    "n": ("n",), "grammar": ("grammar",), "tools": ("tools",), "LoRA": ("LoRA",),
    "speculation": ("speculation", "speculation, grammar"), "eviction": ("KV eviction, sink", "KV eviction, snapkv"),
    "retrieval": ("sparse attention",), "klt": ("klt2",),
}  # fmt: skip
"""The engines and requests of `test_resume.FEATURES` that stand for a row."""
ELSEWHERE = {
    "role": test_peers.test_every_feature_has_the_same_answer,
    "cache-dir": test_moves.test_every_feature_has_the_same_answer_from_disk,
}
"""Tests that run a column for each of FEATURES."""
OPTIONS = {
    "replica": "--replicas 2", "replay": "--replicas 2", "role": "--role decode --prefill-peer unix:/run/prefill",
    "cache-dir": "--cache-dir /var/cache --cache-bytes 1GB",
}  # fmt: skip
EQUAL_CELLS = [(row, column) for row, cells in TABLE.items() for column, cell in cells.items() if cell == EQUAL]
REFUSED_CELLS = [(row, column) for row, cells in TABLE.items() for column, cell in cells.items() if cell != EQUAL]


def test_no_cell_is_missing() -> None:
    assert TABLE.keys() == ROWS.keys()
    assert all(cells.keys() == COLUMNS.keys() for cells in TABLE.values())
    assert len(EQUAL_CELLS) + len(REFUSED_CELLS) == 36
    assert RUN_AS.keys() == {row for row, _ in EQUAL_CELLS}
    assert OPTIONS.keys() == COLUMNS.keys()


@pytest.mark.parametrize("row", RUN_AS)
def test_replicas_answer_as_one_engine(row: str, make: Callable[..., Engine], llm: LLM, tmp_path: Path) -> None:
    for at, feature in enumerate(RUN_AS[row]):
        how, asked = FEATURES[feature]
        asks = [seeded(submit(llm, asked), f"a{number}", number) for number in range(4)]
        one = make(**how)
        alone = {each.id: answer(run(one, [each])) for each in asks}
        told = answered([make(**how), make(**how)], asks, folder(tmp_path, at))
        assert {id: answer(events) for id, events in told.events.items()} == alone
        assert all(told.routed), "an engine had nothing to do"


@pytest.mark.parametrize("row", RUN_AS)
def test_an_answer_goes_on_elsewhere_as_it_began(
    row: str, make: Callable[..., Engine], llm: LLM, tmp_path: Path
) -> None:
    for at, feature in enumerate(RUN_AS[row]):
        how, asked = FEATURES[feature]
        ask = submit(llm, asked)
        alone = answer(run(make(**how), [ask]))
        told = answered([make(**how), make(**how)], [ask], folder(tmp_path, at), dies_at=5)
        assert answer(told.events["a"]) == alone
        assert told.replays["continued"] >= 1


@pytest.mark.parametrize(("row", "column"), [cell for cell in EQUAL_CELLS if cell[1] in ELSEWHERE])
def test_other_columns_are_run_by_their_tests(row: str, column: str) -> None:
    (mark,) = (each for each in ELSEWHERE[column].pytestmark if each.name == "parametrize")
    name, values = mark.args
    assert name == "feature"
    assert set(RUN_AS[row]) <= set(values)


@pytest.mark.parametrize(("row", "column"), REFUSED_CELLS)
@pytest.mark.parametrize("processes", ["--tp 2", "--pp 2"])
def test_refusals_are_at_the_start_and_name_both(row: str, column: str, processes: str) -> None:
    done = CliRunner().invoke(app, ["serve", "demo", *OPTIONS[column].split(), *processes.split(), "--json"])
    refused(done, BAD_INPUT, TABLE[row][column], as_json=True)
    for words in (OPTIONS[column], processes):
        assert words.split()[0] in done.output


@pytest.mark.parametrize("given", [{"cache_dir": "/var/cache"}, {"role": "decode", "prefill_peer": "unix:/run/p"}])
def test_an_engine_refuses_them_too(given: dict[str, Any]) -> None:
    with user_error("feature_unsupported", "--tp"):
        opening.check(Settings("model", "", tp=2, **given), "--an-option")


def test_the_page_has_the_table() -> None:
    assert page() in PAGE.read_text()


def page() -> str:
    """The table in Markdown."""
    lines = [["feature", *COLUMNS.values()], ["---"] * (1 + len(COLUMNS))]
    for row, cells in TABLE.items():
        told = (cell if cell == EQUAL else f"refused (`{cell}`)" for cell in (cells[column] for column in COLUMNS))
        lines.append([ROWS[row], *told])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- |", "|---|").replace(" --- |", "---|")


def seeded(ask: Submit, id: str, number: int) -> Submit:
    """A request with an id and a seed of its own."""
    seed = (ask.params.seed or 0) + number
    return msgspec.structs.replace(ask, id=id, params=replace(ask.params, seed=seed))


def folder(path: Path, number: int) -> Path:
    made = path / str(number)
    made.mkdir()
    return made
