"""`attar plan --measure` and `--apply` on the command line: real outputs and divergences of the embedded model."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attar import env
from attar.cli.goals import experiments
from attar.cli.goals.experiments import Experiments, Materials
from attar.cli.main import app
from attar.plan.costs import Storage
from attar.plan.goals import candidates, quality
from attar.plan.goals.candidates import Weights
from attar.plan.goals.halving import Clock, OutOfTime
from attar.plan.goals.search import Configuration
from attar.plan.rates import store
from tests.errors import user_error
from tests.plan.goals.test_search import question
from tests.pretend_rates import profile

RTN = Weights("rtn-w4g128", Storage.named("w4g128"), quality.WEIGHTS["rtn-w4"], recipe="rtn-w4g128")
OWN = Weights("bf16", Storage(), quality.UNCHANGED)
WORDS = "The old captain looked at the sea and said nothing for a long time. "


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "held.txt"
    path.write_text(WORDS * 60)
    return path


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kept rates that has this machine's."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(env, "get", lambda: env.Env(cache=folder))
    now = datetime.now(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
    rates = profile(key=store.key(), measured=now)
    names = ["w8a8", "w4g128", "w4g128-asym", "w3g128", "w3g128-asym"]
    more = {name: rates.products.get(name, rates.products["w4g128"]) for name in names}
    assert store.RatesStore(folder).keep(replace(rates, products={**rates.products, **more}))
    return folder


def quiet(stage: str, done: int, total: int, /) -> None:
    """Show nothing."""


@pytest.fixture
def lab(tmp_path: Path, demo: Path, text: Path) -> Experiments:
    folder = tmp_path / "experiments"
    folder.mkdir()
    materials = Materials(model="demo", path=demo, text=text, calib="self", samples=2)
    return Experiments(question("kl<=1", context=256), materials, folder, quiet, tmp_path / "out")


def run(command: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(app, [*shlex.split(command), "--json", "--quiet"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout.splitlines()[-1])


def test_the_winner_is_written_once(lab: Experiments, tmp_path: Path) -> None:
    out, told = tmp_path / "out", list[str]()
    assert experiments.apply(lab, RTN, told.append) == str(out)
    assert not lab.path(RTN).exists(), "the output was moved"
    before = out.stat().st_ino
    again = Experiments(lab.question, lab.materials, lab.folder, quiet, out)
    assert again.finished == "rtn-w4g128"
    assert again.made(RTN)
    assert experiments.apply(again, RTN, told.append) == str(out)
    assert out.stat().st_ino == before
    other = replace(RTN, label="rtn-w3g128", recipe="rtn-w3g128")
    with user_error("output_exists"):
        experiments.apply(again, other, told.append)
    assert experiments.apply(again, OWN, told.append) == "demo", "what is there is served as it is"


def test_an_output_of_something_else_is_refused(lab: Experiments, tmp_path: Path, tiny: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with user_error("output_exists"):
        experiments.finished(other, lab.materials.path)
    experiments.apply(lab, RTN, lambda _: None)
    with user_error("output_exists"):
        experiments.finished(tmp_path / "out", tiny)


def test_compression_stops_when_its_layers_take_too_long_and_goes_on(lab: Experiments) -> None:
    clock = Clock(1000)
    with pytest.raises(OutOfTime) as late:
        lab.make(RTN, clock, reserve=999.999)
    assert late.value.needed is not None
    assert late.value.needed > 999
    assert not lab.made(RTN)
    seconds, left = lab.notes.get("layers|rtn-w4g128")
    assert seconds > 0
    assert left >= 1
    with pytest.raises(OutOfTime):  # known before anything runs
        lab.make(RTN, Clock(0.5 * seconds * left), 0.0)
    lab.make(RTN, clock, reserve=1.0)
    assert lab.made(RTN)


def test_calibration_text_is_ids_of_one_length(lab: Experiments, text: Path) -> None:
    lab.materials = replace(lab.materials, calib=str(text), samples=1)
    (ids,) = lab.calibration(quiet)
    assert len(ids) == 512
    assert all(isinstance(each, int) for each in ids)


def test_a_divergence_is_measured(lab: Experiments) -> None:
    lab.make(RTN, None)
    before = lab.token_seconds(RTN)
    found = lab.divergence(RTN, "int8", 512, Clock(100))
    assert found.evidence == "measured"
    assert 0.001 < found.low <= found.kl <= found.high < 1
    assert lab.token_seconds(RTN) != before
    of_cache = lab.divergence(OWN, "int8", 512, Clock(100))
    assert 0 <= of_cache.kl < 0.01 < found.kl
    with pytest.raises(OutOfTime):
        lab.divergence(RTN, "int8", 512, Clock(0))


def test_a_plan_is_confirmed_and_written(
    kept: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Experiments, of: Configuration, seconds: float, clock: Clock) -> Mapping[str, float]:
        names = [name for name in of.cells if name[:4] in ("ttft", "tpot", "toke")]
        return {name: 2 * of.cells[name].value for name in names}

    monkeypatch.setattr(Experiments, "load", load)
    monkeypatch.setattr(candidates, "RECIPES", [each for each in candidates.RECIPES if each.method == "rtn"])
    out = tmp_path / "out"
    command = (
        f"plan demo --goal 'kl<=2, tpot<=1s, size<=4.7MB' --context 128 --measure 60s --text {text} --apply {out} "
        f"--samples 2"
    )
    status, said = run(command)
    assert status == 0, said
    assert said["chosen"]["kl"]["evidence"] == "measured"
    assert said["measured"]
    assert {"predicted", "measured", "within"} == set(said["measured"][0]["tpot_p95"])
    assert said["applied"]["path"] == str(out)
    assert said["applied"]["command"].startswith(f"attar serve {out} --kv ")
    kept_plan = json.loads((out / "receipt.json").read_text())["plan"]
    (chosen,) = (each for each in said["measured"] if each["weights"] == said["chosen"]["weights"]
                 and (each["kv"], each["rows"]) == (kept_plan["kv"], kept_plan["rows"]))  # fmt: skip
    speed = kept_plan["quantities"]["tpot_p95"]
    assert (speed["predicted"], speed["measured"]) == (chosen["tpot_p95"]["predicted"], chosen["tpot_p95"]["measured"])
    assert speed["measured"] > speed["predicted"], "the load test of this test takes longer than predicted"
    assert kept_plan["quantities"]["memory"]["measured"] is None, "memory is counted"
    assert [goal["name"] for goal in kept_plan["goals"]] == ["kl", "tpot", "size"]
    again, then = run(command)
    assert (again, then["chosen"]["weights"]) == (0, said["chosen"]["weights"])
    assert then["applied"]["path"] == str(out)


def test_nothing_is_written_where_the_goal_is_missed(kept: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, said = run(f"plan demo --goal tpot<=1us --context 128 --apply {out}")
    assert status == 1
    assert "applied" not in said
    assert not out.exists()


def test_experiments_hold_for_the_same_files_alone(lab: Experiments, text: Path, tmp_path: Path) -> None:
    key = lab.materials.key()
    assert replace(lab.materials).key() == key
    assert replace(lab.materials, samples=3).key() != key
    text.write_text("other")
    os.utime(text, ns=(1, 1))
    assert lab.materials.key() != key


def test_experiments_lie_beside_the_output_or_with_the_rates(lab: Experiments, kept: Path, tmp_path: Path) -> None:
    beside = experiments.place(lab.materials, tmp_path / "model")
    assert beside.parent == tmp_path / "model.plan"
    cached = experiments.place(lab.materials, None)
    assert cached.parent == kept / "plans"
    assert experiments.place(lab.materials, tmp_path / "model") == cached, "what was begun goes on"
    shutil.rmtree(kept)
    assert experiments.place(lab.materials, None).is_dir()
    assert not kept.stat().st_mode & 0o077


def test_old_folders_of_plans_go(lab: Experiments, kept: Path) -> None:
    experiments.place(lab.materials, None)
    others = [kept / "plans" / f"other{number}" for number in range(6)]
    for number, each in enumerate(others):
        each.mkdir()
        os.utime(each, (1000 + number, 1000 + number))
    own = experiments.place(lab.materials, None)
    left = set((kept / "plans").iterdir())
    assert own in left
    assert left == {own, *others[-(experiments.MOST_KEPT - 1) :]}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ("--goal kl<=1 --measure 60s", "option_missing"), ("--goal kl<=1 --measure 5", "option_malformed"),
        ("--goal kl<=1 --measure 1s", "option_out_of_range"), ("--goal kl<=1 --measure 99999d", "option_out_of_range"),
        ("--measure 60s", "option_unused"), ("--apply x", "option_unused"),
        ("--goal kl<=1 --measure 60s --text /nowhere", "file_not_found"),
        ("--goal kl<=1 --apply x --calib /nowhere", "file_not_found"),
        ("--goal kl<=1 --apply x --gpu h100", "option_conflict"),
        ("--goal kl<=1 --apply x --rates y", "option_conflict"),
    ],
)  # fmt: skip
def test_bad_options_have_codes(kept: Path, options: str, code: str) -> None:
    status, said = run(f"plan demo {options}")
    assert (status, said["code"]) == (2, code)


@pytest.mark.slow
def test_a_load_test_serves_every_user(lab: Experiments) -> None:
    asked = question("kl<=1", users=2, context=128)
    served = Experiments(asked, lab.materials, lab.folder, quiet)
    from attar.plan.goals.search import search

    of = next(each for each in search(asked).all if each.weights.recipe is None and each.kv.name == "int8")
    found = served.load(of, 2.0, Clock(120))
    assert {"ttft_p95", "tpot_p95", "tokens_per_second"} <= set(found)
    assert all(value > 0 for value in found.values())
