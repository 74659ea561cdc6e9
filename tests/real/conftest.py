"""Two real models, loaded once for all tests of a worker: by the kernels as users run them, and by the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attar.checkpoints.sources import opening
from attar.engine.llm.llm import LLM
from attar.kernels import dispatch
from attar.model.decoder import Decoder

NAMES = ("smollm2-135m", "qwen2.5-coder-0.5b")


@pytest.fixture(scope="session", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="session")
def path(name: str, real_model: Callable[[str], Path]) -> Path:
    return real_model(name)


@pytest.fixture(scope="session")
def llm(path: Path) -> LLM:
    """The model with the default activations, on native kernels."""
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    return LLM(path)


@pytest.fixture(scope="session")
def reference(path: Path) -> Decoder:
    """The model in float32 by the reference: rows and weights are exact."""
    return opening.load(path, torch.float32)


@pytest.fixture(scope="session")
def wikitext(shared: Path) -> str:
    return (shared / "data" / "text" / "wikitext2_test.txt").read_text()
