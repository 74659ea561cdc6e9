"""Allocation: measurements against whole forward passes, targets kept, fused linears together, the walk's output as
promised, and a killed run that goes on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attar.checkpoints.folder import Folder
from attar.checkpoints.receipts.receipt import read_receipt
from attar.checkpoints.sources import hf, opening
from attar.checkpoints.writer import MAX_SHARD, Workspace
from attar.compression.calibration import domain, gradients, importance
from attar.compression.calibration import texts as calibrate
from attar.compression.outputs.folder import FolderOutput
from attar.compression.recipe.methods import Gptq, Rtn
from attar.compression.recipe.recipe import Recipe
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.compression.request.request import CompressionRequest, Target, parse_candidates
from attar.compression.request.resolve import open_source, resolve
from attar.compression.resume import Log
from attar.compression.rotation import rotation, spinquant_training
from attar.compression.runs import pipeline
from attar.compression.runs.pipeline import Compressed, compress, compress_request
from attar.compression.runs.run import Run
from attar.compression.search import allocate, bit_budget, knapsack, sensitivity
from attar.compression.search.allocate import Allocation, Allocator, Storage
from attar.compression.search.sensitivity import Experiment, Trial, apart
from attar.compression.search.target import Group, groups_of, rounding_for
from attar.compression.solvers.rounding import rtn
from attar.formats.packed import PackedTensor, codec
from attar.kernels.operands import Linear
from attar.metrics.measure import measure
from attar.model import assembly
from attar.text.tokenizer import Tokenizer
from tests.compression.test_experts import write
from tests.errors import user_error

Ids = list[list[int]]


class Stop(Exception):
    pass


CANDIDATES = ("w2g32", "w4g64", "w8g64")

SAME_TABLES = 3e-3  # relative difference of a divergence from the original, to that from the same with rotated tables
SAME_FILE = 1e-3  # the same of a model that was written and read again
SAME_PASS = 1e-4  # relative difference of a divergence, restarted in the middle and in float32, to the whole in float64


def schemes(names: tuple[str, ...] = CANDIDATES):  # type: ignore[no-untyped-def]
    return parse_candidates(",".join(names))


def trial_of(folder: Path, ids: Ids, file: Path, recipe: str = "rtn-w4g64") -> Trial:
    decoder, plan = hf.load(folder, torch.float32), load_recipe(recipe)
    groups = groups_of(decoder, plan)
    log = Log(file, "x")
    experiment = Experiment(groups, schemes(), rounding_for(plan), *apart(torch.tensor(ids)))
    return Trial(decoder, experiment, log, lambda: None)


def chosen(
    model: Path, recipe: str, target: Target, texts: tuple[Tensor, Tensor], file: Path, **also: Any
) -> Allocation:
    decoder, candidates = hf.load(model, torch.float32), also.pop("candidates", schemes())
    target, storage = replace(target, candidates=candidates), Storage(**also)
    return Allocator(decoder, load_recipe(recipe), target, texts, file, storage).choose(decoder)


def test_divergences_are_those_of_whole_passes(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """Against `metrics.measure` of a decoder whose weights were put in by hand, on the tokens that allocation keeps for
    measuring: the last two of eight sequences."""
    trial = trial_of(tiny, calibration, tmp_path / "log")
    alone = trial.alone()
    base = hf.load(tiny, torch.float32)
    assert trial.tokens == 2 * 32

    def oracle(choice: dict[int, int]) -> float:
        model = hf.load(tiny, torch.float32)
        for g, c in choice.items():
            for block in model.blocks:
                for linear in block.linears():
                    if linear.name in trial.groups[g].linears:
                        assert isinstance(linear.weight, torch.Tensor)
                        linear.weight = codec("int").quantize(linear.weight, schemes()[c])
        # Windows of a measurement leave out the last position, which predicts nothing that is there.
        return float(measure(model, [[*row, 0] for row in calibration[-2:]], base=base).figures["kl_mean"].value)

    for g, c in ((0, 0), (5, 1), (11, 0)):
        assert alone[g][c] == pytest.approx(oracle({g: c}), rel=SAME_PASS)
    choice = (0, 1, 2, 0) * 3
    assert trial.whole(choice) == pytest.approx(oracle(dict(enumerate(choice))), rel=SAME_PASS)
    steps = trial.neighbours(choice)
    assert [sorted(row) for row in steps] == [[1], [0, 2], [1], [1]] * 3
    changed = (*choice[:5], 2, *choice[6:])
    assert steps[5][2] == pytest.approx(oracle(dict(enumerate(changed))), rel=SAME_PASS)


def test_what_is_not_chosen_for_is_part_of_divergences_of_the_whole(
    tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    """A rounded output matrix and an override, against weights put in by hand; alone a group is what it was."""
    down = "model.layers.1.mlp.down_proj"
    plan = recipe_from_dict({"recipe": "rtn-w4g64", "head": "int4", "overrides": [{"match": down, "scheme": "w2g32"}]})
    output = FolderOutput(hf.Checkpoint.open(tiny), plan)

    def trial(name: str, output: FolderOutput | None) -> Trial:
        decoder = hf.load(tiny, torch.float32)
        log, texts = Log(tmp_path / name, "x"), apart(torch.tensor(calibration))
        experiment = Experiment(groups_of(decoder, plan), schemes(), Rtn(), *texts, output)
        return Trial(decoder, experiment, log, lambda: None)

    here, again, without = trial("here", output), trial("again", output), trial("without", None)
    assert here.alone() == again.alone() == without.alone()
    choice = (1, 2, 2) * 3 + (1, 2)
    model = hf.load(tiny, torch.float32)
    chosen = {name: schemes()[c] for group, c in zip(here.groups, choice, strict=True) for name in group.linears}
    rounded = {linear.name: linear for block in model.blocks for linear in block.linears()} | {"lm_head": model.head}
    for name, scheme in ({**chosen, down: output.schemes[down], "lm_head": output.schemes["lm_head"]}).items():
        weight = rounded[name].weight
        assert isinstance(weight, torch.Tensor)
        assert scheme is not None
        rounded[name].weight = rtn.solve(weight.to(getattr(torch, scheme.scale_dtype)), scheme)
    base = hf.load(tiny, torch.float32)
    want = float(measure(model, [[*row, 0] for row in calibration[-2:]], base=base).figures["kl_mean"].value)
    assert here.whole(choice) == pytest.approx(want, rel=SAME_PASS)
    assert without.whole(choice) < 0.9 * want
    steps = here.neighbours(choice)
    for g, c in ((0, 2), (10, 1)):
        assert steps[g][c] == pytest.approx(again.whole((*choice[:g], c, *choice[g + 1 :])), rel=SAME_PASS)


@pytest.mark.parametrize(
    "name, recipe, candidates, head, given",
    [
        ("out", "rtn-w4g64", CANDIDATES, "int4", False),
        ("out.gguf", "q4_0", ("q4_0", "q5_0", "q8_0"), None, False),
        ("out.gguf", "q4_0", ("q4_0", "q5_0", "q8_0"), None, True),
    ],
)
def test_the_divergence_in_the_receipt_is_that_of_the_output(
    name: str, recipe: str, candidates: tuple[str, ...], head: str | None, given: bool, tiny: Path, calibration: Ids,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Of rounding to nearest, where the walk adds nothing: the output matrix, a file's embedding and its importances,
    or those of a file, are in both."""
    imatrix = tmp_path / "m.dat" if given else None
    if imatrix is not None:
        importance.make(tiny, imatrix, calibration=[[5, 6, 7, 8] * 8])
    compress_request(
        CompressionRequest(
            tiny,
            tmp_path / name,
            recipe=recipe,
            head=head,
            target=Target(bits=5.5, candidates=schemes(candidates)),
            calibration=calibration,
            imatrix=imatrix,
        )
    )
    found = read_receipt(tmp_path / name)
    assert found is not None
    made, base = opening.load(tmp_path / name, torch.float32), hf.load(tiny, torch.float32)
    kl = float(measure(made, [[*row, 0] for row in calibration[-2:]], base=base).figures["kl_mean"].value)
    assert found.value["allocation"]["kl"] == pytest.approx(kl, rel=SAME_FILE)
    assert found.value["allocation"]["kl_finished"] == kl
    assert found.value["allocation"]["without"] == []


