from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attar.compression.recipe.methods import AutoRound, Distill, Gptq, Guided, Qronos, QuaRot, Rtn, SmoothQuant, Tune
from attar.compression.recipe.recipe import Override
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.formats.scheme import Scheme
from tests.errors import user_error

SHAPES = {
    "model.layers.0.self_attn.q_proj": (256, 256),
    "model.layers.0.mlp.down_proj": (256, 768),
    "model.layers.1.mlp.down_proj": (256, 768),
    "model.layers.1.mlp.gate": (8, 256),
    "lm_head": (4096, 256),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return path


def test_a_file_sets_options_overrides_and_keep(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        recipe: smoothquant+gptq-w8a8
        alpha: 0.75
        damping: 0.02
        order: natural
        static_groups: false
        overrides:
          - {match: "model.layers.0.*", scheme: keep}
          - {match: "*.down_proj", scheme: w8}
        keep: ["lm_head", "*.gate"]
        """,
    )
    recipe = load_recipe(path)
    assert recipe.passes == (SmoothQuant(alpha=0.75), Gptq(damping=0.02, order="natural", static_groups=False))
    assert recipe.overrides == (Override("model.layers.0.*", None), Override("*.down_proj", Scheme.parse("w8")))
    assert recipe.schemes(SHAPES) == {
        "model.layers.0.self_attn.q_proj": None,
        "model.layers.0.mlp.down_proj": None,  # the first match decides
        "model.layers.1.mlp.down_proj": Scheme.parse("w8"),
        "model.layers.1.mlp.gate": None,
        "lm_head": None,
    }


def test_output_matrix_and_routers_stay_unless_overridden() -> None:
    recipe = load_recipe("rtn-w4g128")
    chosen = recipe.schemes(SHAPES)
    assert [name for name, scheme in chosen.items() if scheme is None] == ["model.layers.1.mlp.gate", "lm_head"]
    recipe = recipe_from_dict({"recipe": "rtn-w4g128", "overrides": [{"match": "lm_head", "scheme": "w8"}]})
    assert recipe.scheme_for("lm_head") == Scheme.parse("w8")


@pytest.mark.parametrize(
    ("head", "scheme"),
    [("bf16", None), ("keep", None), ("int8", "w8"), ("int4", "w4g128"), ("w3g64-asym", "w3g64-asym"), ("w8", "w8")],
)
def test_the_head_is_decided_before_all_else(head: str, scheme: str | None) -> None:
    recipe = recipe_from_dict({"recipe": "rtn-w4g128", "head": head})
    assert recipe.scheme_for("lm_head") == (None if scheme is None else Scheme.parse(scheme))
    assert recipe.to_dict()["head"] == (scheme or "keep")
    everything = replace(recipe, overrides=(Override("*", Scheme.parse("w2g64")),), keep=())
    assert everything.scheme_for("lm_head") == recipe.scheme_for("lm_head")
    assert {name: s for name, s in recipe.schemes(SHAPES).items() if name != "lm_head"} == {
        name: s for name, s in load_recipe("rtn-w4g128").schemes(SHAPES).items() if name != "lm_head"
    }


@pytest.mark.parametrize(
    ("data", "scheme"),
    [
        ({}, None),
        ({"overrides": [{"match": "*", "scheme": "w8"}]}, "w8"),
        ({"overrides": [{"match": "model.*", "scheme": "w8"}]}, None),
        ({"keep": ["*.gate"]}, "w4g128"),
    ],
)
def test_patterns_reach_the_head_like_any_linear(data: dict[str, object], scheme: str | None) -> None:
    recipe = recipe_from_dict({"recipe": "rtn-w4g128", **data})
    assert recipe.head_name == recipe.to_dict()["head"] == (scheme or "keep")
    found = recipe.schemes(SHAPES)["lm_head"]
    assert (found.name if found else None) == scheme


@pytest.mark.parametrize(
    ("data", "head"),
    [
        ({}, "q4_k_m"),
        ({"head": "q8_0"}, "q8_0"),
        ({"head": "keep"}, "keep"),
        ({"head": "int8"}, "q8_0"),
        ({"head": "int4"}, "q4_0"),
        ({"head": "w8"}, "w8"),  # which files have no type for: it is refused by its name
        ({"overrides": [{"match": "lm_head", "scheme": "keep"}]}, "keep"),
        ({"overrides": [{"match": "lm_head", "scheme": "q4_k"}]}, "q4_k"),
        ({"overrides": [{"match": "model.*", "scheme": "keep"}]}, "q4_k_m"),
        ({"keep": ["lm_head"]}, "keep"),
        ({"keep": ["*.mlp.gate"]}, "q4_k_m"),
    ],
)
def test_the_head_of_a_file_is_its_mixs_unless_somebody_said_otherwise(data: dict[str, object], head: str) -> None:
    recipe = recipe_from_dict({"recipe": "q4_k_m", **data}).for_file()
    assert recipe.head_name == recipe.to_dict()["head"] == head
    assert recipe.for_file() == recipe


def test_a_word_for_the_head_stands_for_the_last_one_given() -> None:
    recipe = recipe_from_dict({"recipe": "q4_k_m", "head": "int8"})
    assert recipe.with_head("q6_k").for_file().head_name == "q6_k"
    assert recipe.with_head("int4").for_file().head_name == "q4_0"
    assert recipe.with_head("int4").head_name == "w4g128"


def test_some_schemes_are_not_for_the_head() -> None:
    for scheme in ("w8a8", "fp8", "w4-tensor", "w8a8-static"):
        with user_error("scheme_unsupported"):
            recipe_from_dict({"recipe": "rtn-w4g128", "head": scheme}).schemes(SHAPES)
    with user_error("group_size_indivisible", "lm_head"):
        recipe_from_dict({"recipe": "rtn-w4g128", "head": "w4g512"}).schemes(SHAPES)


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    recipe = recipe_from_dict({"recipe": "rtn-w4g128", "overrides": [{"match": "lm_haed", "scheme": "w8"}]})
    with user_error("override_invalid", "lm_head"):
        recipe.schemes(SHAPES)


def test_a_group_that_does_not_divide_names_the_linear() -> None:
    with user_error("group_size_indivisible", "model.layers.0.mlp.down_proj"):
        load_recipe("rtn-w4g512").schemes({"model.layers.0.mlp.down_proj": (256, 768)})


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("recipe: gptq-w4g128\ndampning: 0.1", "did you mean damping"),
        ("recipe: awq-w4g128\ndamping: 0.1", "damping is an option of gptq"),
        ("recipe: gptq-w4g128\ndamping: lots", "damping is a number"),
        ("recipe: gptq-w4g128\nblock: true", "block is a whole number"),
        ("recipe: gptq-w4g128\norder: actorder", "order is one of natural, activation"),
        ("recipe: gptq-w4g128\nstatic_groups: 1", "static_groups is true or false"),
        ("recipe: gptq-w4g128\nstatic_groups: false", "needs order: natural"),
        ("recipe: gptq-w4g128\nresidual: 0.3", "residual is read with correct: true alone, which gptq-w4g128 does not"),
        ("recipe: qronos-w4g128\noutput_damping: 0.3", "output_damping is read with couple: true alone"),
        ("recipe: autoround+tune-w4g128\nbatch: 4096", "as autoround: {batch: 4096} or tune: {batch: 4096}"),
        ("recipe: autoround+tune-w4g128\ntune: {bach: 4096}", "unknown option 'bach' of tune: did you mean batch"),
        ("recipe: gptq+tune-w4g128\ntune: {epochs: 2}\nepochs: 3", "epochs of tune is given twice"),
        ("recipe: gptq+tune-w4g128\ntune: 5", "what stands under it are its options by name, not 5"),
        ("recipe: gptq-w4g128\ntune: {epochs: 2}", "tune is a method that gptq-w4g128 does not use"),
        ("recipe: smoothquant-w8a8\nalpha: 1.5", "alpha is a number from 0 to 1"),
        ("recipe: smoothquant-w8a8\nalpha: serch", "alpha is a number from 0 to 1, or search, not 'serch'"),
        ("recipe: awq-w4\nclip: 1", "clip is true or false"),
        ("recipe: gptq-w4\noverrides: {match: a, scheme: w8}", "list of entries"),
        ("recipe: gptq-w4\noverrides: [{match: a, shceme: w8}]", "did you mean scheme"),
        ("recipe: gptq-w4\noverrides: [{match: a}]", "needs both"),
        ("recipe: gptq-w4\noverrides: [{match: a, scheme: w4g12x}]", "did you mean w4g128"),
        ("recipe: gptq-w4\nkeep: lm_head", "keep is a list"),
        ("recipe: gptq-w4\nhead: 8", "head is bf16, int8, int4 or a scheme, not 8"),
        ("recipe: gptq-w4\nhead: int9", "unknown head 'int9': did you mean int"),
        ("recipe: gptq-w4\nhaed: int8", "did you mean head"),
        ("recipe: gptq-w4\nhead: int8\noverrides: [{match: '*', scheme: w8}]", "both decide about lm_head"),
        ("recipe: gptq-w4\nhead: int8\nkeep: [lm_head]", "both decide about lm_head"),
        ("- gptq-w4", "mapping with a name"),
        ("recipe: 4", "mapping with a name"),
        ("recipe: [", "not valid YAML"),
        ("recipe: " + "[" * 30_000, "not valid YAML"),
        ("!!python/object/apply:os.system [true]", "not valid YAML"),
        ("# " + "x" * 70_000, "at most 65536 bytes"),
    ],
)
def test_a_bad_file_is_refused_with_its_path_and_a_hint(tmp_path: Path, text: str, hint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        load_recipe(path)
    assert hint in str(caught.value)
    assert str(path) in str(caught.value)


DYNAMIC = {"order": "natural", "static_groups": False}
SEARCH = {"scale_search": "mse"}


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        *((f"gptq-{scheme}", DYNAMIC, "static_groups of gptq is for grids such as w4g128: all others have their scales")
          for scheme in ("nf4", "q4_k", "nvfp4-weight", "lut4")),
        ("rtn-nf4", SEARCH, "scale_search of rtn is for grids of integers such as w4g128, for nvfp4 and mxfp4"),
        ("rtn-q4_k_m", SEARCH, "qserve-g128; q4_k_m has none, so leave it out"),
        ("rtn-fp8", SEARCH, "scale_search of rtn is for grids of integers"),
        ("gptq-lut4", SEARCH, "scale_search of gptq is for grids of integers"),
        ("prune-2:4", SEARCH, "scale_search of prune is for grids of integers"),
        ("prune-2:4-sparse24", SEARCH, "scale_search of prune is for grids of integers"),
        ("hqq-w4g128", SEARCH, "scale_search of hqq is for a head in grids of integers"),
        ("awq-nf4", {"clip": True}, "clip of awq is for grids such as w4g128, and for two levels"),
    ],
)  # fmt: skip
def test_an_option_that_no_scheme_reads_is_refused(name: str, options: dict[str, object], sentence: str) -> None:
    recipe = recipe_from_dict({"recipe": name, **options})
    with pytest.raises(ValueError, match=sentence):
        recipe.schemes(SHAPES)
    if "scale_search" in options:  # which a head that the caller names reads
        replace(recipe, head=Scheme.parse("w8")).schemes(SHAPES)
    load_recipe(name).schemes(SHAPES)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gptq-nf4", {**DYNAMIC, "overrides": [{"match": "*.down_proj", "scheme": "w4"}]}),
        ("rtn-nf4", {**SEARCH, "head": "w8"}),
        ("rtn-nvfp4-weight", SEARCH),
        ("gptq-qserve-g128", SEARCH),
        ("prune-2:4", {**SEARCH, "head": "w8"}),
        ("prune-2:4-sparse24-w4g64", SEARCH),
        ("squeezellm-lut4", {**SEARCH, "head": "w8"}),
        ("awq-qserve-g128", {"clip": False}),
    ],
)
def test_an_option_is_taken_where_any_scheme_reads_it(name: str, options: dict[str, object]) -> None:
    assert any(recipe_from_dict({"recipe": name, **options}).schemes(SHAPES).values()) or name == "prune-2:4"


def test_an_option_under_its_methods_name(tmp_path: Path) -> None:
    path = write(
        tmp_path, "recipe: autoround+tune-w4g128\nsteps: 50\ntune: {batch: 4096, epochs: 2}\nautoround: {batch: 64}"
    )
    recipe = load_recipe(path)
    assert (recipe.passes, recipe.tune) == ((AutoRound(steps=50, batch=64),), Tune(batch=4096, epochs=2))
    told = recipe.to_dict()
    assert (told["passes"][0]["batch"], told["tune"]["batch"]) == (64, 4096)
    again = {"recipe": told["recipe"], "autoround": {"steps": 50, "batch": 64}, "tune": told["tune"]}
    assert recipe_from_dict(again).to_dict() == told
    alone = recipe_from_dict({"recipe": "gptq+tune-w4g128", "tune": {"batch": 64}})
    assert alone.to_dict() == recipe_from_dict({"recipe": "gptq+tune-w4g128", "batch": 64}).to_dict()


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with user_error("file_not_found"):
        load_recipe(tmp_path / "none.yaml")


def test_the_dict_is_canonical(tmp_path: Path) -> None:
    plain = load_recipe("smoothquant-w8a8").to_dict()
    assert plain == load_recipe("smoothquant+rtn-w8a8-o1").to_dict()
    assert (
        plain == load_recipe(write(tmp_path, "recipe: smoothquant-w8a8\noverrides: []\nscale_search: minmax")).to_dict()
    )
    assert json.loads(json.dumps(plain)) == plain
    changed = load_recipe(write(tmp_path, "recipe: smoothquant-w8a8\nalpha: 0.5"))
    assert changed.to_dict() != plain


def test_tuning_follows_any_recipe_of_scales() -> None:
    plain, tuned = load_recipe("guided-w4g128"), load_recipe("guided+tune-w4g128")
    assert tuned == replace(plain, tune=Tune())
    assert tuned.name == "guided+tune-w4g128"
    assert load_recipe("tune-w4g128").passes == (Rtn(),)
    assert load_recipe(load_recipe("tune-w4g128").name) == load_recipe("tune-w4g128")
    assert recipe_from_dict({"recipe": "gptq+tune-w4", "epochs": 2, "damping": 0.1}) == replace(
        load_recipe("gptq-w4"), passes=(Gptq(damping=0.1),), tune=Tune(epochs=2)
    )
    distilled = load_recipe("guided+distill-w4g128")
    assert (distilled, distilled.name) == (replace(plain, tune=Distill()), "guided+distill-w4g128")
    assert (distilled.to_dict()["tune"]["epochs"], distilled.to_dict()["tune"]["drawn"]) == (2, 512)
    with user_error("method_option_invalid"):
        recipe_from_dict({"recipe": "guided+distill-w4g128", "drawn": 4097})
    assert "tune" not in plain.to_dict()
    assert tuned.to_dict()["tune"]["epochs"] == 4
    with user_error("method_option_unused"):
        recipe_from_dict({"recipe": "gptq-w4", "epochs": 2})
    assert load_recipe("gptq+tune-q4_k_m").tune == Tune()
    with user_error("recipe_without_effect"):
        load_recipe("rtn+tune-f16")


def test_methods_that_are_gptq_with_other_defaults() -> None:
    assert load_recipe("guided-w4g128").rounding == Guided(couple=True, correct=True, polish=4)
    assert load_recipe("qronos-w4g128").rounding == Qronos(correct=True, polish=4)
    assert isinstance(load_recipe("guided-w4").rounding, Gptq)
    assert load_recipe("gptq-w4").rounding == Gptq(polish=0, guide=0, couple=False, correct=False)
    assert recipe_from_dict({"recipe": "gptq-w4", "guide": 2}).name == "gptq-w4"


def test_a_rotation_stands_in_front() -> None:
    for name in ("rotate-w8a8", "quarot+gptq-w4a4", "spinquant+guided+tune-w4a8g128", "rotate-keep"):
        recipe = load_recipe(name)
        assert recipe.name == name
        assert recipe.rotate is not None
        assert recipe.to_dict()["rotate"]["method"] == recipe.rotate.method == name.partition("-")[0].partition("+")[0]
    told = recipe_from_dict({"recipe": "quarot+smoothquant-w8a8", "online": False, "alpha": 0.7})
    assert told.rotate == QuaRot(online=False)
    assert told.passes[0] == SmoothQuant(alpha=0.7)
    with user_error("method_option_unused"):
        recipe_from_dict({"recipe": "gptq-w8a8", "online": True})
    with user_error("method_option_invalid"):
        recipe_from_dict({"recipe": "rotate-w8a8", "rotation": "givens"})
