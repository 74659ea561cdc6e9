"""The protocol: two processes speak it, of which one must stay small."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from attar import protocol

FOLDER = Path(protocol.__file__).parent


def test_it_imports_msgspec_and_the_standard_library_alone() -> None:
    """Besides `attar.errors`, for which the same holds."""
    found: set[str] = set()
    for file in (*FOLDER.glob("*.py"), FOLDER.parent / "errors.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {each.name for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
    ours = {name for name in found if name.startswith("attar.protocol.") or name == "attar.errors"}
    assert ours
    assert {name.partition(".")[0] for name in found - ours} <= {*sys.stdlib_module_names, "msgspec"}
