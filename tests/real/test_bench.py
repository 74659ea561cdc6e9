"""The folder of real models and the tables of `bench/real.py`: what is refused, resumed and left empty.

No model is needed.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import real_models
from reals import framework
from reals.framework import Column, Measurement, Ratio, Row, Runs, Table
from reals.setting import Setting
from reals.tables import tables

CONTENT = b"a model"
COUNTED = """
import json, pathlib
path = pathlib.Path({path!r})
path.write_text(path.read_text() + "x" if path.exists() else "x")
print("words before the object")
print(json.dumps({{"rate": {rate} * len(path.read_text())}}))
"""


@pytest.fixture
def manifest(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name whose file is small."""
    model = real_models.RealModel("m.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "a small file")
    monkeypatch.setattr(real_models, "MODELS", {"m": model})
    return "m"


def test_a_file_counts_only_with_its_size_and_hash(manifest: str, tmp_path: Path) -> None:
    def against() -> str:
        return str(real_models.against(manifest, tmp_path))

    assert "ATTAR_REAL_MODELS is not set" in str(real_models.against(manifest, None))
    assert "there is no" in against()
    (tmp_path / "m.gguf").write_bytes(CONTENT + b"!")
    assert "has 8 bytes and not 7" in against()
    (tmp_path / "m.gguf").write_bytes(CONTENT[::-1])
    assert "has SHA-256" in against()
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    assert real_models.against(manifest, tmp_path) is None


def test_without_a_script_it_says_which_files_it_wants(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, real_models.__file__], capture_output=True, text=True, env={"ATTAR_REAL_MODELS": str(tmp_path)}
    )
    assert done.returncode == 1
    assert all(model.file in done.stdout and model.sha256 in done.stdout for model in real_models.MODELS.values())
    assert "make real-models SCRIPT=" in done.stderr


def test_what_a_script_leaves_is_checked(tmp_path: Path) -> None:
    script = tmp_path / "fetch.py"
    script.write_text("import sys, pathlib; pathlib.Path(sys.argv[1], 'SmolLM2-135M-Instruct-Q4_1.gguf').touch()")
    command = [sys.executable, real_models.__file__, "smollm2-135m", "--script", script]
    done = subprocess.run(command, capture_output=True, text=True, env={"ATTAR_REAL_MODELS": str(tmp_path / "models")})
    assert done.returncode == 1
    assert "has 0 bytes and not 98,362,432" in done.stdout


def counted(tmp_path: Path, name: str, rate: int) -> Measurement:
    """A measurement whose figure grows with each run, so that runs are told apart."""
    code = COUNTED.format(path=str(tmp_path / name), rate=rate)
    return Measurement((sys.executable, "-c", code), {"rate": "rate"}, timed=True)


def test_a_table_resumes_and_leaves_cells_empty(tmp_path: Path) -> None:
    ours, theirs = Row("m", "ours", (counted(tmp_path, "a", 6),)), Row("m", "theirs", (counted(tmp_path, "b", 3),))
    broken = Row("m", "broken", (Measurement((sys.executable, "-c", "exit('no luck')"), {"rate": "rate"}),))
    missing = Row("m", "missing", (), "it is not written yet")
    rows = (ours, theirs, broken, missing)
    table = Table("t", "a table", (Column("rate"), Column("other")), rows, (Ratio(ours, theirs, ("rate",)),))
    runs = Runs.open(tmp_path)
    failed = framework.fill(table, runs, 1, lambda text: None)
    assert [list(runs.values(row, "rate").values()) for row in rows] == [[6.0], [3.0], [], []]
    (why,) = failed.values()
    assert "no luck" in why
    again = Runs.open(tmp_path)
    framework.fill(table, again, 3, lambda text: None)
    found = [list(again.values(row, "rate").values()) for row in rows]
    assert found == [[6.0, 12.0, 18.0], [3.0, 6.0, 9.0], [], []]
    assert again.cell(ours, "rate") == 12.0
    assert again.cell(ours, "other") is None
    assert again.quotient(table.ratios[0], "rate") == 2.0
    alone = {"rate": 1.0, "turn": "another", "commit": "", "load_before": 0.0}  # not beside one of ours
    again.add(theirs.measurements[0].key, alone)
    assert again.quotient(table.ratios[0], "rate") == 2.0
    assert framework.filled(table, again).rows == (ours, theirs)
    assert framework.filled(table, again).ratios == table.ratios
    text = framework.shown(table, again, failed)
    assert "m missing\n" in text
    assert "empty, it is not written yet: m missing" in text
    assert again.machine["processor"] in text
    assert all(each.key in text for each in ours.measurements)
    cells = [row["cells"] for row in framework.as_json(table, again, failed)["rows"]]
    assert cells[2:] == [{"rate": None, "other": None}] * 2
    json.dumps(framework.as_json(table, again, failed))


def test_two_programs_fill_one_file(tmp_path: Path) -> None:
    one, other = Runs.open(tmp_path), Runs.open(tmp_path)
    one.add("a", {"rate": 1})
    other.add("b", {"rate": 2})
    one.add("a", {"rate": 3})
    assert Runs.open(tmp_path).runs == {"a": [{"rate": 1}, {"rate": 3}], "b": [{"rate": 2}]}


def test_figures_of_another_machine_are_not_mixed_in(tmp_path: Path) -> None:
    Runs.open(tmp_path).add("key", {"rate": 1})
    known = json.loads((tmp_path / framework.STATE).read_text())
    known["machine"]["processor"] = "another one"
    (tmp_path / framework.STATE).write_text(json.dumps(known))
    with pytest.raises(SystemExit, match="another machine"):
        Runs.open(tmp_path)


def test_every_table_is_made_without_models_and_says_why_it_is_empty(tmp_path: Path) -> None:
    models = {name: tmp_path / model.file for name, model in real_models.MODELS.items()}
    made = tables(Setting(models, tmp_path))
    assert {"gguf", "dense", "activations", "quality", "tasks", "compression", "speed", "start", "chat"} <= set(made)
    for table in made.values():
        assert table.rows, table.name
        assert all(row.reason or row.measurements for row in table.rows), table.name
