"""A text to learn, and the model whose states drafts learn from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from attar.drafting.target import Target
from tests.conftest import token_ids


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """One text again and again, which can be learned by heart."""
    return torch.tensor(token_ids(1, 32, seed=3)).repeat(6, 1)


@pytest.fixture(scope="module")
def target(tiny: Path) -> Target:
    return Target(tiny)
