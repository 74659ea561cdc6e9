"""Whole tasks on the embedded model: the harness's own figures, the command, what is refused."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval import evaluator
from typer.testing import CliRunner

from attar.checkpoints.receipts.receipt import read_receipt
from attar.checkpoints.sources import hub
from attar.cli.main import app
from attar.compression.runs.pipeline import compress
from attar.evaluation.tasks import run
from attar.evaluation.tasks.catalogue import TaskSource
from attar.evaluation.tasks.run import evaluate_tasks
from tests.errors import user_error
from tests.evaluation.tasks.items import NUMBER, TASKS, write


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the harness returns to attar."""
    found: list[Any] = []
    ask = evaluator.simple_evaluate

    def kept(*args: Any, **named: Any) -> Any:
        found.append(ask(*args, **named))
        return found[-1]

    monkeypatch.setattr(evaluator, "simple_evaluate", kept)
    return found


def test_figures_are_the_harness_own(demo: Path, tmp_path: Path, raw: list[Any]) -> None:
    sources = [TaskSource(name, write(tmp_path, name)) for name in TASKS if name != "ifeval"]
    report = evaluate_tasks(demo, sources, shots=0)
    assert set(report.answers) == {
        "arc_easy", "gsm8k", "hellaswag", "lambada_openai", "mmlu", "piqa", "truthfulqa_mc1", "truthfulqa_mc2",
        "winogrande",
    }  # fmt: skip
    for name, answers in report.answers.items():
        assert answers.items == NUMBER
        for key, figure in answers.figures.items():
            metric = key if "," in key else f"{key},none"
            if name == "mmlu":
                parts = [raw[0]["results"][f"mmlu_{subject}"][metric] for subject in ("abstract_algebra", "anatomy")]
                expected = sum(parts) / len(parts)
            else:
                expected = raw[0]["results"][name][metric]
            assert figure.value == pytest.approx(expected), (name, key)
            assert figure.low is not None
            assert figure.high is not None
            assert figure.low <= figure.value <= figure.high
    shown = report.to_dict()
    assert shown["tasks"]["piqa"]["intervals"]["acc"] is not None
    assert "piqa: 20 items, 0 examples" in report.table()


def test_instructions_count_one_by_one(demo: Path, tmp_path: Path, raw: list[Any]) -> None:
    report = evaluate_tasks(demo, [TaskSource("ifeval", write(tmp_path, "ifeval"))], limit=2)
    for key, figure in report.answers["ifeval"].figures.items():
        assert figure.value == pytest.approx(raw[0]["results"]["ifeval"][f"{key},none"])


def test_examples_come_from_their_split(demo: Path, tmp_path: Path) -> None:
    source = TaskSource("gsm8k", write(tmp_path, "gsm8k", "test"))
    with user_error("task_malformed"):
        evaluate_tasks(demo, [source], limit=1)  # five examples, of the split train
    write(tmp_path, "gsm8k", "train")
    report = evaluate_tasks(demo, [TaskSource("gsm8k", tmp_path)], limit=1)
    assert report.answers["gsm8k"].shots == 5


def test_the_command(demo: Path, tmp_path: Path) -> None:
    path, invoke = write(tmp_path, "piqa"), CliRunner().invoke
    done = invoke(app, ["eval", "demo", "--task", f"piqa={path}", "--limit", "3", "--quiet", "--json"])
    assert done.exit_code == 0, done.output
    expected = evaluate_tasks(demo, [TaskSource("piqa", path)], limit=3).to_dict()
    assert json.loads(done.stdout.splitlines()[-1]) == expected
    for more in (["--task", f"piqa={path}", "--text", str(path)], ["--text", str(path), "--limit", "2"]):
        assert invoke(app, ["eval", "demo", "--quiet", *more]).exit_code == 2


def test_the_command_records_figures_of_the_model_that_it_has_found_once(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = compress(demo, tmp_path / "out", recipe="rtn-w4g32").path
    asked, resolve = [], hub.resolve

    def of_hub(model: Any, **given: Any) -> Path:
        if str(model) != "org/name":
            return resolve(model, **given)
        asked.append(model)
        return output

    monkeypatch.setattr(hub, "resolve", of_hub)
    command = ["eval", "org/name", "--task", f"piqa={write(tmp_path, 'piqa')}", "--record", "--quiet", "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    receipt = read_receipt(output)
    assert receipt is not None
    assert receipt.value["tasks"] == json.loads(done.stdout.splitlines()[-1])["tasks"]
    assert asked == ["org/name"]
    assert CliRunner().invoke(app, [*command, "--limit", "2"]).exit_code == 2
    assert CliRunner().invoke(app, ["eval", "demo", *command[2:]]).exit_code == 2  # it has no receipt


def test_refused(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piqa, other = write(tmp_path, "piqa"), write(tmp_path, "lambada")
    with user_error("task_malformed"):
        evaluate_tasks(demo, [TaskSource("piqa", other)])  # has none of its columns
    with user_error("option_conflict"):
        evaluate_tasks(demo, [TaskSource("piqa", piqa), TaskSource("piqa", piqa)])
    with user_error("context_exceeded"):
        evaluate_tasks(demo, [TaskSource("piqa", piqa)], context=513)
    bad = tmp_path / "mmlu.jsonl"
    bad.write_text('{"question": "?", "subject": "cooking", "choices": ["a", "b", "c", "d"], "answer": 0}')
    with user_error("task_malformed"):
        evaluate_tasks(demo, [TaskSource("mmlu", bad)])

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(run.metadata, "version", absent)
    with user_error("package_missing"):
        evaluate_tasks(demo, [TaskSource("piqa", piqa)])
