"""What the package may import and call: rules that no linter at hand can state.

The floors themselves are contracts of import-linter, in pyproject.toml.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # the tree of a regular expression is public nowhere
from typing import Any

import pytest
from pathspec import GitIgnoreSpec

IMPORT_CPU_SECONDS = 0.3
PACKAGE = Path(importlib.util.find_spec("attar").origin).parent  # type: ignore[union-attr, arg-type]
FILES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "imp"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "tempfile.mktemp"}

MEASURE = """
import json, resource, sys
before = resource.getrusage(resource.RUSAGE_SELF)
import attar
after = resource.getrusage(resource.RUSAGE_SELF)
cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps({"cpu": cpu, "modules": sorted(sys.modules)}))
"""


def imported(path: Path) -> list[str]:
    """Every module that the file imports, at any depth, `from a import b` as both a and a.b."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            names += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def violations(source: str) -> list[str]:
    """Forbidden imports and calls in Python source, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            found += [f"{node.lineno}: import {m}" for m in modules if m.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = any(k.arg == "shell" and getattr(k.value, "value", None) is not False for k in node.keywords)
            if name in FORBIDDEN_CALLS | FORBIDDEN_METHODS or shell:
                found.append(f"{node.lineno}: {name}()")
    return found


def test_import_attar_is_quick_and_loads_nothing_heavy() -> None:
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    loaded = set(runs[0]["modules"])
    assert "attar" in loaded
    assert not loaded & {"torch", "numpy", "attar._native", "transformers", "tokenizers", "huggingface_hub"}
    assert statistics.median(run["cpu"] for run in runs) < IMPORT_CPU_SECONDS


@pytest.mark.parametrize(
    "module",
    [
        *(
            "attar.env",
            "attar.machine",
            "attar.version",
            "attar.formats.scheme",
            "attar.model.config",
            "attar.plan.fit",
        ),
        *("attar.protocol.request", "attar.scheduling.scheduler", "attar.protocol.settings", "attar.server.supervisor"),
        *("attar.cli.main", "attar.load.sweep", "attar.compression.runs.mistakes"),
    ],
)
def test_the_torch_free_island_stays_so_when_run(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_kernels_native_imports_the_extension_and_imports_torch_first() -> None:
    users = [path.relative_to(PACKAGE).as_posix() for path in FILES if "attar._native" in imported(path)]
    assert users == ["kernels/native/extension.py"]
    names = imported(PACKAGE / "kernels" / "native" / "extension.py")
    assert names.index("torch") < names.index("attar._native")


FEW = 16
"""Repeats, at most, of something that repeats itself."""


def doubtful(source: str, module: str | None = None) -> list[str]:
    """Regular expressions that are not written out, if only in terms of what `module` defines, or in which what repeats
    without a small bound contains what may repeat again: these can take exponential time to fail. What repeats
    possessively never tries another way. As `line: pattern`."""

    def nested(pattern: Any, inside: bool) -> bool:
        for operator, about in pattern:
            possessive = str(operator) == "POSSESSIVE_REPEAT"
            repeats = str(operator).endswith("REPEAT") and not possessive
            endless = repeats and int(about[1]) > FEW
            if inside and repeats and int(about[1]) > 1:
                return True
            parts = about if isinstance(about, tuple | list) else [about]
            within = [part for each in parts for part in (each if isinstance(each, list) else [each])]
            if any(
                isinstance(part, _parser.SubPattern) and nested(part, not possessive and (inside or endless))
                for part in within
            ):
                return True
        return False

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and re.fullmatch(r"re\.[a-z]+", name := ast.unparse(node.func)):
            if name in ("re.escape", "re.purge"):
                continue
            pattern = written(node.args[0], module)
            doubt = pattern is None or nested(_parser.parse(pattern), False)
            found += [f"{node.lineno}: {ast.unparse(node.args[0])}"] if doubt else []
    return found


def written(node: ast.expr, module: str | None) -> str | None:
    """The pattern that an expression is, with what a module of ours defines; None where that is not enough."""
    names = {} if module is None or isinstance(node, ast.Constant | ast.Name) else vars(importlib.import_module(module))
    try:
        pattern = eval(compile(ast.Expression(node), "", "eval"), dict(names))
    except NameError:
        return None
    return pattern.decode("latin-1") if isinstance(pattern, bytes) else str(pattern)


def test_a_wheel_has_every_module() -> None:
    """scikit-build-core leaves out of wheels, too, what `sdist.exclude` names."""
    root = Path(__file__).parents[1]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["scikit-build"]
    left_out = GitIgnoreSpec.from_lines([*build["sdist"]["exclude"], *build["wheel"]["exclude"]])
    assert left_out.match_file("tests/conftest.py")
    assert [path for path in FILES if left_out.match_file(f"src/attar/{path.relative_to(PACKAGE).as_posix()}")] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_pickle_and_no_code_from_data(path: Path) -> None:
    assert violations(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import loads", "eval('1')", "exec(text)", "torch.load(path)", "yaml.load(text)",
     "subprocess.run(command, shell=True)", "def f():\n    import marshal"],
)  # fmt: skip
def test_the_check_itself_sees(source: str) -> None:
    assert len(violations(source)) == 1


def test_the_check_itself_lets_pass() -> None:
    assert violations("re.compile('a'); model.eval(); safetensors.torch.load(data); yaml.safe_load(text)") == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_regular_expression_takes_long_to_fail(path: Path) -> None:
    """`checkpoints/patterns.py` alone compiles what a file says, and says there what it refuses. `recursive.py`
    compiles classes of a request's grammar, each of which matches one character."""
    of_one_character = {PACKAGE / "text" / "schemas" / "recursive.py": ["atom"]}
    if path != PACKAGE / "checkpoints" / "patterns.py":
        module = ".".join(("attar", *path.relative_to(PACKAGE).with_suffix("").parts))
        found = [each.partition(": ")[2] for each in doubtful(path.read_text(), module)]
        assert found == of_one_character.get(path, [])


@pytest.mark.parametrize(
    "source",
    [
        "re.compile(text)",
        "re.compile(f'{text}')",
        "re.match('(a+)+b', x)",
        "re.match('(?:a++b+)+b', x)",
        "re.sub('(?:a|b*)*', '', x)",
        "re.search(r'(\\d{1,9000}){2,}', x)",
    ],
)
def test_the_check_of_regular_expressions_itself_sees(source: str) -> None:
    assert len(doubtful(f"import re\n{source}")) == 1


def test_the_check_of_regular_expressions_itself_lets_pass() -> None:
    passes = ["'a+b{2}' 'c*'", "'(ab){1,9}'", "'(a+)*+(?:b++c)*'"]
    assert doubtful("import re\npattern.match(text)\n" + "\n".join(f"re.compile({each})" for each in passes)) == []


def test_package_files_hold_a_short_docstring_alone() -> None:
    """A package's `__init__.py` that imported something would drag it onto torch-free paths."""
    wrong = []
    for path in FILES:
        if path.name == "__init__.py" and path.parent != PACKAGE:
            tree = ast.parse(path.read_text())
            text = ast.get_docstring(tree)
            if text is None or len(text.splitlines()) > 15 or len(tree.body) > 1:
                wrong.append(path)
    assert wrong == []
