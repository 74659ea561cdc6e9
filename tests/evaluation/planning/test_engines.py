"""The line of a start of replicas: said where one engine is faster, by headers of a model and a machine's rates."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec

from attar.checkpoints.sources.opening import stored
from attar.cli.several import SLOWER
from attar.evaluation.planning import engines
from attar.kv.schemes import scheme
from attar.plan.rates.profile import NO_OVERHEADS, MachineProfile, Overheads
from attar.plan.rates.step_time import StepModel
from attar.plan.replicas import compare
from attar.protocol.settings import Settings
from tests.pretend_rates import profile

WEIGHTS_DECIDE = profile(overheads=NO_OVERHEADS)
ROWS_DECIDE = profile(overheads=Overheads(0.0, 0.0, 0.0, 1.0))


def test_both_speeds_are_those_of_the_model(demo: Path) -> None:
    settings = Settings(str(demo), "", kv="int8", max_running=8)
    config, storage = stored(demo)
    expected = compare(StepModel(config, storage, scheme("int8"), WEIGHTS_DECIDE), 2, 8, min(1024, config.context))
    said = engines.sentence(settings, 2, WEIGHTS_DECIDE)
    assert said.startswith("one engine on all cores is faster")
    for number in (f"{expected.one:,.0f} tokens/s for 8 requests", f"{expected.several:,.0f} with 2 replicas"):
        assert number in said
    assert engines.sentence(settings, 2, ROWS_DECIDE) == ""


def test_the_command_prints_json_and_nothing_for_a_model_that_is_not_there(demo: Path, tmp_path: Path) -> None:
    def printed(model: Path, rates: MachineProfile) -> str:
        asked = json.dumps([msgspec.to_builtins(Settings(str(model), "")), 2, msgspec.to_builtins(rates)])
        done = subprocess.run(SLOWER, input=asked.encode(), stdout=subprocess.PIPE, check=True)
        found: str = json.loads(done.stdout)
        return found

    assert printed(demo, WEIGHTS_DECIDE) == engines.sentence(Settings(str(demo), ""), 2, WEIGHTS_DECIDE)
    assert printed(tmp_path, WEIGHTS_DECIDE) == ""
