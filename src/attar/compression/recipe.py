"""A recipe: which passes run over a model, in which order, and which linear is stored in which scheme. Pure data.

A recipe has a short name, `method[+method]-scheme`: `rtn-w4g128`, `awq-w3g64`, `smoothquant+gptq-w8a8`. Methods come in
two sorts. Transforms (`smoothquant`, `awq`) move scale between a linear and what feeds it; roundings (`rtn`, `gptq`)
choose codes. A recipe is any transforms followed by one rounding, which is `rtn` where none is named. SmoothQuant's
three presets (Xiao et al. 2022, table 2) are ways to scale the activations, hence spellings of the scheme: `w8a8-o1` is
w8a8 (per token), `w8a8-o2` w8a8-atensor (per tensor), `w8a8-o3` w8a8-static (fixed at calibration).

The same as a YAML file, with the methods' options and per-layer overrides:

    recipe: gptq-w4g128
    damping: 0.02
    head: int8
    overrides:
      - {match: "*.down_proj", scheme: w8}
      - {match: "model.layers.0.*", scheme: keep}

The output matrix, `lm_head`, stays unless `head` (or an override, or a `keep` that leaves it out) says otherwise: bf16
(as it is), int8, int4, or a scheme of weights alone. It can be larger than several blocks and is never in memory whole:
it is rounded to nearest, rows after rows, whatever the method, with the method's `scale_search`.

Whatever is unknown in it is an error that offers the nearest names: a misspelt option that is silently ignored costs
hours. `to_dict` is canonical (two spellings of one recipe give one dict, defaults written out) because the receipt
stores it and a resumed run compares it. Not done: options per layer. An override changes the scheme, never the method,
so that the walk over the blocks stays the same for every recipe. Torch-free: planners read recipes too.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml

from attar.formats.scheme import HEADS, Scheme
from attar.text.files import neighbours

ScaleSearch = Literal["minmax", "mse"]
Order = Literal["natural", "activation"]

Keep = Literal["keep"]
KEEP: Keep = "keep"
"""The word that stands where a scheme could, for a linear that stays as it is."""

HEAD = "lm_head"
"""The output matrix of every family."""

KEPT = (HEAD, "*.mlp.gate", "*.block_sparse_moe.gate", "*.shared_expert_gate")
"""Kept by default: the output matrix, and the routers of mixtures of experts, tiny matrices whose error picks the wrong
expert."""

MAX_FILE_BYTES = 64 * 1024

PRESETS: Mapping[str, str] = {"w8a8-o1": "w8a8", "w8a8-o2": "w8a8-atensor", "w8a8-o3": "w8a8-static"}

_KEYS = ("recipe", "overrides", "keep", "head")
_EXAMPLES = ("rtn-w4g128", "awq-w3g64", "gptq-w4g128", "awq+gptq-w4g128", "smoothquant-w8a8", "smoothquant+gptq-w8a8")
_SCHEMES = ("w4g128", "w4g64", "w4g32", "w3g128", "w3g64", "w2g64", "w4g128-asym", "w8", "w8a8", "fp8", "fp8-e5m2")


@dataclass(frozen=True, slots=True)
class SmoothQuant:
    """Divide activations and multiply weights by max|x|^alpha / max|w|^(1 - alpha), channel by channel."""

    method: ClassVar[str] = "smoothquant"
    alpha: float | None = None  # None: the model family's own, `smoothquant.ALPHA`

    def __post_init__(self) -> None:
        if self.alpha is not None:
            _number("alpha", self.alpha, 0, 1)


@dataclass(frozen=True, slots=True)
class Awq:
    """Search, group of linears by group, the power of mean|x| to scale weight columns by; then, how far to clip."""

    method: ClassVar[str] = "awq"
    points: int = 20  # alphas tried, 0 and 1 among them
    clip: bool = True

    def __post_init__(self) -> None:
        _whole("points", self.points, 2)
        _truth("clip", self.clip)


@dataclass(frozen=True, slots=True)
class Rtn:
    """Round every weight to the nearest code."""

    method: ClassVar[str] = "rtn"
    scale_search: ScaleSearch = "minmax"

    def __post_init__(self) -> None:
        _word("scale_search", self.scale_search, ("minmax", "mse"))


@dataclass(frozen=True, slots=True)
class Gptq:
    """Round column by column; later columns make up for the error of earlier ones on the calibration inputs."""

    method: ClassVar[str] = "gptq"
    block: int = 128  # columns between two lazy updates: speed, not results
    damping: float = 0.01  # fraction of the Hessian's mean diagonal that is added to the diagonal
    order: Order = "activation"
    scale_search: ScaleSearch = "mse"
    static_groups: bool = True  # scales are set before the sweep; false: when it reaches the group, in natural order

    def __post_init__(self) -> None:
        _whole("block", self.block, 1)
        _number("damping", self.damping, 0, 1)
        _word("order", self.order, ("natural", "activation"))
        _word("scale_search", self.scale_search, ("minmax", "mse"))
        _truth("static_groups", self.static_groups)
        if not self.static_groups and self.order == "activation":
            raise ValueError(
                "static_groups: false needs order: natural, since activation order visits groups in pieces"
            )


Pass = SmoothQuant | Awq | Rtn | Gptq

TRANSFORMS: Mapping[str, type[SmoothQuant] | type[Awq]] = {c.method: c for c in (SmoothQuant, Awq)}
ROUNDINGS: Mapping[str, type[Rtn] | type[Gptq]] = {c.method: c for c in (Rtn, Gptq)}
METHODS: Mapping[str, type[Pass]] = {**TRANSFORMS, **ROUNDINGS}


@dataclass(frozen=True, slots=True)
class Override:
    """Linears whose module name matches the glob `match` are stored in `scheme`; where it is None, they stay."""

    match: str
    scheme: Scheme | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """The passes to run, the scheme of every linear they reach, and the linears they leave alone.

    Only linears are ever compressed: embeddings and norms stay, whatever a pattern says, but for an embedding that is
    the output matrix. The first override that matches a linear decides; then `keep`; then the default `scheme`. Of the
    output matrix `head` decides before them all, unless it is None.
    """

    passes: tuple[Pass, ...]
    scheme: Scheme
    overrides: tuple[Override, ...] = ()
    keep: tuple[str, ...] = KEPT
    head: Scheme | Keep | None = None

    @property
    def name(self) -> str:
        """The canonical short name; it says nothing of options, overrides, `keep` and `head`."""
        methods = [p.method for p in self.passes]
        if len(methods) > 1 and methods[-1] == "rtn":
            methods.pop()
        return f"{'+'.join(methods)}-{self.scheme.name}"

    @property
    def rounding(self) -> Rtn | Gptq:
        """The last pass, which chooses the codes."""
        last = self.passes[-1]
        assert isinstance(last, Rtn | Gptq)
        return last

    def scheme_for(self, module: str) -> Scheme | None:
        """The scheme of the linear with this module name; None where it stays as it is."""
        if module == HEAD and self.head is not None:
            return None if self.head == KEEP else self.head
        for override in self.overrides:
            if fnmatch.fnmatchcase(module, override.match):
                return override.scheme
        return None if any(fnmatch.fnmatchcase(module, pattern) for pattern in self.keep) else self.scheme

    def schemes(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, Scheme | None]:
        """The scheme of each linear, given the module name and shape (out, in) of all of them.

        Raises ValueError where an override matches no linear, and, naming the linear, where a group size does not
        divide its columns or a scheme is not for the output matrix: all before any work is done.
        """
        for override in self.overrides:
            if not any(fnmatch.fnmatchcase(name, override.match) for name in shapes):
                raise ValueError(f"override {override.match!r} matches no linear{_offer(override.match, shapes)}")
        chosen = {name: self.scheme_for(name) for name in shapes}
        for name, scheme in chosen.items():
            if scheme is not None:
                try:
                    scheme.weight.groups(shapes[name][1])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
                if name == HEAD and (scheme.activation is not None or scheme.weight.granularity == "tensor"):
                    raise ValueError(
                        f"{name}: the output matrix has a scheme of weights alone, with a scale for each row or group, "
                        f"such as w8 or w4g128, not {scheme.name}"
                    )
        return chosen

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready and canonical: equal recipes give equal dicts."""
        return {
            "recipe": self.name,
            "passes": [{"method": p.method, **asdict(p)} for p in self.passes],
            "scheme": self.scheme.name,
            "overrides": [{"match": o.match, "scheme": o.scheme.name if o.scheme else KEEP} for o in self.overrides],
            "keep": list(self.keep),
            "head": self.head_name,
        }

    @property
    def head_name(self) -> str:
        """The scheme of the output matrix by name, or `keep`."""
        scheme = self.scheme_for(HEAD)
        return KEEP if scheme is None else scheme.name

    @staticmethod
    def load(name_or_path: str | Path) -> Recipe:
        """Read a recipe's short name, or the YAML file at a path that ends in .yaml or .yml.

        Raises ValueError on anything unknown, naming what is near, and where the file does not exist.
        """
        if Path(name_or_path).suffix in (".yaml", ".yml"):
            path = Path(name_or_path)
            if not path.exists():
                raise ValueError(f"{path}: no such file{neighbours(path)}")
            with path.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1)
            if len(text) > MAX_FILE_BYTES:
                raise ValueError(f"{path}: a recipe file has at most {MAX_FILE_BYTES} bytes")
            try:
                return Recipe.from_dict(yaml.safe_load(text))
            except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
                raise ValueError(f"{path} is not valid YAML: {error}") from None
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        return _parse_name(str(name_or_path))

    @staticmethod
    def from_dict(data: object) -> Recipe:
        """Build a recipe from what its YAML file holds. Raises ValueError as `load` does."""
        if not isinstance(data, dict) or not isinstance(data.get("recipe"), str):
            raise ValueError("a recipe file is a mapping with a name under `recipe`, for example recipe: gptq-w4g128")
        recipe = _parse_name(data["recipe"])
        options = {key: value for key, value in data.items() if key not in _KEYS}
        known = set(_KEYS).union(*(_options(p) for p in recipe.passes))
        for key in options:
            if key not in known:
                owners = [method for method, cls in METHODS.items() if key in _options(cls)]
                if owners:
                    raise ValueError(f"{key} is an option of {' and '.join(owners)}, which {recipe.name} does not use")
                raise ValueError(f"unknown key {key!r}{_offer(str(key), known)}")
        passes = tuple(replace(p, **{k: v for k, v in options.items() if k in _options(p)}) for p in recipe.passes)
        recipe = replace(recipe, passes=passes)
        if "overrides" in data:
            entries = data["overrides"]
            if not isinstance(entries, list):
                raise ValueError("overrides is a list of entries {match: <pattern>, scheme: <scheme or keep>}")
            recipe = replace(recipe, overrides=tuple(_override(entry) for entry in entries))
        if "keep" in data:
            patterns = data["keep"]
            if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
                raise ValueError("keep is a list of module name patterns, for example [lm_head]")
            recipe = replace(recipe, keep=tuple(patterns))
        if "head" in data:
            said = [o.match for o in recipe.overrides] + (list(recipe.keep) if "keep" in data else [])
            for pattern in said:
                if fnmatch.fnmatchcase(HEAD, pattern):
                    raise ValueError(
                        f"head and the pattern {pattern!r} both decide about {HEAD}: leave one of them out"
                    )
            recipe = replace(recipe, head=parse_head(data["head"]))
        return recipe


