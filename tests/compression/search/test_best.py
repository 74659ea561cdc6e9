"""Several recipes tried, one kept: which, on what, and what the receipt says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from attar.checkpoints.sources.hf import Checkpoint
from attar.checkpoints.strict_io import CheckpointError
from attar.cli.compression import gains
from attar.compression.block import hessians
from attar.compression.calibration import domain
from attar.compression.runs.pipeline import compress
from attar.compression.search import best, candidates
from attar.compression.solvers.rounding import gptq, two_sided
from attar.compression.solvers.rounding.gptq import GptqResult
from attar.evaluation import outputs
from tests.compression.test_experts import write
from tests.conftest import token_ids
from tests.errors import user_error

Ids = list[list[int]]


class Stop(Exception):
    pass


def test_the_best_is_kept_and_the_receipt_says_why(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    """Finer groups lose less, whatever the model; the winner is what it would be alone, on the text it was given."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "recipes" and done == 1:
            raise Stop

    name = "rtn-w4g128,gptq-w8g32,rtn-w3g128"
    with pytest.raises(Stop):
        compress(tiny, tmp_path / "out", recipe=name, calibration=calibration, progress=stop)
    seen: list[int] = []
    done = compress(
        tiny, tmp_path / "out", recipe=name, calibration=calibration,
        progress=lambda stage, count, total: seen.append(count) if stage == "recipes" else None,
    )  # fmt: skip
    assert seen == [1, 2, 3], "the first was known"
    assert done.recipe == "gptq-w8g32"
    selection = json.loads((tmp_path / "out" / "receipt.json").read_text())["selection"]
    assert selection["tokens"] == 32
    assert [each["recipe"] for each in selection["tried"]] == name.split(",")
    kls = [each["kl"] for each in selection["tried"]]
    assert kls[1] < kls[0] < kls[2]
    assert selection["kept"] == "gptq-w8g32"
    assert done.to_dict()["selection"] == done.selection == selection
    printed = "\n".join(gains(done))
    assert "on 32 tokens set aside" in printed
    for kl, each in zip(kls, name.split(","), strict=True):
        (line,) = (line for line in printed.splitlines() if line.startswith(each))
        assert f"{kl:.3g}" in line
        assert ("(kept)" in line) == (each == "gptq-w8g32")
    compress(tiny, tmp_path / "alone", recipe="gptq-w8g32", calibration=calibration[:-1])
    model = "model.safetensors"
    assert (tmp_path / "out" / model).read_bytes() == (tmp_path / "alone" / model).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out"]


