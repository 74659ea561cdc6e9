"""Real faults: a disk that is full or fills up, Ctrl-C, two runs of one output. Nothing is lost, and nobody dies of it.

The disk is a small tmpfs of the test's own. Where one cannot be mounted, a limit on the size of files stands in for it.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from attar.cli.terminal import INTERRUPTED
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from tests.errors import user_error

Ids = list[list[int]]

RECIPE = "awq+gptq-w4g32"  # holds its search rows on disk too
ENOUGH = 16 << 20
SEARCH_ROWS = 800 << 10  # more than those of `tiny`, which are not reserved
PATIENCE = 60.0


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def expected(tiny: Path, calibration: Ids, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("expected") / "out"
    compress(tiny, out, recipe=RECIPE, calibration=calibration)
    return digest(out)


class Disk:
    """A file system of its own whose size can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", self.path], check=True)

    @property
    def free(self) -> int:
        usage = os.statvfs(self.path)
        return usage.f_bavail * usage.f_frsize


class Begun:
    """A progress callback that notes how many blocks were done when the walk began, and may end it there."""

    def __init__(self, then_stop: bool = False) -> None:
        self.at: int | None = None
        self._then_stop = then_stop

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage == "blocks" and self.at is None:
            self.at = done
            if self._then_stop:
                raise InterruptedError


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={ENOUGH}", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.parametrize("recipe", ["rtn-w4g32", RECIPE])
def test_what_is_asked_for_is_what_the_walk_reserves(
    recipe: str, tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, the probes' hidden states included: also a recipe that calibrates on nothing has those."""
    ids = None if recipe.startswith("rtn") else calibration
    with pytest.raises(InterruptedError):
        compress(tiny, tmp_path / "seen", recipe=recipe, calibration=ids, progress=Begun(then_stop=True))
    partial = tmp_path / ".seen.attar-partial"
    reserved = [*partial.glob("out/*.safetensors"), *partial.glob("state/*.f32")]
    assert len(reserved) == (3 if ids is None else 5), "the weights, and each stream in two files"
    needed = sum(path.stat().st_size for path in reserved)

    class Usage:
        free = needed - 1

    monkeypatch.setattr("attar.checkpoints.writer.shutil.disk_usage", lambda path: Usage)
    with user_error("disk_full"):
        compress(tiny, tmp_path / "out", recipe=recipe, calibration=ids)
    Usage.free = needed
    compress(tiny, tmp_path / "out", recipe=recipe, calibration=ids)


def test_tokens_drawn_before_do_not_count_as_room(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay beside what is still to be reserved."""
    asked: list[int] = []
    monkeypatch.setattr("attar.compression.runs.run.require_free", lambda path, needed: asked.append(needed))
    for _ in range(2):
        with pytest.raises(InterruptedError):
            compress_request(
                CompressionRequest(
                    tiny, tmp_path / "out", recipe="gptq-w4g32", calibration="self", samples=2, length=8
                ),
                Begun(then_stop=True),
            )
        for path in [*tmp_path.glob(".out.*/out/*"), *tmp_path.glob(".out.*/state/*.f32")]:
            path.unlink()
    assert asked[0] == asked[1] > 0


# No room for the names of the first files; for all files; for the rows that AWQ searches on.
@pytest.mark.parametrize("kilobytes", [4, 600, 1100])
def test_a_disk_too_small_is_refused_and_the_run_goes_on_once_there_is_room(
    kilobytes: int, tiny: Path, calibration: Ids, expected: dict[str, str], disk: Disk
) -> None:
    disk.resize(kilobytes << 10)
    with user_error("disk_full"):
        compress(tiny, disk.path / "out", recipe=RECIPE, calibration=calibration)
    assert not (disk.path / "out").exists()
    disk.resize(ENOUGH)
    compress(tiny, disk.path / "out", recipe=RECIPE, calibration=calibration)
    assert digest(disk.path / "out") == expected


@pytest.mark.parametrize(("stage", "resumed_at"), [("hashing", 0), ("blocks", 1), ("copying", 3)])
def test_a_disk_that_fills_up_on_the_way_costs_a_block_at_most(
    stage: str, resumed_at: int, tiny: Path, calibration: Ids, expected: dict[str, str], disk: Disk
) -> None:
    filler = disk.path / "filler"

    def fill(now: str, done: int, total: int) -> None:
        if now == stage and done and not filler.exists():
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, disk.free)

    with user_error("disk_full"):
        compress(tiny, disk.path / "out", recipe=RECIPE, calibration=calibration, progress=fill)
    assert not (disk.path / "out").exists()
    filler.unlink()
    begun = Begun()
    compress(tiny, disk.path / "out", recipe=RECIPE, calibration=calibration, progress=begun)
    assert begun.at == resumed_at
    assert digest(disk.path / "out") == expected


def test_room_that_a_killed_run_had_reserved_counts_as_free(
    tiny: Path, calibration: Ids, expected: dict[str, str], disk: Disk
) -> None:
    with pytest.raises(InterruptedError):
        compress(tiny, disk.path / "out", recipe=RECIPE, calibration=calibration, progress=Begun(then_stop=True))
    disk.resize(ENOUGH - disk.free + SEARCH_ROWS)
    compress(tiny, disk.path / "out", recipe=RECIPE, calibration=calibration)
    assert digest(disk.path / "out") == expected


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kilobytes", [1, 100, 200])
def test_files_that_may_not_grow_are_a_full_disk(
    kilobytes: int, tiny: Path, calibration: Ids, expected: dict[str, str], tmp_path: Path
) -> None:
    with file_size_limit(kilobytes << 10), user_error("disk_full"):
        compress(tiny, tmp_path / "out", recipe=RECIPE, calibration=calibration)
    assert not (tmp_path / "out").exists()
    compress(tiny, tmp_path / "out", recipe=RECIPE, calibration=calibration)
    assert digest(tmp_path / "out") == expected


def test_ctrl_c_and_a_second_run_of_the_same_output(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--recipe", "awq-w4g32", "--calib", "self", "--samples", "64", "--length", "64", "--quiet"]
    child = subprocess.Popen(
        [sys.executable, "-m", "attar", "compress", tiny, out, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},  # part of what decides about the bits
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    state = tmp_path / ".out.attar-partial" / "state"
    wait_for(state, child)
    with user_error("output_locked"):
        compress_request(CompressionRequest(tiny, out, recipe="awq-w4g32", calibration="self", samples=64, length=64))
    wait_for(state / "state.json", child)
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=PATIENCE)
    assert child.returncode == INTERRUPTED, said
    assert len(said.splitlines()) == 1, said
    assert said.startswith("attar: interrupted")
    assert not out.exists()

    begun = Begun(then_stop=True)  # that it goes on to the same bytes is shown elsewhere, by shorter runs
    with pytest.raises(InterruptedError):
        compress_request(
            CompressionRequest(tiny, out, recipe="awq-w4g32", calibration="self", samples=64, length=64), begun
        )
    assert begun.at is not None
    assert begun.at >= 1


def wait_for(path: Path, child: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    while not path.exists():
        assert child.poll() is None, "it ended before"
        assert time.monotonic() < began + PATIENCE
        time.sleep(0.002)
