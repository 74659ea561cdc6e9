"""The process that holds the functions of a file: describes them as tools, or runs one call, and ends.

`python -m attar.cli.tool_use._functions_child FILE` reads one JSON object on stdin: empty to describe, or a `name` with
`arguments`. It answers with one JSON object on stdout: `tools`, `result`, or `error`. What functions print is dropped.
Besides the standard library it imports `text/tools/functions.py`, which imports nothing else.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from attar.text.tools.functions import described

MODULE = "attar_chat_tools"
MAX_RESULT = 64 << 10  # bytes of UTF-8
CUT = "\n[cut: the result is longer than 64 KB]"


def load(path: str) -> dict[str, Callable[..., Any]]:
    """Run the file, and return the functions that it defines, less those whose names begin with an underscore."""
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise ValueError("it is no Python file")
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = vars(module).items()
    return {
        name: each for name, each in found if inspect.isfunction(each) and each.__module__ == MODULE and name[0] != "_"
    }


def answer(path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the tools, or the result of a call; what fails is an `error`."""
    try:
        functions = load(path)
        if "name" not in request:
            return {"tools": [described(each, name) for name, each in functions.items()]}
        result = functions[request["name"]](**request["arguments"])
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    except SystemExit as end:
        return {"error": f"SystemExit: {end}"}
    except Exception as error:  # whatever a function raises is what the model is told
        return {"error": f"{type(error).__name__}: {error}"[:MAX_RESULT]}
    data = text.encode("utf-8", "replace")
    if len(data) > MAX_RESULT:
        text = data[:MAX_RESULT].decode("utf-8", "ignore") + CUT
    return {"result": text}


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    out = os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    out.write(json.dumps(answer(sys.argv[1], request)).encode())
    out.flush()
    os._exit(0)  # threads of a function hold nothing up


if __name__ == "__main__":
    main()
