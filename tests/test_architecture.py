"""The import graph of the package: what import-linter's contracts leave open, and that this test would see it.

Every import counts, also one inside a function: a lazy import hides a cycle, it does not open it.
"""

from __future__ import annotations

import ast
import importlib.util
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(importlib.util.find_spec("attar").origin).parent  # type: ignore[union-attr, arg-type]
ROOT = Path(__file__).resolve().parent.parent
MOST_MODULES = 15
"""Modules in a folder, `__init__` apart."""
APART = ("attar.engine", "attar.execution", "attar.sampling", "attar.scheduling", "attar.compression")
"""What the server must not reach, also through others."""

Graph = Mapping[str, frozenset[str]]


def module_of(path: Path) -> str:
    parts = ("attar", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, modules: Iterable[str]) -> frozenset[str]:
    """Modules that Python source imports, at any depth, of those that there are; the facade `attar` apart."""
    known, found = set(modules), set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full & known) or {str(node.module)}
    return frozenset((found & known) - {"attar"})


def graph() -> dict[str, frozenset[str]]:
    files = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    return {module: imports_of(path.read_text(), files) for module, path in files.items()}


def cycle(imports: Graph) -> list[str]:
    """A cycle of modules, the first again at its end; empty where there is none."""
    done, path = set[str](), list[str]()

    def search(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            done.add(module)
            path.append(module)
            for each in sorted(imports.get(module, ())):
                if found := search(each):
                    return found
            path.pop()
        return []

    return next((found for module in sorted(imports) if (found := search(module))), [])


def layers() -> list[list[str]]:
    """The layers of pyproject.toml from the top, each a list of packages."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (each["layers"] for each in contracts if each["type"] == "layers")
    return [[name.strip(" ()") for name in layer.split("|")] for layer in found]


def up(imports: Graph, order: list[list[str]]) -> Iterator[tuple[str, str]]:
    """Imports of another package that do not point to a lower layer."""
    level = {name: number for number, layer in enumerate(order) for name in layer}
    for module, others in imports.items():
        for other in others:
            mine, theirs = (name.split(".")[1] for name in (module + ".", other + "."))
            if mine and theirs and mine != theirs and level[theirs] <= level[mine]:
                yield module, other


def reached(imports: Graph, package: str) -> set[str]:
    """All modules that those of a package import, directly or through others, besides its own."""
    found, left = set[str](), [module for module in imports if f"{module}.".startswith(f"{package}.")]
    while left:
        new = imports.get(left.pop(), frozenset()) - found
        found |= new
        left += new
    return {module for module in found if not f"{module}.".startswith(f"{package}.")}


def crowded(imports: Graph) -> dict[str, int]:
    """Folders of more than `MOST_MODULES` modules."""
    packages = {module.rpartition(".")[0] for module in imports}
    count = {
        package: sum(module.rpartition(".")[0] == package and module not in packages for module in imports)
        for package in packages
    }
    return {package: number for package, number in count.items() if number > MOST_MODULES}


def apart(imports: Graph) -> set[str]:
    """What `server` reaches and must not."""
    return {each for each in reached(imports, "attar.server") if f"{each}.".startswith(tuple(f"{a}." for a in APART))}


@pytest.fixture(scope="module")
def imports() -> dict[str, frozenset[str]]:
    return graph()


def test_no_files_import_each_other_in_a_cycle(imports: Graph) -> None:
    assert cycle(imports) == []


def test_imports_of_another_package_point_to_a_lower_layer(imports: Graph) -> None:
    assert list(up(imports, layers())) == []


def test_no_folder_holds_more_than_fifteen_modules(imports: Graph) -> None:
    assert crowded(imports) == {}


def test_the_server_reaches_no_engine(imports: Graph) -> None:
    assert apart(imports) == set()


# Each check sees what it is for: the graph as it is, with one import or one folder more.


def test_a_cycle_is_seen(imports: Graph) -> None:
    lower, upper = "attar.scheduling.block_pool", "attar.scheduling.scheduler"
    assert lower in imports[upper]
    broken = {**imports, lower: imports[lower] | {upper}}
    assert set(cycle(broken)) >= {lower, upper}


def test_an_import_that_points_up_is_seen(imports: Graph) -> None:
    broken = {**imports, "attar.kv.pages": imports["attar.kv.pages"] | {"attar.kernels.ops"}}
    assert list(up(broken, layers())) == [("attar.kv.pages", "attar.kernels.ops")]


def test_a_crowded_folder_is_seen(imports: Graph) -> None:
    broken = {**imports, **{f"attar.metrics.m{number}": frozenset[str]() for number in range(16)}}
    assert list(crowded(broken)) == ["attar.metrics"]


def test_a_server_that_reaches_an_engine_through_others_is_seen(imports: Graph) -> None:
    broken = {**imports, "attar.protocol.messages": frozenset({"attar.engine.engine"})}
    assert "attar.engine.engine" in apart(broken)
    assert "attar.scheduling.scheduler" in apart(broken)


def test_an_import_inside_a_function_counts() -> None:
    source = "def f():\n    from attar.kv import pages\n    import attar.plan.fit\n"
    modules = ["attar", "attar.kv", "attar.kv.pages", "attar.plan.fit"]
    assert imports_of(source, modules) == {"attar.kv.pages", "attar.plan.fit"}
