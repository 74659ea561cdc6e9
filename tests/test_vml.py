"""Torch's elementwise functions are called once, by one thread, before anything computes with them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from attar import vml

SOURCE = Path(vml.__file__).parents[1]
WORK = [  # where each command's work begins, and that of each process
    "attar.checkpoints.convert.run", "attar.compression.training.finetune", "attar.compression.runs.pipeline",
    "attar.engine.llm.llm", "attar.engine.main", "attar.execution.parallel.worker", "attar.evaluation.report",
    "attar.metrics.measure", "attar.model.decoder", "attar.model.rope",
]  # fmt: skip


def imported(module: str) -> set[str]:
    """Modules of attar that one names at its top, and the packages they are in."""
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():  # a name in a module
        return set()
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("attar.")}


@pytest.mark.parametrize("module", WORK)
def test_whatever_computes_has_settled_them_first(module: str) -> None:
    reached, left = set[str](), [module]
    while left:
        for name in imported(left.pop()) - reached:
            reached.add(name)
            left.append(name)
    assert "attar.vml" in reached


def test_each_is_called_in_either_precision_with_too_little_for_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, torch.dtype, int]] = []

    def spy(name: str) -> None:
        real = getattr(torch, name)

        def call(x: torch.Tensor) -> torch.Tensor:
            called.append((name, x.dtype, x.numel()))
            found: torch.Tensor = real(x)
            return found

        monkeypatch.setattr(torch, name, call)

    for name in vml.FUNCTIONS:
        spy(name)
    vml.settle()
    assert sorted(called, key=str) == sorted(
        ((name, dtype, 1) for name in vml.FUNCTIONS for dtype in (torch.float32, torch.float64)), key=str
    )
