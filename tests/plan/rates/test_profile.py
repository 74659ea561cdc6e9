"""Machine profiles: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.plan.rates import profile as profiles
from attar.plan.rates.profile import MAX_BYTES, VALID_DAYS, ProductCurve, Rate
from tests.errors import user_error
from tests.pretend_rates import PROFILE, profile

NOW = datetime.datetime(2026, 11, 28, tzinfo=datetime.UTC)


def test_a_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_bytes(profiles.encode(PROFILE))
    assert profiles.read(path) == PROFILE


@pytest.mark.parametrize("at", list(json.loads(profiles.encode(PROFILE))))
def test_each_field_is_checked(at: str) -> None:
    value = json.loads(profiles.encode(PROFILE))
    value[at] = {"value": "many"}
    with user_error("file_malformed"):
        profiles.decode(json.dumps(value).encode())


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("bandwidth", "value"), 0), (("bandwidth", "value"), -1.0), (("int8", "spread"), -0.1), (("format",), 1),
        (("products",), {}), (("attention",), {}), (("products", "bf16", "rows"), [1, 1, 4, 8, 16, 64, 512]),
        (("products", "bf16", "rows"), [0, 2, 4, 8, 16, 64, 512]), (("products", "bf16", "seconds"), [1.0]),
        (("overheads", "layer"), -1e-9), (("measured",), "yesterday"), (("measured",), "2026-11-27"),
        (("key", "cores"), 0), (("attention", "int8", "prefill_score"), -1.0),
        (("attention", "int8", "groups"), [1, 1]),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(path: tuple[str, ...], value: Any) -> None:
    whole = json.loads(profiles.encode(PROFILE))
    at = whole
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with user_error("file_malformed"):
        profiles.decode(json.dumps(whole).encode())


@pytest.mark.parametrize(
    "text", [b"", b"[", b"null", b"{}", b"[" * 100_000, b'{"format":' + b"1" * 400 + b"}", b"\xff"]
)
def test_other_files_are_refused(text: bytes) -> None:
    with user_error("file_malformed"):
        profiles.decode(text)


@pytest.mark.parametrize("word", [b"NaN", b"Infinity", b"1e400"])
def test_numbers_that_are_not_finite_are_refused(word: bytes) -> None:
    text = profiles.encode(PROFILE).replace(b'"value": 20000000000.0', b'"value": ' + word)
    assert text != profiles.encode(PROFILE)
    with user_error("file_malformed"):
        profiles.decode(text)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with user_error("file_too_large", "rates.json"):
        profiles.read(path)


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=8, unique=True).map(sorted), st.floats(1, 5000))
def test_a_curve_lies_between_its_points(rows: list[int], at: float) -> None:
    curve = ProductCurve(1.0, tuple(rows), tuple(1e-11 * (1 + each) for each in rows))
    found = curve.of(at)
    assert curve.seconds[0] <= found <= max(curve.seconds[-1], curve.seconds[-1] * at / rows[-1])
    assert all(curve.of(each) == seconds for each, seconds in zip(curve.rows, curve.seconds, strict=True))


def test_narrow_blocks_have_times_of_their_own() -> None:
    curve = ProductCurve(1.0, (1, 4), (1e-11, 2e-11), 0.0, (3e-11, 4e-11), (1000.0, 500.0))
    for rows, outputs, expected in (
        (1, 1000, 1e-11), (1, 2000, 1e-11), (1, 500, 3e-11), (1, 100, 3e-11), (1, 2000 / 3, 2e-11), (2.5, 500, 3.5e-11),
    ):  # fmt: skip
        assert curve.of(rows, outputs) == pytest.approx(expected)
    assert curve.of(4) == 2e-11
    for narrow, outputs in (((3e-11,), (2.0, 1.0)), ((3e-11, 4e-11), (1.0, 1.0)), ((3e-11, 0.0), (2.0, 1.0))):
        with pytest.raises(ValueError, match=r"curve|seconds"):
            ProductCurve(1.0, (1, 4), (1e-11, 2e-11), 0.0, narrow, outputs)


def test_rates_age() -> None:
    assert not PROFILE.too_old(NOW)
    assert PROFILE.too_old(NOW + datetime.timedelta(days=VALID_DAYS + 1))
    assert profile(measured="2027-11-27T12:00:00Z").too_old(NOW), "a time to come is no measurement"


def test_a_rate_is_above_zero() -> None:
    with pytest.raises(ValueError, match="above 0"):
        Rate(float("nan"))
