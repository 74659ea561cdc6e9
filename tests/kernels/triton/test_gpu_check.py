"""The script that checks and times the kernels on a card, rehearsed: tiny shapes, interpreted, figures without meaning.

On a card it runs for minutes that are lent, so a mistake in it costs more than one in a kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here: `make test-triton` has it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 interprets the kernels: `make test-triton` sets it", allow_module_level=True)

import gpu_check
from gpu import engine, figures, models, report, slices, start, timing, tune

from attar.kernels.triton import tuning

PLANNED = 0.02  # of a step's time: what plan/ counts as bytes besides


def rehearse(out: Path, *arguments: str) -> dict[str, list[dict[str, object]]]:
    status = gpu_check.main([str(out), "--minutes", "60", *arguments])
    found: dict[str, list[dict[str, object]]] = json.loads((out / "gpu_check.json").read_text(encoding="utf-8"))
    assert not found["errors"]
    assert not [check for check in found["checks"] if not check["ok"]]
    assert status == 0
    return found


def test_checks_and_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some checks, and every part but whole models."""
    monkeypatch.setattr(slices, "STRIDE", 20)
    monkeypatch.setattr(figures, "MANY_ROWS", 20)
    monkeypatch.setattr(figures, "LONG", 16)
    monkeypatch.setattr(figures, "CACHES", ((2, 16),))
    monkeypatch.setattr(engine, "checks", lambda: iter(()))
    monkeypatch.setattr(models, "products", lambda name: {"down": (128, 256)})
    parts = ("few_rows", "decode_attention", "many_rows", "blocks_by_torch", "prefill_attention", "guesses", "writing")
    found = rehearse(tmp_path, "--only", *parts)
    assert len(found["checks"]) >= 3
    assert not found["left_out"]
    work = {str(row["work"]) for row in found["measured"]}
    assert {"w4g128 down, 1 rows", "qserve-g128 down, 20 rows", "decode attention, 2 x 16, int4"} <= work
    assert {f"write 2 rows, {kept}" for kept in figures.KEPT} <= work


def test_whole_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "BATCHES", (1,))
    monkeypatch.setattr(figures, "LONG", 8)
    for schemes in ("WHOLE", "SERVED"):
        monkeypatch.setattr(figures, schemes, ("qserve-g128",))
    found = rehearse(tmp_path, "--skip-checks", "--only", "whole_model", "served")
    served = [row for row in found["measured"] if str(row["work"]).startswith("served qserve")]
    assert [str(row["work"]).rsplit(", ", 1)[1] for row in served] == ["greedy", "drawn"]
    assert all(float(str(row["us"])) > float(str(row["host_us"])) > 0 for row in served)


def test_what_there_is_no_time_for_is_listed(tmp_path: Path) -> None:
    found = rehearse(tmp_path, "--minutes", "0", "--only", "few_rows")
    assert not found["checks"]
    assert not found["measured"]
    assert "few_rows" in found["left_out"]
    assert len(found["left_out"]) > 5


def few_figures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three parts, of which the second fails; what is begun is noted."""
    begun = []

    def good(roofs: object) -> Iterator[dict[str, object]]:
        begun.append("good")
        yield {"work": "good", "us": 1.0}

    def bad(roofs: object) -> Iterator[dict[str, object]]:
        begun.append("bad")
        yield {"work": "half", "us": 1.0}
        raise RuntimeError("an illegal memory access")

    def last(roofs: object) -> Iterator[dict[str, object]]:
        begun.append("last")
        yield {"work": "last", "us": 1.0}

    monkeypatch.setattr(gpu_check, "PARTS", (good, bad, last))
    return begun


def test_a_part_that_fails_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = few_figures(monkeypatch)
    monkeypatch.setattr(timing, "ROOFS", {"copy": lambda: 1.0, "fp8": lambda: [][0]})
    assert gpu_check.main([str(tmp_path), "--skip-checks"]) == 1
    found = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert begun == ["good", "bad", "last"]
    assert [row["work"] for row in found["measured"]] == ["good", "half", "last"]
    assert [error["name"] for error in found["errors"]] == ["roof fp8", "bad"]


def test_a_part_that_breaks_the_card_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process goes on with what comes after it; here the same one."""
    begun, commands = few_figures(monkeypatch), list[list[str]]()
    monkeypatch.setattr(report, "alive", lambda: False)
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    gpu_check.main([str(tmp_path), "--skip-checks"])
    assert begun == ["good", "bad"]
    assert commands[0][2:4] == [str(tmp_path), "--resume"]
    monkeypatch.setattr(report, "alive", lambda: True)
    assert gpu_check.main(commands[0][2:]) == 1
    found = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert begun == ["good", "bad", "last"]
    assert [row["work"] for row in found["measured"]] == ["good", "half", "last"]