def test_a_recipe_file_that_was_edited_is_tried_again(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if stage == "recipes" and done == 1:
            raise Stop

    recipe = tmp_path / "a.yaml"
    recipe.write_text("recipe: rtn-w8\n")
    with pytest.raises(Stop):
        compress(tiny, tmp_path / "out", recipe=f"{recipe},rtn-w4g32", calibration=calibration, progress=stop)
    recipe.write_text("recipe: rtn-w2g32\n")
    done = compress(tiny, tmp_path / "out", recipe=f"{recipe},rtn-w4g32", calibration=calibration)
    assert done.recipe == "rtn-w4g32"


def test_trials_do_not_ask_what_kind_the_text_is(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    known = domain.surprise

    def counted(source: Checkpoint, ids: Tensor, *rest: Any) -> domain.DomainCheck | None:
        asked.append(len(ids))
        return known(source, ids, *rest)

    monkeypatch.setattr(domain, "surprise", counted)
    done = compress(tiny, tmp_path / "out", recipe="gptq-w4g128,gptq-w8g32", calibration=calibration)
    assert asked == [7]
    assert done.texts is not None


def test_what_cannot_be_chosen_is_refused_first(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    for recipe, ids, sentence in (
        ("rtn-w4g128,gtpq-w4g128", calibration, "method_unknown"),
        ("best-w4g128", calibration[:1], "calibration_too_short"),
        ("best-w4g128", None, "calibration_missing"),
    ):
        with user_error(sentence):
            compress(tiny, tmp_path / "out", recipe=recipe, calibration=ids)
    (tmp_path / "out").mkdir()
    with user_error("output_exists"):
        compress(tiny, tmp_path / "out", recipe="best-w4g128", calibration=calibration)


@pytest.mark.parametrize(
    "scheme, family, left, why",
    [
        ("w4g32", "Mixtral", ["qronos", "guided", "guided+tune"], "routers of a mixture"),
        ("nf4", "Llama", ["guided", "guided+tune"], "rows make up for one another"),
        ("fp8-weight", "Llama", ["autoround"], "autoround is for grids"),
        ("lut4", "Llama", ["guided", "guided+tune"], "rows make up for one another"),
    ],
)
def test_candidates_that_cannot_be_are_left_out(
    scheme: str, family: str, left: list[str], why: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny if family == "Llama" else write(family, tmp_path / "source")
    monkeypatch.setattr(candidates, "RECIPES", dict.fromkeys(candidates.RECIPES, ("rtn", *left)))
    monkeypatch.setattr(best, "choose", lambda *rest: 1 / 0)  # what is left alone is not tried
    done = compress(source, tmp_path / "out", recipe=f"best-{scheme}", calibration=token_ids(3, 16, vocab=96))
    assert done.recipe == f"rtn-{scheme}"
    assert done.selection is not None
    assert (done.selection["tried"], done.selection["kept"]) == ([], f"rtn-{scheme}")
    read = outputs.read(tmp_path / "out").selection
    assert read is not None
    assert (read.kept, [name for name, _ in read.left_out]) == (None, [f"{step}-{scheme}" for step in left])
    assert [each["recipe"] for each in done.selection["left_out"]] == [f"{step}-{scheme}" for step in left]
    assert all(why in each["why"] for each in done.selection["left_out"])
    printed = list(gains(done))
    assert len(printed) == len(left)
    assert printed[0].startswith(f"left out: {left[0]}-{scheme} (")


@pytest.mark.parametrize("out, scheme", [("out", "w4g32"), ("out.gguf", "q4_0")])
def test_a_candidate_that_gives_up_on_the_walk_is_left_out(
    out: str, scheme: str, tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left behind stops no other, and a killed run does not begin it again."""
    recipes = dict.fromkeys(candidates.RECIPES, ("guided", "rtn", "gptq"))
    monkeypatch.setattr(candidates, "RECIPES", recipes)
    begun: list[int] = []

    def give_up(*rest: object, **more: object) -> GptqResult:
        begun.append(1)
        raise ValueError("no")

    monkeypatch.setattr(two_sided, "solve", give_up)
    seen: list[int] = []

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "recipes" and done == 2:
            raise Stop

    with pytest.raises(Stop):
        compress(tiny, tmp_path / out, recipe=f"best-{scheme}", calibration=calibration, progress=stop)
    done = compress(
        tiny, tmp_path / out, recipe=f"best-{scheme}", calibration=calibration,
        progress=lambda stage, count, total: seen.append(count) if stage == "recipes" else None,
    )  # fmt: skip
    assert seen == [2, 3]
    assert len(begun) == 1
    assert done.selection is not None
    assert [each["recipe"] for each in done.selection["tried"]] == [f"rtn-{scheme}", f"gptq-{scheme}"]
    assert done.selection["kept"] in (f"rtn-{scheme}", f"gptq-{scheme}")
    why = "it gave up: model.layers.0.self_attn.q_proj: no"
    assert done.selection["left_out"] == [{"recipe": f"guided-{scheme}", "why": why}]
    assert list(gains(done))[-1] == f"left out: guided-{scheme} ({why})"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_who_gives_up_is_said_where_nothing_else_is_left_or_a_user_named_it(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "RECIPES", dict.fromkeys(candidates.RECIPES, ("gptq", "awq+gptq")))

    def give_up(*rest: object, **more: object) -> GptqResult:
        raise ValueError("no")

    monkeypatch.setattr(gptq, "solve", give_up)
    for recipe in ("best-w4g32", "rtn-w4g32,gptq-w4g32", "ablate-gptq-w4g32"):
        with user_error("value_invalid", "model.layers.0.self_attn.q_proj"):
            compress(tiny, tmp_path / recipe, recipe=recipe, calibration=calibration)


def test_a_full_disk_is_no_candidates_affair(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "RECIPES", dict.fromkeys(candidates.RECIPES, ("rtn", "gptq")))

    def full(*rest: object, **more: object) -> GptqResult:
        raise CheckpointError("disk_full", "no room for it")

    monkeypatch.setattr(hessians, "_gather", full)
    with user_error("disk_full"):
        compress(tiny, tmp_path / "out", recipe="best-w4g32", calibration=calibration)


def test_rotated_candidates_resume_and_keep_one_output_at_a_time(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "RECIPES", {"activations": ("rtn", "smoothquant+gptq", "quarot+gptq")})
    known: list[tuple[int, list[str]]] = []
    kept = tmp_path / ".out.attar-tried"

    def watch(stage: str, done: int, total: int) -> None:
        if stage == "recipes":
            known.append((done, sorted(path.name for path in kept.iterdir())))
            if done == 2 and len(known) == 3:
                raise Stop

    with pytest.raises(Stop):
        compress(tiny, tmp_path / "out", recipe="best-w4a4", calibration=calibration, progress=watch)
    done = compress(tiny, tmp_path / "out", recipe="best-w4a4", calibration=calibration, progress=watch)
    assert known == [(0, []), *((n, ["out", "tried.json"]) for n in (1, 2, 2, 3))]
    assert done.selection is not None
    assert not done.selection["left_out"]
    kls = {each["recipe"]: each["kl"] for each in done.selection["tried"]}
    assert list(kls) == ["rtn-w4a4", "smoothquant+gptq-w4a4", "quarot+gptq-w4a4"]
    assert done.recipe == min(kls, key=kls.__getitem__)
    assert not kept.exists()


def test_a_list_without_a_candidate_says_why(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    for scheme, sentence in (("w4g48", "group_size_indivisible"), ("w4g", "scheme_unknown")):
        with user_error(sentence):
            compress(tiny, tmp_path / "out", recipe=f"best-{scheme}", calibration=calibration)


def test_of_a_recipe_those_steps_are_kept_that_help(
    tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever they are here, by the figures that the receipt gives; what comes of them is what they make alone."""

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "recipes" and done == 2:
            raise Stop

    name = "ablate-awq+gptq+tune-w4g32"
    with pytest.raises(Stop):
        compress(tiny, tmp_path / "out", recipe=name, calibration=calibration, progress=stop)
    seen: list[tuple[int, int]] = []
    done = compress(
        tiny, tmp_path / "out", recipe=name, calibration=calibration,
        progress=lambda stage, count, total: seen.append((count, total)) if stage == "recipes" else None,
    )  # fmt: skip
    assert seen == [(2, 4), (3, 4), (4, 4)], "two were known"
    assert done.selection is not None
    tried = {each["recipe"]: each["kl"] for each in done.selection["tried"]}
    kept, least = list[str](), tried["rtn-w4g32"]
    for step, recipe in zip(("gptq", "awq", "tune"), list(tried)[1:], strict=True):
        if tried[recipe] < least:
            kept.append(step)
            least = tried[recipe]
        else:
            assert step not in done.recipe
    assert all(step in done.recipe for step in kept)
    assert least == min(tried.values()) == tried[done.recipe]
    compress(tiny, tmp_path / "alone", recipe=done.recipe, calibration=calibration[:-1])
    model = "model.safetensors"
    assert (tmp_path / "out" / model).read_bytes() == (tmp_path / "alone" / model).read_bytes()
    for recipe, sentence in (("ablate-rtn-w4g32", "recipe_without_effect"), ("ablate-gtpq-w4g32", "method_unknown")):
        with user_error(sentence):
            compress(tiny, tmp_path / "none", recipe=recipe, calibration=calibration)
    moe = write("Mixtral", tmp_path / "moe")
    with user_error("architecture_unsupported"):  # refused whole: a user asked for that step
        compress(moe, tmp_path / "none", recipe="ablate-guided-w4g32", calibration=token_ids(3, 16, vocab=96))


def test_what_tuning_gained_is_said(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    done = compress(tiny, tmp_path / "out", recipe="rtn+tune-w4g32", calibration=calibration)
    tuned = json.loads((tmp_path / "out" / "receipt.json").read_text())["tune"]
    assert done.to_dict()["tune"] == tuned | {"kl_epochs": tuple(tuned["kl_epochs"])}
    (line,) = gains(done)
    assert line == (
        f"tuning: mean KL {tuned['kl_before']:.3g} before and {tuned['kl_after']:.3g} after, on 32 tokens that it did "
        "not train on"
    )
