"""What the clients' programs share; it needs the standard library alone, for it runs in each client's environment.

A check is a function `check(at)` that asserts. Each program ends with `run(PACKAGE, checks)`, which prints a JSON line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CITIES = ("Paris", "Oslo")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION = "What is the weather in Paris?"
WORDS = 400  # most characters of a failure's words


@dataclass(frozen=True)
class At:
    """Where the server is. `sense`: whether its model follows instructions; the embedded one does not."""

    url: str
    model: str
    sense: bool

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


def is_city(value: Any, at: At | None = None) -> None:
    """Assert that an object, or its JSON, fits `SCHEMA`. With `at` it was asked for at temperature 0: then a model that
    follows instructions names the city of `QUESTION`."""
    found = json.loads(value) if isinstance(value, str) else value
    assert found.keys() == {"city"} and found["city"] in CITIES, found  # noqa: PT018
    assert at is None or not at.sense or found["city"] == "Paris", found


def command(*words: str, seconds: float = 300.0) -> str:
    """Run a command line to its end; return what it prints. Other statuses than 0 raise, with its last words."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"exit {done.returncode}: {(done.stdout + done.stderr)[-WORDS:]}"
    return done.stdout


def run(package: str, *checks: Callable[[At], None]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--sense", action="store_true")
    at = At(**vars(parser.parse_args()))
    passed, failed = list[str](), dict[str, str]()
    for check in checks:
        try:
            check(at)
            passed.append(check.__name__)
        except Exception as error:
            traceback.print_exc()
            failed[check.__name__] = f"{type(error).__name__}: {error}"[:WORDS]
    print(json.dumps({"version": importlib.metadata.version(package), "passed": passed, "failed": failed}), flush=True)
