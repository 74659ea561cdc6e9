"""Recipes by name, or from YAML files, with the methods' options and per-layer overrides:

    recipe: gptq-w4g128
    damping: 0.02
    head: int8
    overrides:
      - {match: "*.down_proj", scheme: w8}
      - {match: "model.layers.0.*", scheme: keep}

An option belongs to the method that has it. Where several methods share it, it stands under the method's own name,
which any option may: `tune: {batch: 4096}`.

Anything unknown is an error that offers the nearest names: a silently ignored option costs hours.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml

from attar.compression.recipe import parser
from attar.compression.recipe.methods import METHODS, ROTATIONS, TUNINGS, ActivationRange, Gptq, Pass, Rotate, Tune
from attar.compression.recipe.parser import KEEP, offer, parse_scheme
from attar.compression.recipe.recipe import HEAD, Override, Recipe
from attar.errors import UserError, code_of
from attar.text.files import neighbours

MAX_FILE_BYTES = 64 * 1024

_KEYS = ("recipe", "overrides", "keep", "head", "activation_range")

_Method = TypeVar("_Method", bound=Pass | Rotate | Tune)


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read a recipe's short name, or the YAML file at a path that ends in .yaml or .yml. Raises ValueError on anything
    unknown, naming what is near, and where the file does not exist."""
    if Path(name_or_path).suffix in (".yaml", ".yml"):
        path = Path(name_or_path)
        if not path.exists():
            raise UserError("file_not_found", f"{path}: no such file{neighbours(path)}")
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise UserError("file_too_large", f"{path}: a recipe file has at most {MAX_FILE_BYTES} bytes")
        try:
            return recipe_from_dict(yaml.safe_load(text))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise UserError("file_malformed", f"{path} is not valid YAML: {error}") from None
        except ValueError as error:
            raise UserError(code_of(error), f"{path}: {error}") from None
    return _named(str(name_or_path))


def recipe_from_dict(data: object) -> Recipe:
    """Build a recipe from the content of its YAML file. Raises ValueError as `load_recipe` does."""
    if not isinstance(data, dict) or not isinstance(data.get("recipe"), str):
        raise UserError(
            "recipe_malformed", "a recipe file is a mapping with a name under `recipe`, for example recipe: gptq-w4g128"
        )
    recipe = _named(data["recipe"])
    options = _sorted(recipe, {key: value for key, value in data.items() if key not in _KEYS})

    def told(one: _Method) -> _Method:
        return replace(one, **options[one.method])

    recipe = replace(
        recipe,
        passes=tuple(told(each) for each in recipe.passes),
        rotate=None if recipe.rotate is None else told(recipe.rotate),
        tune=None if recipe.tune is None else told(recipe.tune),
    )
    for key, switch in recipe.rounding.needs.items() if isinstance(recipe.rounding, Gptq) else ():
        if key in options[recipe.rounding.method] and not getattr(recipe.rounding, switch):
            raise UserError(
                "method_option_unused", f"{key} is read with {switch}: true alone, which {recipe.name} does not have"
            )
    if "overrides" in data:
        entries = data["overrides"]
        if not isinstance(entries, list):
            raise UserError(
                "recipe_malformed", "overrides is a list of entries {match: <pattern>, scheme: <scheme or keep>}"
            )
        recipe = replace(recipe, overrides=tuple(_override(entry) for entry in entries))
    if "keep" in data:
        patterns = data["keep"]
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            raise UserError("recipe_malformed", "keep is a list of module name patterns, for example [lm_head]")
        recipe = replace(recipe, keep=tuple(patterns))
    if "head" in data:
        patterns = [o.match for o in recipe.overrides] + (list(recipe.keep) if "keep" in data else [])
        for pattern in patterns:
            if fnmatch.fnmatchcase(HEAD, pattern):
                raise UserError(
                    "recipe_conflict",
                    f"head and the pattern {pattern!r} both decide about {HEAD}: leave one of them out",
                )
        recipe = recipe.with_head(data["head"])
    if (word := data.get("activation_range", "minmax")) not in get_args(ActivationRange):
        raise UserError(
            "method_option_invalid", f"activation_range is one of {', '.join(get_args(ActivationRange))}, not {word!r}"
        )
    said = tuple((method, key) for method, own in options.items() for key in own)
    return replace(recipe, activation_range=word, said=said)


def _named(name: str) -> Recipe:
    """Return the recipe of a short name."""
    said = parser.parse(name)
    return Recipe(said.passes, said.scheme, mix=said.mix, rotate=said.rotate, tune=said.tune)


def _override(entry: object) -> Override:
    if not isinstance(entry, dict):
        raise UserError(
            "override_invalid", f"an override is {{match: <pattern>, scheme: <scheme or keep>}}, not {entry!r}"
        )
    for key in entry:
        if key not in ("match", "scheme"):
            raise UserError(
                "override_invalid", f"unknown key {key!r} in an override{offer(str(key), ('match', 'scheme'))}"
            )
    match, scheme = entry.get("match"), entry.get("scheme")
    if not isinstance(match, str) or not isinstance(scheme, str):
        raise UserError(
            "override_invalid", "an override needs both match, a module name pattern, and scheme, a scheme or `keep`"
        )
    return Override(match, None if scheme == KEEP else parse_scheme(scheme))


def _sorted(recipe: Recipe, options: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """Sort the options by method: those under its name, and those that only it has. Raises ValueError on unknown
    options, and where an option's method is ambiguous."""
    methods = {one.method: one for one in (recipe.rotate, *recipe.passes, recipe.tune) if one is not None}
    everything = (*ROTATIONS.values(), *METHODS.values(), *TUNINGS.values())
    found: dict[str, dict[str, Any]] = {method: {} for method in methods}

    def give(method: str, key: str, value: object) -> None:
        if key in found[method]:
            raise UserError("recipe_conflict", f"{key} of {method} is given twice")
        found[method][key] = value

    for key, value in options.items():
        owners = [method for method, one in methods.items() if key in _options(one)]
        if key in methods and isinstance(value, Mapping):
            for name, own in value.items():
                if name not in _options(methods[key]):
                    raise UserError(
                        "method_option_unknown",
                        f"unknown option {name!r} of {key}{offer(str(name), _options(methods[key]))}",
                    )
                give(key, name, own)
        elif len(owners) > 1:
            ways = " or ".join(f"{method}: {{{key}: {value}}}" for method in owners)
            raise UserError(
                "recipe_malformed", f"{key} is an option of {' and of '.join(owners)}: say whose, as {ways}"
            )
        elif owners:
            give(owners[0], key, value)
        elif key in methods:
            raise UserError(
                "recipe_malformed", f"{key} is a method: what stands under it are its options by name, not {value!r}"
            )
        elif elsewhere := [each.method for each in everything if key in _options(each)]:
            raise UserError(
                "method_option_unused",
                f"{key} is an option of {' and '.join(elsewhere)}, which {recipe.name} does not use",
            )
        elif any(key == each.method for each in everything):
            raise UserError("method_option_unused", f"{key} is a method that {recipe.name} does not use")
        else:
            known = set(_KEYS).union(methods, *(_options(one) for one in methods.values()))
            raise UserError("method_option_unknown", f"unknown key {key!r}{offer(str(key), known)}")
    return found


def _options(one: Any) -> set[str]:
    return {f.name for f in fields(one)}
