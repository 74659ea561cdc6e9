"""The model that heads draft for, with the reference kernels and with the native ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attar.kernels import dispatch
from attar.model.decoder import Decoder


@pytest.fixture(params=["ref", "native"])
def target(request: pytest.FixtureRequest, tiny_decoder: Callable[..., Decoder]) -> Decoder:
    store = dispatch.store("exact") if request.param == "native" else None
    if request.param == "native" and store is None:
        pytest.skip("the native kernels are off or do not load")
    return tiny_decoder(store=store)
