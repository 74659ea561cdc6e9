"""Programs that a model wrote, each run in a process that is shut in (`program_child.py`), or not at all."""

from __future__ import annotations

import tempfile

from attar.errors import Code, UserError
from attar.text.limited_child import LimitedChild
from reals.program_child import PASSED

SECONDS = 10.0  # a busy machine delays a program, which has 2 s of a processor
GRACE = 10.0  # seconds that the supervisor has beyond the program's


class NotRun(UserError):
    """A program was not run: one sentence says why, such as that this system refuses namespaces."""

    def __init__(self, message: str, code: Code | None = None) -> None:
        super().__init__(code or "feature_unsupported", message)


def verdict(program: str, seconds: float = SECONDS) -> str:
    """Run a Python program and return `passed`, or why it did not run to its end, after so many seconds at most. Raises
    NotRun."""
    child = LimitedChild("reals.program_child", ("reals",), "program", NotRun)
    with tempfile.TemporaryDirectory() as folder:
        try:
            return child.ask(f"{folder}\n{seconds}\n{program}".encode("utf-8", "replace"), seconds + GRACE)
        finally:
            child.close()


def refused() -> str | None:
    """Return why programs cannot be run here; None where they can."""
    try:
        said = verdict("")
    except NotRun as error:
        return str(error)
    return None if said == PASSED else said