def test_checks_of_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its own; what fails, hangs or is not reached is told apart."""

    def fails() -> tuple[float, float]:
        raise ValueError("no")

    every = {"a": lambda: (0.0, 1.0), "b": fails, "c": lambda: (2.0, 1.0), "d": lambda: (0.0, 1.0), "e": fails}
    monkeypatch.setattr(slices, "in_order", lambda: list(every.items()))
    files = [tmp_path / f"{i}.jsonl" for i in range(2)]
    slices.work(files[0], 0, 2, time.time() + 60, 0)
    commands: list[list[str]] = []
    monkeypatch.setattr(slices, "alive", lambda: False)
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    slices.work(files[1], 1, 2, time.time() + 60, 0)
    assert [command[-1] for command in commands] == ["1", "2"], "it goes on behind what broke its hold of the card"
    files[1].write_text(files[1].read_text(encoding="utf-8") + '{"name": "hangs"}\n{"na', encoding="utf-8")
    ended, failed, left = slices.merged([*every, "hangs", "f"], files)
    assert [(row["name"], row["ok"]) for row in ended] == [("a", True), ("c", False), ("d", True)]
    assert [(row["name"], row["error"]) for row in failed] == [
        ("b", "ValueError: no"), ("e", "ValueError: no"), ("hangs", "its process ended or hung")
    ]  # fmt: skip
    assert left == ["f"]
    slices.work(tmp_path / "late.jsonl", 0, 1, time.time() - 1, 0)
    assert not (tmp_path / "late.jsonl").read_text(encoding="utf-8")


def test_the_first_token_of_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is written, and a process loads it."""
    size = start.write("tiny", tmp_path / "model")
    assert sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")) == size
    found = start.begun(tmp_path / "model", tmp_path / "triton")
    stages = list(found.values())
    assert list(found) == ["imported", "loaded", "measured", "recorded", "token"]
    assert stages == sorted(stages)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="a process that loads the model ended with 1"):
        start.begun(tmp_path / "model", tmp_path / "triton")


def test_tuning_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "products", lambda name: {"qkv": (64, 256), "down": (128, 256)})
    rehearse(tmp_path, "--tune", "w4a16", "p4a8")
    found = json.loads((tmp_path / "tuned.json").read_text(encoding="utf-8"))
    assert set(found[""]["cuts"]) == {f"{kind} {o}x256" for kind in ("w4a16", "p4a8") for o in (64, 128)}
    monkeypatch.setattr(tuning, "tables", lambda: found)
    assert tuning.config("p4a8", 1, 64, 256, 4) == tuning.Config(**found[""]["cuts"]["p4a8 64x256"][0]["config"])
    assert not rehearse(tmp_path, "--tune", "w4a16", "p4a8")["measured"]


def test_another_way_is_taken_from_where_it_is_faster_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all numbers of rows from there on, not of one by chance."""
    numbers, budget = (1, 2, 4, 8), tune.Budget(1.0)
    monkeypatch.setattr(models, "products", lambda name: {"qkv": (64, 128)})
    monkeypatch.setattr(models, "prepared", lambda scheme, size: [])
    monkeypatch.setattr(tune, "WAYS", {"widened": ("w4g128", numbers)})
    for theirs, wanted in (([1, 9, 1, 1], 4), ([1, 1, 1, 9], tuning.NEVER), ([1, 1, 1, 1], 1)):
        each = iter([time for pair in zip([5] * 4, theirs, strict=True) for time in pair])
        monkeypatch.setattr(tune, "seconds", lambda calls, each=each: float(next(each)))
        assert tune.turn("tiny", "widened", budget) == wanted


def test_the_roof_is_the_plans() -> None:
    """Of few sequences the bytes of weights and cache, of many the products at their own rates."""
    made = models.decoder("tiny", "qserve-g128")
    rates = {"copy": 1e9, "bf16": 1e30, "int8": 1e30, "fp8": 1e30}
    cached = 64 * 2 * 2 * made.config.kv_heads * made.config.head_dim * made.config.layers
    assert models.roof(made, "qserve-g128", 1, 64, rates) == pytest.approx(
        (models.read_bytes(made) + cached) / 1e9, rel=PLANNED
    )
    rates |= {"copy": 1e30, "int8": 1e9}
    assert models.roof(made, "qserve-g128", 8, 64, rates) == pytest.approx(
        8 * 2 * models.multiplications(made) / 1e9, rel=PLANNED
    )
