"""What the package may import and call: rules that no linter at hand can state.

The floors themselves are contracts of import-linter, in pyproject.toml.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

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
        *("attar.engine.request", "attar.engine.scheduler", "attar.engine.settings", "attar.server.supervisor"),
        *("attar.cli.main", "attar.load.sweep"),
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


def test_package_files_of_rooms_are_empty() -> None:
    """A room's `__init__.py` that imported something would drag it onto torch-free paths."""
    filled = [path for path in FILES if path.name == "__init__.py" and path.parent != PACKAGE and path.read_text()]
    assert filled == []
