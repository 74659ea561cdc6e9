"""Functions of a Python file as tools.

The file runs in a child process, never in this one: a call that hangs or crashes costs that process alone. State of the
file's own does not outlive a call.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attar.errors import UserError
from attar.text.tools.tool import Tool, ToolChoice, check

SECONDS = 60.0  # of a call
MAX_ANSWER = 1 << 20  # bytes that the child may write: a result is at most 64 KB, and JSON escapes it
CHILD = "attar.cli.tool_use._functions_child"


class Functions:
    """The functions of a file. `tools` describe them; arguments of each satisfy its schema. Raises UserError for a file
    that cannot be run, that defines no function, or one that cannot be described."""

    def __init__(self, path: Path, seconds: float = SECONDS) -> None:
        self._path, self._seconds = path, seconds
        if not path.is_file():
            raise UserError("file_not_found", f"--tools: no file {path}")
        found = self._ask({})
        if "error" in found:
            raise UserError("tools_invalid", f"--tools: {path}: {found['error']}")
        self.tools = tuple(Tool(**tool, strict=True) for tool in found["tools"])
        if not self.tools:
            raise UserError("tools_invalid", f"--tools: {path} defines no functions")
        check(self.tools, ToolChoice())

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a call as text, cut at 64 KB; of one that fails, or takes longer than its time, what
        went wrong."""
        found = self._ask({"name": name, "arguments": dict(arguments)})
        return str(found["result"]) if "result" in found else f"Error: {found['error']}"

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        command = [sys.executable, "-m", CHILD, str(self._path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        ) as child:
            try:
                data, _ = child.communicate(json.dumps(request).encode(), self._seconds)
            except subprocess.TimeoutExpired:
                return {"error": f"it took longer than {self._seconds:g} s"}
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
        try:
            found = json.loads(data[:MAX_ANSWER])
        except ValueError:
            return {"error": f"its process ended with status {child.returncode}"}
        return found if isinstance(found, dict) else {"error": "its process answered with no object"}