def parse_head(word: object) -> Scheme | Keep:
    """What a user's word for the output matrix means. Raises ValueError on anything unknown, naming what is near."""
    if not isinstance(word, str):
        raise ValueError(f"head is bf16, int8, int4 or a scheme, not {word!r}")
    name = HEADS.get(word, word) or KEEP
    if name == KEEP:
        return KEEP
    try:
        return Scheme.parse(name)
    except ValueError:
        raise ValueError(f"unknown head {word!r}{_offer(word, (*HEADS, KEEP, *_SCHEMES))}") from None


def _parse_name(name: str) -> Recipe:
    methods, dash, scheme = name.partition("-")
    if not dash or not scheme:
        raise ValueError(f"recipe {name!r} is not of the form method[+method]-scheme{_offer(name, _EXAMPLES)}")
    passes: list[Pass] = []
    for word in methods.split("+"):
        if word not in METHODS:
            raise ValueError(f"recipe {name!r}: unknown method {word!r}{_offer(word, METHODS)}")
        if any(p.method == word for p in passes):
            raise ValueError(f"recipe {name!r} names {word} twice")
        if passes and passes[-1].method in ROUNDINGS:
            raise ValueError(f"recipe {name!r}: {passes[-1].method} chooses the codes, so it comes last, and alone")
        passes.append(METHODS[word]())
    if passes[-1].method not in ROUNDINGS:
        passes.append(Rtn())
    return Recipe(tuple(passes), _parse_scheme(scheme))