def test_candidates_of_every_form_are_rounded_as_the_walk_does(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ is not left out where a scheme is no grid."""

    def refuse(*rest: object, **options: object) -> None:
        raise AssertionError("rounded to nearest")

    monkeypatch.setattr(rtn, "solve", refuse)
    decoder, plan = hf.load(tiny, torch.float32), load_recipe("gptq-w4g64")
    candidates = schemes(("q4_0", "nf4", "lut3", "nvfp4", "qserve-g64"))
    texts, log = apart(torch.tensor(calibration)), Log(tmp_path / "log", "x")
    experiment = Experiment(groups_of(decoder, plan)[:2], candidates, rounding_for(plan), *texts)
    trial = Trial(decoder, experiment, log, lambda: None)
    assert all(kl > 0 for row in trial.alone() for kl in row)


def test_the_model_is_as_it_was_afterwards(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    decoder, plan = hf.load(tiny, torch.float32), load_recipe("gptq-w4g64")
    before = {linear.name: linear.weight for block in decoder.blocks for linear in block.linears()}
    texts = apart(torch.tensor(calibration))
    Allocator(decoder, plan, Target(bits=4.5, candidates=schemes()), texts, tmp_path / "log").choose(decoder)
    after = {linear.name: linear.weight for block in decoder.blocks for linear in block.linears()}
    assert all(after[name] is weight for name, weight in before.items())


def test_kept_candidates_are_those_that_were_rounded(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every form, of overrides too; a block of which none are kept is rounded on what the others give it."""
    down = "model.layers.1.mlp.down_proj"
    plan = recipe_from_dict({"recipe": "gptq-w4g64", "overrides": [{"match": down, "scheme": "w3g64-asym"}]})
    output, texts = FolderOutput(hf.Checkpoint.open(tiny), plan), apart(torch.tensor(calibration))
    candidates = schemes(("w3g64", "q4_0", "nf4", "lut3", "nvfp4", "qserve-g64", "fp8-block"))
    rounded, round_one = list[str](), Trial._rounded

    def watched(trial: Trial, linear: Linear, *rest: Any) -> Any:
        rounded.append(linear.name)
        return round_one(trial, linear, *rest)

    def same(one: PackedTensor, other: PackedTensor) -> bool:
        parts = ((part, other.parts[name]) for name, part in one.parts.items())
        return one.scheme == other.scheme and all(torch.equal(a, b) for a, b in parts)

    def packed() -> list[PackedTensor]:
        decoder, log = hf.load(tiny, torch.float32), Log(tmp_path / "log", "x")
        experiment = Experiment(groups_of(decoder, plan), candidates, Gptq(), *texts, output)
        trial = Trial(decoder, experiment, log, lambda: None, keeps=True)
        trial.alone()
        every = [*trial._packed.values(), *(row for _, row in trial._fixed)]
        return [each for row in every for each in row]

    monkeypatch.setattr(Trial, "_rounded", watched)
    first = packed()
    assert len(rounded) == (3 * 7 - 1) * len(candidates) + 1
    rounded.clear()
    assert all(map(same, first, packed()))
    assert not rounded
    shutil.rmtree(Log(tmp_path / "log", "x").folder / "block-1")
    assert all(map(same, first, packed()))
    assert {name.split(".")[2] for name in rounded} == {"1"}
    assert not Log(tmp_path / "log", "of something else").folder.exists()


GOAL = 0.5


def towards_a_kl(tiny: Path, out: Path, calibration: Ids, **also: Any) -> Compressed:
    target = replace(also.pop("target", Target(kl=GOAL)), candidates=also.pop("candidates", schemes()))
    settings = {"recipe": "rtn-w4g64", "target": target} | also
    return compress_request(CompressionRequest(tiny, out, calibration=calibration, **settings))


def table_of(out: Path) -> dict[str, Any]:
    """What the receipt says of the choice."""
    found = read_receipt(out)
    assert found is not None
    table: dict[str, Any] = found.value["allocation"]
    return table


def weights_of(out: Path) -> bytes:
    return (out / "model.safetensors" if out.is_dir() else out).read_bytes()


def reached(monkeypatch: pytest.MonkeyPatch, *divergences: float) -> list[float]:
    """Let outputs have these divergences, in turn; returns those that nobody has asked for yet."""
    left = list(divergences)
    monkeypatch.setattr(Run, "divergence", lambda run, ids: left.pop(0))
    return left


def kill_walk(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Kill whoever begins so many walks, the first of which is 1."""
    begun, walk = list[int](), Run.walk

    def killed(run: Run) -> None:
        begun.append(1)
        if len(begun) == number:
            raise KeyboardInterrupt
        walk(run)

    monkeypatch.setattr(Run, "walk", killed)


def test_an_output_that_misses_its_target_of_kl_is_made_anew_with_more_bits(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured group by group is not all that the walk does."""
    plain = towards_a_kl(tiny, tmp_path / "plain", calibration)
    assert plain.reached is not None
    assert plain.reached <= GOAL
    assert plain.warnings == ()
    before = table_of(tmp_path / "plain")
    left = reached(monkeypatch, 0.75, 0.4)
    done = towards_a_kl(tiny, tmp_path / "done", calibration)
    assert not left
    assert done.reached == 0.4
    assert done.warnings == ()
    assert done.bits_per_weight > plain.bits_per_weight
    table = table_of(tmp_path / "done")
    assert table["kl_aims"] == [GOAL, pytest.approx(bit_budget.SLACK * before["kl"] * GOAL / 0.75)]
    assert table["kl"] <= table["kl_aims"][1]
    assert table["kl_missed"] == [0.75]
    assert not list(tmp_path.glob(".done*"))

    for name in ("noted", "before"):  # killed once it is noted that less is aimed for, and just before
        reached(monkeypatch, 0.75)
        with monkeypatch.context() as patch:
            if name == "noted":
                kill_walk(patch, 2)
            else:
                patch.setattr(bit_budget.Allocated, "note", lambda found: _interrupt())
            with pytest.raises(KeyboardInterrupt):
                towards_a_kl(tiny, tmp_path / name, calibration)
        left = reached(monkeypatch, *[0.75] * (name == "before"), 0.4)
        resumed = towards_a_kl(tiny, tmp_path / name, calibration)
        assert not left
        assert resumed.records == done.records
        assert table_of(tmp_path / name) == table
        assert weights_of(tmp_path / name) == weights_of(tmp_path / "done")


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_rotation_is_learned_once_for_all_walks(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And candidates that were kept are those of the rotated model: chosen anew, the output is another's but no worse
    than was measured."""
    learned, optimize = list[str](), spinquant_training.learn
    kept = list[bool]()

    def learn(view: Any, ids: Tensor, options: Any, folder: Path, name: str, seed: int) -> Any:
        kept.append(any(folder.glob("rotations-*")))
        learned.append(name)
        return optimize(view, ids, options, folder, name, seed)

    monkeypatch.setattr(spinquant_training, "learn", learn)
    left = reached(monkeypatch, 0.75, 0.4)
    recipe = recipe_from_dict({"recipe": "spinquant-w4g64", "online": False, "rotation_steps": 2})
    done = towards_a_kl(tiny, tmp_path / "out", calibration, recipe=recipe)
    assert not left
    assert done.reached == 0.4
    assert kept == [False, True]
    assert len(set(learned)) == 1
    table = table_of(tmp_path / "out")
    assert table["without"] == ["learned rotation"]
    assert table["kl"] <= table["kl_aims"][1]


def test_what_is_measured_is_another_seeds(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """Measurements of one rotation are not taken for another's."""
    plan, texts = load_recipe("rotate-w4g64"), apart(torch.tensor(calibration))
    source, found = hf.Checkpoint.open(tiny, torch.float32), set[str]()
    for seed in range(8):
        view = rotation.rotated(source, plan, seed)
        model = assembly.build(view.config, view)
        found.add(Experiment(groups_of(model, plan), schemes(), rounding_for(plan), *texts).fingerprint(model))
    assert len(found) == 8


def test_no_walk_is_made_twice(tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that is missed by little, of candidates whose next choice measures much less."""
    left, choices, walk = reached(monkeypatch, *[1.01 * GOAL] * bit_budget.WALKS), list[Recipe](), Run.walk
    monkeypatch.setattr(Run, "walk", lambda run: (choices.append(run.plan), walk(run)))
    towards_a_kl(tiny, tmp_path / "out", calibration, candidates=schemes(("w2g32", "w8g64")))
    assert not left
    assert len({plan.overrides for plan in choices}) == bit_budget.WALKS
    assert table_of(tmp_path / "out")["kl"] < table_of(tmp_path / "out")["kl_aims"][-1]


def test_candidates_that_have_no_room_are_told_before_they_are_rounded(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    monkeypatch.delattr(Trial, "alone")
    with user_error("disk_full"):
        towards_a_kl(tiny, tmp_path / "out", calibration)


def test_an_output_that_always_misses_its_target_says_so(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = reached(monkeypatch, *[0.75] * bit_budget.WALKS)
    missed = towards_a_kl(tiny, tmp_path / "missed", calibration)
    assert not left
    assert missed.warnings[0].startswith("the output's KL is 0.75 on the text that bits were chosen by, more than")
    found = json.loads((tmp_path / "missed" / "receipt.json").read_text())
    assert found["allocation"]["kl_finished"] == 0.75
    assert len(found["allocation"]["kl_aims"]) == bit_budget.WALKS
    assert found["warnings"] == list(missed.warnings)


def test_of_outputs_that_all_miss_the_nearest_is_kept(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again, to the same bytes, by a run that was killed meanwhile too."""
    towards_a_kl(tiny, tmp_path / "plain", calibration)
    for name in ("whole", "killed"):
        left = reached(monkeypatch, 0.6, 0.8, 0.7, 0.6)
        if name == "killed":
            with monkeypatch.context() as patch:
                kill_walk(patch, bit_budget.WALKS + 1)
                with pytest.raises(KeyboardInterrupt):
                    towards_a_kl(tiny, tmp_path / name, calibration)
        kept = towards_a_kl(tiny, tmp_path / name, calibration)
        assert not left
        assert kept.reached == 0.6
        assert kept.warnings[0].startswith("the output's KL is 0.6 ")
        assert weights_of(tmp_path / name) == weights_of(tmp_path / "plain")
        table = table_of(tmp_path / name)
        assert table["kl_missed"] == [0.6, 0.8, 0.7]
        assert table["kl_aims"][0] == table["kl_aims"][3] == GOAL > table["kl_aims"][1] > table["kl_aims"][2]


def test_what_the_largest_schemes_cannot_do_is_not_tried_for_ever(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aim that nothing keeps gets the largest schemes, and is the last one."""
    left = reached(monkeypatch, 1e6, 1e5)
    missed = towards_a_kl(tiny, tmp_path / "missed", calibration)
    assert not left
    assert {record.scheme for record in missed.records} == {CANDIDATES[-1]}
    assert missed.warnings
    least = table_of(tmp_path / "missed")["uniform"][-1]["kl"]
    left = reached(monkeypatch, 1e6)
    missed = towards_a_kl(tiny, tmp_path / "at once", calibration, target=Target(kl=1.001 * least))
    assert not left
    assert {record.scheme for record in missed.records} == {CANDIDATES[-1]}
    assert missed.warnings


@pytest.mark.parametrize("other", [{"recipe": "awq+rtn-w4g64"}, {"seed": 1}, {"drawn": 2, "recipe": "awq+rtn-w4g64"}])
def test_what_one_recipe_missed_is_not_anothers(
    other: dict[str, Any], tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although both begin with the same measurements, for the same output."""
    towards_a_kl(tiny, tmp_path / "plain", calibration)
    reached(monkeypatch, 0.75)
    with monkeypatch.context() as patch:
        kill_walk(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            towards_a_kl(tiny, tmp_path / "out", calibration, **other)
    reached(monkeypatch, 0.4)
    with monkeypatch.context() as patch:
        patch.delattr(Trial, "_divergence")  # all of them known
        towards_a_kl(tiny, tmp_path / "out", calibration)
    assert table_of(tmp_path / "out")["kl_aims"] == [GOAL]
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, recipe, candidates",
    [("out", "guided-w4g64", CANDIDATES), ("out.gguf", "gptq-q4_0", ("q4_0", "q5_0", "q8_0"))],
)
def test_a_walk_made_anew_redoes_only_what_depends_on_the_bits(
    name: str, recipe: str, candidates: tuple[str, ...], tiny: Path, calibration: Ids, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The original is asked once, and candidates are rounded once, with the bytes of a walk that knew nothing."""
    settings: dict[str, Any] = {"recipe": recipe, "candidates": schemes(candidates), "drawn": 2}
    plain = tmp_path / f"plain {name}"
    towards_a_kl(tiny, plain, calibration, **settings | {"target": Target(bits=6)})
    uniform = [each["kl"] for each in table_of(plain)["uniform"]]
    settings["target"] = Target(kl=(uniform[0] * uniform[-1]) ** 0.5)
    reached(monkeypatch, 1.5 * settings["target"].kl, 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "begin_anew", Workspace.clear)
        towards_a_kl(tiny, tmp_path / f"all {name}", calibration, **settings)
    calls: Counter[str] = Counter()

    def count(owner: Any, function: str) -> None:
        real = getattr(owner, function)

        def counted(*rest: Any, **also: Any) -> Any:
            calls[function] += 1
            return real(*rest, **also)

        monkeypatch.setattr(owner, function, counted)

    for owner, function in (
        (calibrate, "sample_from"), (gradients, "walk"), (importance, "collect"), (domain, "surprise"), (Run, "walk"),
        (Folder, "source_hashes"), (Trial, "_rounded"),
    ):  # fmt: skip
        count(owner, function)
    left = reached(monkeypatch, 1.5 * settings["target"].kl, 0.0)
    done = towards_a_kl(tiny, tmp_path / name, calibration, **settings)
    assert not left
    assert calls.pop("_rounded") == 3 * 7 * len(candidates)
    once = {"sample_from", "surprise", "source_hashes", "collect" if name.endswith(".gguf") else "walk"}
    assert calls == dict.fromkeys(once, 1) | {"walk": 2 + (not name.endswith(".gguf"))}
    assert weights_of(tmp_path / name) == weights_of(tmp_path / f"all {name}") != weights_of(plain)
    assert done.texts is not None
    assert not list(tmp_path.glob(f".{name}*"))


@pytest.mark.parametrize("recipe", ["rtn-w4g64", "gptq-w4g64"])
def test_the_output_keeps_its_target(recipe: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    done = compress(
        tiny, tmp_path / "out", recipe=recipe, target=Target(bits=4.0, candidates=schemes()), calibration=calibration
    )
    assert 3.8 < done.bits_per_weight <= 4.0
    found = read_receipt(tmp_path / "out")
    assert found is not None
    table = found.value["allocation"]
    assert table["target"] == {"bits": 4.0}
    assert table["bits"] == done.bits_per_weight
    assert table["ladder"] == list(CANDIDATES)
    assert len(table["groups"]) == 3 * 4
    chosen = {name: group["chosen"] for group in table["groups"] for name in group["linears"]}
    assert {record.name: record.scheme for record in done.records} == chosen
    assert len(set(chosen.values())) > 1
    checkpoint = hf.Checkpoint.open(tmp_path / "out")
    for layer in range(3):
        at = f"model.layers.{layer}"
        for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({checkpoint.scheme_of(f"{at}.{name}") for name in fused}) == 1
    assert not list(tmp_path.glob(".out*"))  # what a resumed run would need is gone


@pytest.mark.parametrize(
    "recipe, plain", [("rotate-w4g64", "rtn-w4g64"), ("quarot-w4g64", "rtn-w4g64"), ("rotate-q4_k_m", "q4_k_m")]
)
def test_bits_of_a_rotated_model_are_chosen_by_the_rotated_one(
    recipe: str, plain: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    """Plain rounding leaves nothing to the walk: the output costs what was measured."""
    file = recipe.endswith("q4_k_m")
    candidates = schemes(("q4_0", "q5_0", "q8_0") if file else CANDIDATES)
    found = {}
    for name in (recipe, plain):
        out = tmp_path / (f"{name}.gguf" if file else name)
        done = compress(tiny, out, recipe=name, target=Target(bits=5.5, candidates=candidates), calibration=calibration)
        found[name] = table_of(out)
        assert found[name]["without"] == []
        assert done.reached == pytest.approx(found[name]["kl"], rel=SAME_TABLES)
    assert [each["kl"] for each in found[recipe]["groups"]] != [each["kl"] for each in found[plain]["groups"]]


def test_a_size_is_kept_by_the_files(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    limits = [compress(tiny, tmp_path / name, recipe=f"rtn-{name}").bytes for name in ("w2g32", "w8g64")]
    target = sum(limits) // 2
    done = compress(
        tiny,
        tmp_path / "out",
        recipe="rtn-w4g64",
        target=Target(size=target, candidates=schemes()),
        calibration=calibration,
    )
    assert 0.95 * target < done.bytes <= target


@pytest.mark.slow
@pytest.mark.parametrize(
    "candidates, shard",
    [
        (("w4g32", "lut2-s45"), MAX_SHARD),  # each of another format than both
        (("w2g32", "nf4", "w8g64"), MAX_SHARD),
        (("w4g64", "w8a8-static"), MAX_SHARD),  # which has a scale that is no part of the weight
        (("w2g32", "lut3", "w8"), 60_000),  # in several files
    ],
)
def test_a_size_is_kept_by_files_of_several_forms(
    candidates: tuple[str, ...], shard: int, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    """Whatever headers say of their parts; and the smallest that there is can be asked for, but no byte less."""

    def done(size: int) -> Compressed:
        return compress_request(
            CompressionRequest(
                tiny,
                tmp_path / "out",
                recipe=f"rtn-{candidates[0]}",
                target=Target(size=size, candidates=schemes(candidates)),
                calibration=calibration,
                max_shard_bytes=shard,
                overwrite=True,
            )
        )

    sizes = [
        compress_request(
            CompressionRequest(
                tiny,
                tmp_path / "out",
                recipe=f"rtn-{name}",
                calibration=calibration,
                max_shard_bytes=shard,
                overwrite=True,
            )
        ).bytes
        for name in candidates
    ]
    low, high = min(sizes), max(sizes)
    assert done(low).bytes == low
    with user_error("target_unreachable"):
        done(low - 1)
    mixed = 0
    for tenth in (1, 3, 5, 7, 9):
        target = low + (high - low) * tenth // 10
        found = done(target)
        assert found.bytes <= target
        assert found.bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
        mixed += len({record.scheme for record in found.records}) > 1
    assert mixed > 2


def test_a_choice_that_is_over_leaves_so_much_less_to_others() -> None:
    """Of a front of 16 choices, whose files take 3 bytes more for each group of the second scheme."""
    front = knapsack.front([[(10, 8.0), (20, 4.0 - g)] for g in range(4)])
    for limit, ones in ((92, 4), (91, 3), (79, 3), (78, 2), (53, 1), (52, 0), (40, 0), (39, None)):

        def over(choice: tuple[int, ...], limit: int = limit) -> int:
            return 40 + 13 * sum(choice) - limit

        found = allocate._best_within(front, [(0, 1)] * 4, limit, over)
        assert (None if found is None else sum(found)) == ones


def test_what_a_killed_run_chose_is_chosen_anew_where_files_have_become_larger(
    tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    """Such as by being cut into more of them: only those of the smallest schemes are as large as they were."""
    plan, candidates = load_recipe("rtn-w4g64"), schemes()
    groups = groups_of(hf.load(tiny, torch.float32), plan)
    shapes = {name: shape for group in groups for name, shape in zip(group.linears, group.shapes, strict=True)}

    def bytes_of(found: Recipe, more: int) -> int:
        size, stored = 0, [(each.match, each.scheme) for each in found.overrides if each.scheme is not None]
        for name, scheme in stored:
            size += scheme.bytes(shapes[name]) + (scheme != candidates[0]) * more
        return size

    sizes = [sum(group.bytes(scheme) for group in groups) for scheme in (candidates[0], candidates[-1])]
    target, found = Target(size=sum(sizes) // 2), list[Allocation]()
    for more in (0, 0, 500):
        texts, size = apart(torch.tensor(calibration)), partial(bytes_of, more=more)
        found.append(chosen(tiny, "rtn-w4g64", target, texts, tmp_path / "log", bytes_of=size))
        assert bytes_of(found[-1].recipe, more) <= sum(sizes) // 2
    assert found[0].to_dict() == found[1].to_dict()
    assert bytes_of(found[0].recipe, 500) > sum(sizes) // 2


def test_a_divergence_is_kept_on_what_it_is_measured_on(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    ids = torch.tensor(calibration)

    def bits(goal: float) -> float:
        found = chosen(tiny, "rtn-w4g64", Target(kl=goal), apart(ids), tmp_path / "log")
        assert found.measured <= goal
        return found.bits_per_weight

    low, high = found_uniform(tiny, ids, tmp_path)
    middle = (low * high) ** 0.5
    assert bits(2 * high) < bits(middle) < bits(2 * low)
    with user_error("target_unreachable"):
        bits(low / 100)


def found_uniform(tiny: Path, ids: torch.Tensor, folder: Path) -> tuple[float, float]:
    """The divergences of w8g64 and of w2g32 everywhere."""
    found = chosen(tiny, "rtn-w4g64", Target(bits=4.0), apart(ids), folder / "log")
    assert list(found.uniform) == sorted(found.uniform, reverse=True)
    return found.uniform[-1], found.uniform[0]


def test_it_is_closer_than_uniform_bits(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the embedded model, at the size of a uniform scheme, on the tokens it chose by."""
    text = (
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
    )
    ids = torch.tensor(Tokenizer.load(demo).encode(text * 4, add_special_tokens=False)[:96]).view(3, 32)
    candidates = schemes(("w2g64", "w3g128", "w4g128"))
    monkeypatch.setattr(allocate, "ROUNDS", 1)
    found = chosen(
        demo,
        "rtn-w3g128",
        Target(bits=3.13),
        apart(ids),
        tmp_path / "log",
        scale_dtype="bfloat16",
        candidates=candidates,
    )
    assert found.bits_per_weight <= 3.13
    assert found.measured <= found.unrefined
    assert found.measured < found.uniform[1]


def test_a_killed_run_measures_only_what_is_missing(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Allocation:
        return chosen(tiny, "rtn-w4g64", Target(bits=4.0), apart(torch.tensor(calibration)), log)

    log = tmp_path / "log"
    whole = run().to_dict()
    lines = log.read_text().splitlines()
    passes: list[int] = []
    divergence = Trial._divergence

    def counted(self: Trial, states: torch.Tensor) -> float:
        passes.append(1)
        return divergence(self, states)

    monkeypatch.setattr(Trial, "_divergence", counted)
    log.write_text("\n".join(lines[:20]) + '\n["7:1", 0.0')  # killed in the middle of a line
    assert run().to_dict() == whole
    assert len(passes) == len(lines) - 20 - 1  # all but what was there, and the line that holds the result
    assert log.read_text().splitlines() == lines
    passes.clear()
    assert run().to_dict() == whole
    assert passes == []
    log.write_text("\n".join(['{"about": "another model"}', *lines[1:]]))
    assert run().to_dict() == whole
    assert len(passes) == len(lines) - 2


def test_what_a_recipe_decides_is_left_alone(tiny: Path) -> None:
    decoder = hf.load(tiny, torch.float32)
    recipe = recipe_from_dict(
        {
            "recipe": "rtn-w4g64",
            "overrides": [{"match": "*.0.mlp.*", "scheme": "w8"}, {"match": "*.k_proj", "scheme": "keep"}],
        }
    )
    found = groups_of(decoder, recipe)
    assert [group.layer for group in found] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert found[0].linears == ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")
    assert found[0] == Group(0, found[0].linears, ((128, 128), (64, 128)))
    with user_error("recipe_conflict"):
        groups_of(decoder, recipe_from_dict({"recipe": "rtn-w4g64", "overrides": [{"match": "*", "scheme": "w8"}]}))


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe"])
def test_mixtures_of_experts_keep_theirs_together(family: str, tmp_path: Path) -> None:
    """All experts of a block in one scheme, those that no token was sent to as well; gates stay."""
    source = write(family, tmp_path / "source")
    done = compress(
        source,
        tmp_path / "out",
        recipe="gptq-w4g32",
        target=Target(bits=4.6, candidates=schemes(("w3g32", "w8g32"))),
        calibration=[[5] * 16] * 4,
    )
    assert done.bits_per_weight <= 4.6
    chosen = {record.name: record.scheme for record in done.records}
    assert set(chosen.values()) == {"w3g32", "w8g32"}
    groups = json.loads((tmp_path / "out" / "receipt.json").read_text())["allocation"]["groups"]
    experts = [group["linears"] for group in groups if ".experts." in group["linears"][0]]
    assert sorted(map(len, experts)) == ([4, 4, 8, 8] if family == "Mixtral" else [5, 5, 10, 10]), "with the shared one"
    for linears in experts:
        assert len({chosen[name] for name in linears}) == 1
    assert not any(name.endswith("gate") for name in chosen)


def test_the_receipt_says_what_was_not_measured(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    for recipe, without in (
        ("rtn-w4g64", []), ("awq+gptq-w4g64", ["awq"]), ("quarot+gptq-w4g64", []),
        ("spinquant+gptq-w4g64", ["learned rotation"]), ("guided+tune-w4g64", ["polish", "couple", "correct", "tune"]),
    ):  # fmt: skip
        assert allocate.unmeasured(load_recipe(recipe)) == without
    override = {"match": "*.0.*", "scheme": "w8a8"}
    assert allocate.unmeasured(recipe_from_dict({"recipe": "rtn-w4g64", "overrides": [override]})) == [
        "activation rounding"
    ]
    compress(
        tiny,
        tmp_path / "out",
        recipe="awq+gptq-w4g64",
        target=Target(bits=4.0, candidates=schemes()),
        calibration=calibration,
    )
    found = json.loads((tmp_path / "out" / "receipt.json").read_text())["allocation"]
    assert (found["rounding"], found["without"]) == ("gptq", ["awq"])


@pytest.mark.parametrize(
    "target, candidates, sentence",
    [
        (Target(bits=2.0), CANDIDATES, "target_unreachable"),
        (Target(bits=30), CANDIDATES, "target_unreachable"),
        (Target(size=1000), CANDIDATES, "target_unreachable"),
        (Target(bits=4.0), ("w4g48", "w8"), "group_size_indivisible"),
        (Target(bits=4.0), ("w4g64",), "target_invalid"),
        (Target(bits=4.0), ("w4g64", "sparse24"), "sparsity_invalid"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    target: Target, candidates: tuple[str, ...], sentence: str, tiny: Path, calibration: Ids, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delattr(sensitivity.Trial, "alone")
    if target.bits not in (None, 4):
        monkeypatch.delattr(calibrate, "tokens")
    with user_error(sentence):
        compress(
            tiny,
            tmp_path / "out",
            recipe="rtn-w4g64",
            target=replace(target, candidates=schemes(candidates)),
            calibration=calibration,
        )


def test_a_rung_that_reads_inputs_makes_the_walk_read_them(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """The recipe alone reads none: what was chosen is held against the model again."""
    done = compress(
        tiny,
        tmp_path / "out",
        recipe="rtn-w4g64",
        target=Target(bits=6.0, candidates=schemes(("w4g64", "w8a8-static"))),
        calibration=calibration,
    )
    assert {record.scheme for record in done.records} == {"w4g64", "w8a8-static"}
    found = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert found["allocation"]["without"] == ["activation rounding"]
    assert found["calibration"] == calibrate.token_hash(torch.tensor(calibration[:-2]))


def test_a_rung_that_a_device_does_not_take_is_refused_first(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    target = Target(bits=4.0, candidates=schemes(("w3g64", "nf4")))
    request = CompressionRequest(tiny, tmp_path / "out", target=target, calibration=calibration, device="cuda")
    resolved = resolve(request, open_source(request), "gptq-w4g64", len(calibration), targeted=True).with_texts()
    with user_error("device_unsupported"):
        bit_budget.for_output(resolved, no_progress)
    assert not list(tmp_path.iterdir())


def test_text_that_cannot_be_divided_is_refused_before_it_is_drawn(tiny: Path, tmp_path: Path) -> None:
    with user_error("calibration_too_short"):
        compress_request(
            CompressionRequest(
                tiny,
                tmp_path / "out",
                recipe="rtn-w4g64",
                target=Target(bits=4.0, candidates=schemes()),
                calibration="self",
                samples=1,
                length=16,
            ),
            no_progress,
        )


def test_drawn_text_is_its_models(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed run drew is not taken for what another model would draw; nor is a damaged file taken at all."""

    def stop(*rest: object) -> None:
        raise Stop

    monkeypatch.setattr(bit_budget, "Allocator", stop)
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    settings: dict[str, Any] = {"target": Target(bits=4.0, candidates=schemes()), "samples": 3, "length": 8}
    for source in (tiny, other, tiny):
        with pytest.raises(Stop):
            compress_request(
                CompressionRequest(source, tmp_path / "out", recipe="rtn-w4g64", calibration="self", **settings)
            )
    one, two = tmp_path.glob(".out.attar-allocation.self-*-3x8-0.i32")
    for file in (one, two):
        file.write_bytes(np.full(24, 10**6, dtype="<i4").tobytes())
    with user_error("state_damaged"):
        compress_request(CompressionRequest(tiny, tmp_path / "out", recipe="rtn-w4g64", calibration="self", **settings))


def test_options_are_for_the_schemes_that_are_chosen(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """nf4 reads no way of finding scales; the grids among the candidates do."""
    recipe = recipe_from_dict({"recipe": "rtn-nf4", "scale_search": "mse"})
    with user_error("method_option_unused"):
        compress(tiny, tmp_path / "out", recipe=recipe)
    target: dict[str, Any] = {"target": Target(bits=4.5, candidates=schemes()), "calibration": calibration}
    done = compress_request(CompressionRequest(tiny, tmp_path / "out", recipe=recipe, **target))
    plain = compress_request(CompressionRequest(tiny, tmp_path / "plain", recipe="rtn-nf4", **target))
    assert done.allocated == plain.allocated
    assert (tmp_path / "out" / "model.safetensors").read_bytes() != (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()
    # Where the choice falls on what does not read it, the option has done nothing, which is no reason to end in.
    least = compress(tiny, tmp_path / "least", recipe="rtn-nf4").bits_per_weight
    target["target"] = Target(bits=least, candidates=schemes(("nf4", "w8g32")))
    done = compress_request(CompressionRequest(tiny, tmp_path / "nf4", recipe=recipe, **target))
    assert done.bits_per_weight == least
    seen: list[str] = []
    target["target"] = Target(bits=least, candidates=schemes(("nf4", "fp8")))  # of which neither reads it
    with user_error("method_option_unused"):
        compress_request(
            CompressionRequest(tiny, tmp_path / "none", recipe=recipe, **target), lambda stage, *_: seen.append(stage)
        )
    assert set(seen) <= {"hashing"}


def no_progress(stage: str, done: int, total: int) -> None:
    """Nothing is drawn and nothing measured."""
    assert stage == "hashing", stage


@pytest.mark.parametrize("recipe", ["hqq-w4g32-asym", "autoround-w4g64", "prune-s50-w4g64"])
def test_roundings_that_are_not_tried_are_refused_before_text_is_drawn(recipe: str, tiny: Path, tmp_path: Path) -> None:
    with user_error("option_conflict"):
        compress_request(
            CompressionRequest(
                tiny, tmp_path / "out", recipe=recipe, target=Target(bits=4.0), calibration="self", samples=4, length=8
            ),
            no_progress,
        )


def test_other_mistakes(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    with user_error("calibration_missing"):
        compress(tiny, tmp_path / "out", recipe="rtn-w4g64", target=Target(bits=4.0))
    (tmp_path / "there").mkdir()
    with user_error("output_exists"):
        compress(tiny, tmp_path / "there", recipe="rtn-w4g64", target=Target(bits=4.0), calibration=calibration)
