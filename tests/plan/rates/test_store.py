"""Kept profiles: private, whole, and nobody else's."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from attar import env
from attar.plan.rates import profile as profiles
from attar.plan.rates import store
from attar.plan.rates.profile import MachineProfile
from attar.plan.rates.store import MOST_FILES, RatesStore
from tests.pretend_rates import PROFILE, profile


@pytest.fixture
def fresh() -> MachineProfile:
    return profile(measured=datetime.now(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z"))


def test_what_is_kept_is_found(tmp_path: Path, fresh: MachineProfile) -> None:
    kept = RatesStore(tmp_path / "new" / "attar")
    assert kept.find(fresh.key) is None
    assert kept.keep(fresh)
    assert kept.find(fresh.key) == fresh
    assert stat.S_IMODE(kept.at.stat().st_mode) == 0o700
    assert kept.problem is None


@pytest.mark.parametrize("part", ["machine", "isa", "kernels"])
def test_another_machine_has_none(tmp_path: Path, fresh: MachineProfile, part: str) -> None:
    kept = RatesStore(tmp_path / "attar")
    kept.keep(fresh)
    assert kept.find(replace(fresh.key, **{part: "other"})) is None
    assert kept.find(replace(fresh.key, threads=7)) is None


def test_old_rates_are_measured_again(tmp_path: Path) -> None:
    kept = RatesStore(tmp_path / "attar")
    kept.keep(profile(measured="2020-01-01T00:00:00Z"))
    assert kept.find(PROFILE.key) is None
    assert kept.problem is None


@pytest.mark.parametrize("damage", ["text", "other", "link", "folder", "huge", "pipe"])
def test_a_damaged_file_costs_one_warning(tmp_path: Path, fresh: MachineProfile, damage: str) -> None:
    kept = RatesStore(tmp_path / "attar")
    kept.keep(fresh)
    path = kept.path(fresh.key)
    text = path.read_bytes()
    path.unlink()
    if damage == "text":
        path.write_bytes(text[:100])
    elif damage == "other":
        path.write_bytes(profiles.encode(replace(fresh, key=replace(fresh.key, machine="another"))))
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(text)
        path.symlink_to(tmp_path / "elsewhere")
    elif damage == "folder":
        path.mkdir()
    elif damage == "huge":
        with path.open("wb") as file:
            file.truncate(profiles.MAX_BYTES + 1)
    else:
        os.mkfifo(path)
    assert kept.find(fresh.key) is None
    assert kept.problem is not None
    assert not kept.keep(fresh), "rates measured beside a damaged file are not kept"


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path, fresh: MachineProfile) -> None:
    folder = tmp_path / "attar"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    kept = RatesStore(folder)
    assert not kept.keep(fresh)
    assert kept.problem is not None
    assert list(folder.iterdir()) == []


def test_a_place_that_cannot_be_written_costs_a_warning(tmp_path: Path, fresh: MachineProfile) -> None:
    (tmp_path / "file").write_text("")
    kept = RatesStore(tmp_path / "file" / "attar")
    assert not kept.keep(fresh)
    assert kept.problem is not None


def test_few_files_are_kept(tmp_path: Path, fresh: MachineProfile) -> None:
    kept = RatesStore(tmp_path / "attar")
    for number in range(MOST_FILES + 5):
        assert kept.keep(replace(fresh, key=replace(fresh.key, cores=number + 1)))
    assert len(list(kept.at.iterdir())) == MOST_FILES


def test_the_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert store.folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "attar"
    assert store.folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "attar"
    monkeypatch.setattr(env, "get", lambda: env.Env(cache=tmp_path / "mine"))
    assert store.folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "mine"


def test_the_key_counts_threads(tmp_path: Path) -> None:
    assert store.key(tmp_path, {"OMP_NUM_THREADS": "3"}).threads == 3
    assert store.key(tmp_path, {"OMP_NUM_THREADS": "many"}).threads == store.key(tmp_path, {}).cores