def _parse_scheme(name: str) -> Scheme:
    try:
        return Scheme.parse(PRESETS.get(name, name))
    except ValueError as error:
        raise ValueError(f"{error}{_offer(name, (*_SCHEMES, *PRESETS))}") from None


def _override(entry: object) -> Override:
    if not isinstance(entry, dict):
        raise ValueError(f"an override is {{match: <pattern>, scheme: <scheme or keep>}}, not {entry!r}")
    for key in entry:
        if key not in ("match", "scheme"):
            raise ValueError(f"unknown key {key!r} in an override{_offer(str(key), ('match', 'scheme'))}")
    match, scheme = entry.get("match"), entry.get("scheme")
    if not isinstance(match, str) or not isinstance(scheme, str):
        raise ValueError("an override needs both match, a module name pattern, and scheme, a scheme or `keep`")
    return Override(match, None if scheme == KEEP else _parse_scheme(scheme))


def _options(one: Pass | type[Pass]) -> set[str]:
    return {f.name for f in fields(one)}


def _offer(word: str, known: Iterable[str]) -> str:
    """The end of an error sentence: the nearest known names, or all of them where none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    return f": did you mean {' or '.join(close)}?" if close else f": known are {', '.join(names[:12])}"


def _number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} is a number from {low} to {high}, not {value!r}")


def _whole(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} is a whole number of at least {low}, not {value!r}")


def _truth(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is true or false, not {value!r}")


def _word(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")
