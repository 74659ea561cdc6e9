"""Costs of steps of several rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attar.evaluation import row_costs
from attar.kernels import dispatch
from attar.kv.schemes import SCHEMES
from attar.model.decoder import Decoder
from tests.errors import user_error


@pytest.mark.parametrize("kv", ["float32", "int8", "int4"])
def test_every_number_of_rows_has_a_time(tiny_decoder: Callable[..., Decoder], kv: str) -> None:
    store = dispatch.store("int8g32")
    if store is None:
        pytest.skip("the native kernels are off or do not load")
    decoder = tiny_decoder(scheme="w4g32", store=store)
    found = row_costs.measure(decoder, SCHEMES[kv], 20, (1, 2, 5), rounds=3)
    assert len(found) == 3
    assert all(each > 0 for each in found)


def test_numbers_of_rows_are_read() -> None:
    assert row_costs.parse("1, 2,4,2") == (1, 2, 4)
    for text in ("", "1,,2", "a", "-1", "1.5"):
        with user_error("option_malformed"):
            row_costs.parse(text)
    for text in ("0", "1,65"):
        with user_error("option_out_of_range"):
            row_costs.parse(text)
