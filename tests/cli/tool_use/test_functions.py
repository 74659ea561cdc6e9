"""Functions of a file as tools: described by signature and docstring, run apart, bounded in time and size."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from attar.cli.tool_use._functions_child import CUT, MAX_RESULT
from attar.cli.tool_use.functions import Functions
from attar.errors import UserError

FILE = '''
import os, sys, time
from pathlib import Path
from typing import Annotated, Literal

def weather(city: Annotated[str, "Its name."], unit: Literal["C", "F"] = "C", days: list[int] | None = None) -> dict:
    """Return the weather of a city."""
    print("\\033[2Jnoise")
    return {"city": city, "unit": unit, "days": days}

def long(size: int) -> str:
    return "ø" * size

def slow() -> None:
    time.sleep(600)

def fail() -> None:
    raise KeyError("x")

def leave() -> None:
    sys.exit(3)

def crash() -> None:
    os.abort()

def _hidden() -> None: ...
'''


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Functions:
    path = tmp_path_factory.mktemp("functions") / "functions.py"
    path.write_text(FILE)
    return Functions(path)


def test_functions_are_described(functions: Functions) -> None:
    assert [tool.name for tool in functions.tools] == ["weather", "long", "slow", "fail", "leave", "crash"]
    weather = functions.tools[0]
    assert (weather.description, weather.strict) == ("Return the weather of a city.", True)
    assert weather.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name."},
            "unit": {"enum": ["C", "F"]},
            "days": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


def test_calls_give_text(functions: Functions, capfd: pytest.CaptureFixture[str]) -> None:
    assert functions.call("weather", {"city": "Køln"}) == '{"city": "Køln", "unit": "C", "days": null}'
    assert functions.call("fail", {}) == "Error: KeyError: 'x'"
    assert functions.call("leave", {}) == "Error: SystemExit: 3"
    assert functions.call("crash", {}).startswith("Error: its process ended")
    assert functions.call("long", {"size": 10}) == "ø" * 10
    assert capfd.readouterr() == ("", "")


def test_results_are_bounded(functions: Functions) -> None:
    found = functions.call("long", {"size": MAX_RESULT})
    assert found == "ø" * (MAX_RESULT // 2) + CUT


def test_calls_are_bounded_in_time(functions: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_seconds", 2.0)
    began = time.monotonic()
    assert functions.call("slow", {}) == "Error: it took longer than 2 s"
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "tools_invalid"),
        ("x = 1", "tools_invalid"),
        ("def f(a): ...", "tools_invalid"),
        ("def f(*a: int): ...", "tools_invalid"),
        ("def f(a: bytes): ...", "tools_invalid"),
        ("def f(", "tools_invalid"),
        ("1 / 0", "tools_invalid"),
        (None, "file_not_found"),
    ],
)
def test_files_that_are_no_tools(tmp_path: Path, text: str | None, code: str) -> None:
    path = tmp_path / "functions.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as error:
        Functions(path)
    assert error.value.code == code
