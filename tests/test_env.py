"""Environment flags: typed values, and errors that name what would have done."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar import env
from tests.errors import user_error


def test_no_flag_is_set_by_default() -> None:
    assert env.read({"PATH": "/bin", "HOME": "/root"}) == env.Env(cpu=None, kernels=None, test_data=None)


def test_values_have_their_types() -> None:
    flags = env.read({"ATTAR_CPU": "avx2", "ATTAR_KERNELS": "ref", "ATTAR_TEST_DATA": "/data"})
    assert flags == env.Env(cpu="avx2", kernels="ref", test_data=Path("/data"))


def test_an_empty_value_is_an_unset_flag() -> None:
    assert env.read({"ATTAR_CPU": ""}).cpu is None


@pytest.mark.parametrize(("flag", "value"), [("ATTAR_CPU", "AVX2"), ("ATTAR_CPU", "sse"), ("ATTAR_KERNELS", "1")])
def test_a_bad_value_names_the_good_ones(flag: str, value: str) -> None:
    with user_error("option_malformed"):
        env.read({flag: value})


def test_an_unknown_flag_names_the_nearest() -> None:
    with user_error("name_unknown"):
        env.read({"ATTAR_KERNEL": "ref"})


def test_an_unknown_flag_near_nothing_names_all() -> None:
    known = r"ATTAR_CPU or ATTAR_KERNELS or .* or ATTAR_FAULTS or ATTAR_CACHE or ATTAR_TEST_DATA or ATTAR_REAL_MODELS"
    with pytest.raises(ValueError, match=known):
        env.read({"ATTAR_XYZZY": "1"})


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    env.get.cache_clear()
    try:
        monkeypatch.setenv("ATTAR_CPU", "portable")
        assert env.get().cpu == "portable"
        monkeypatch.setenv("ATTAR_CPU", "avx2")
        assert env.get().cpu == "portable"
    finally:
        env.get.cache_clear()


def test_the_table_lists_every_flag_with_type_value_and_doc() -> None:
    rows = env.table(env.Env(cpu="avx2"))
    assert [(row["name"], row["type"], row["value"]) for row in rows] == [
        ("ATTAR_CPU", "portable|neon|avx2|avxvnni|avx512|amx", "avx2"),
        ("ATTAR_KERNELS", "ref", None),
        ("ATTAR_API_KEY", "str", None),
        ("ATTAR_FAULTS", "str", None),
        ("ATTAR_CACHE", "path", None),
        ("ATTAR_TEST_DATA", "path", None),
        ("ATTAR_REAL_MODELS", "path", None),
    ]
    assert all(row["doc"] for row in rows)


def test_the_table_does_not_tell_a_secret() -> None:
    (row,) = (row for row in env.table(env.Env(api_key="x" * 40)) if row["name"] == "ATTAR_API_KEY")
    assert row["value"] == "(set)"
