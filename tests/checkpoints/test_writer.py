"""Layouts, resumed and failing writes, and folders that are absent or complete; round trips: test_safetensors.py."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as oracle
import torch

from attar.checkpoints import writer as module
from attar.checkpoints.folder import Folder
from attar.checkpoints.safetensors import TensorFile, parse_header
from attar.checkpoints.writer import HEADER_BYTES, ShardWriter, atomic_folder, plan_files, require_free
from attar.formats.scheme import Part
from tests.errors import user_error


def parts_of(tensors: dict[str, torch.Tensor]) -> dict[str, Part]:
    return {name: Part(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}


def save(folder: Path, tensors: dict[str, torch.Tensor], max_shard_bytes: int = 10**9) -> None:
    with ShardWriter(folder, plan_files(parts_of(tensors), max_shard_bytes)) as writer:
        for name in reversed(tensors):  # any order will do
            writer.write(name, tensors[name])
        writer.finish()


SIX = {f"t{i}": torch.arange(i * 10, i * 10 + 10, dtype=torch.float32) for i in range(6)}  # 40 bytes each


def test_the_file_equals_the_oracles_byte_for_byte_where_both_choose_one_order(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.ones(7, dtype=torch.bfloat16), "c": torch.ones(3, dtype=torch.int8)}
    save(tmp_path, tensors)
    assert (tmp_path / "model.safetensors").read_bytes() == oracle.save(tensors, metadata={"format": "pt"})


def test_tensors_are_aligned_to_their_elements() -> None:
    parts = {
        "odd": Part("int8", (3,)),
        "wide": Part("int64", (1,)),
        "half": Part("float16", (1,)),
        "z": Part("bool", (5,)),
    }
    (plan,) = plan_files(parts)
    assert list(plan.slots) == ["wide", "half", "odd", "z"]
    assert len(plan.header) % 8 == 0
    assert all(slot.begin % (slot.part.bytes // max(1, slot.part.shape[0])) == 0 for slot in plan.slots.values())


def test_shards_are_filled_in_order_and_a_giant_has_its_own() -> None:
    parts = {"a": Part("int8", (60,)), "b": Part("int8", (40,)), "c": Part("int8", (1,)), "d": Part("int8", (500,))}
    plans = plan_files(parts, max_shard_bytes=100)
    assert [plan.name for plan in plans] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [list(plan.slots) for plan in plans] == [["a", "b"], ["c"], ["d"]]
    assert [plan.size - len(plan.header) for plan in plans] == [100, 1, 500]


@pytest.mark.parametrize("letter", ["x", "\u00e9"], ids=["plain", "odd"])
def test_many_tensors_of_long_names_are_written_in_files_that_can_be_read(letter: str) -> None:
    names = [f"{number}.{letter * 500}" for number in range(20_000)]
    plans = plan_files({name: Part("int8", (1,)) for name in names})
    assert [name for plan in plans for name in plan.slots] == names
    assert max(len(plan.header) for plan in plans) <= HEADER_BYTES
    for plan in plans[:2]:
        slots, _ = parse_header(bytearray(plan.header[8:]), plan.size - len(plan.header), plan.name)
        assert slots == plan.slots


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [("", "int8", "empty name"), ("a\nb", "int8", "do not print"), ("a", "complex64", "no dtype complex64")],
)
def test_what_no_reader_would_accept_is_not_planned(name: str, dtype: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_files({name: Part(dtype, (1,))})


def test_shards_and_index_load_as_one_folder(tmp_path: Path) -> None:
    save(tmp_path, SIX, max_shard_bytes=100)
    (tmp_path / "config.json").write_text("{}")
    folder = Folder(tmp_path)
    assert list(folder.files) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in SIX.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 240}
    assert index["weight_map"]["t2"] == "model-00002-of-00003.safetensors"


def test_rows_may_come_in_blocks_and_from_strided_tensors(tmp_path: Path) -> None:
    table = torch.randn(5, 10).T  # not contiguous
    with ShardWriter(tmp_path, plan_files({"t": Part("float32", (10, 5))})) as writer:
        writer.write_rows("t", (table[i : i + 3] for i in range(0, 10, 3)))
        writer.finish()
    assert torch.equal(oracle.load_file(tmp_path / "model.safetensors")["t"], table)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 3, dtype=torch.float16),
        torch.zeros(3, 4),
        torch.zeros(12),
        torch.zeros(5, 3),
        torch.zeros(3, 3),
        torch.zeros(4, 3, dtype=torch.complex64),
    ],
)
def test_a_tensor_other_than_planned_is_refused_and_harms_no_neighbour(wrong: torch.Tensor, tmp_path: Path) -> None:
    with ShardWriter(tmp_path, plan_files({"t": Part("float32", (4, 3)), "u": Part("float32", (2,))})) as writer:
        writer.write("u", torch.ones(2))
        with pytest.raises(ValueError, match="tensor 't'"):
            writer.write("t", wrong)
        assert writer.written == {"u"}
        writer.write("t", torch.full((4, 3), 2.0))
        writer.finish()
    assert oracle.load_file(tmp_path / "model.safetensors")["u"].tolist() == [1, 1]


def test_finish_names_what_was_never_written(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, plan_files(parts_of(SIX))) as writer:
        writer.write("t0", SIX["t0"])
        with pytest.raises(ValueError, match="5 tensors were never written: t1, t2"):
            writer.finish()


def test_a_resumed_run_gives_the_same_bytes(tmp_path: Path) -> None:
    plans = plan_files(parts_of(SIX), max_shard_bytes=100)
    (tmp_path / "straight").mkdir()
    (tmp_path / "resumed").mkdir()
    save(tmp_path / "straight", SIX, max_shard_bytes=100)
    with ShardWriter(tmp_path / "resumed", plans) as writer:
        writer.write("t0", SIX["t0"])
        writer.write("t2", SIX["t2"])
        writer.write("t1", torch.full((10,), 7.0))  # half done, as far as the run's notes go
        writer.sync()
    (tmp_path / "resumed" / plans[2].name).write_bytes(b"torn")  # nothing written in it: made anew
    with ShardWriter(tmp_path / "resumed", plans, written=["t0", "t2"]) as writer:
        for name in ("t1", "t3", "t4", "t5", "t5"):
            writer.write(name, SIX[name])
        writer.finish()
    files = sorted(p.name for p in (tmp_path / "straight").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "resumed").iterdir())
    assert all((tmp_path / "straight" / f).read_bytes() == (tmp_path / "resumed" / f).read_bytes() for f in files)


def test_resuming_in_a_file_of_another_layout_is_refused(tmp_path: Path) -> None:
    plans, other = plan_files(parts_of(SIX)), plan_files(parts_of({**SIX, "t6": torch.zeros(1)}))
    with ShardWriter(tmp_path, plans) as writer:
        writer.write("t0", SIX["t0"])
    with user_error("state_damaged"):
        ShardWriter(tmp_path, other, written=["t0"])
    with user_error("state_damaged"):
        ShardWriter(tmp_path, plans, written=["t6"])
    os.truncate(tmp_path / "model.safetensors", 100)
    with user_error("state_damaged"):
        ShardWriter(tmp_path, plans, written=["t0"])
    (tmp_path / "model.safetensors").unlink()
    with user_error("file_not_found"):
        ShardWriter(tmp_path, plans, written=["t0"])


# A full disk ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_found_before_the_work_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.posix_fallocate, list[int]()

    def full_at_the_second(fd: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full_at_the_second)
    with user_error("disk_full"):
        ShardWriter(tmp_path, plan_files(parts_of(SIX), max_shard_bytes=100))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_on_resume_keeps_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plan_files(parts_of(SIX), max_shard_bytes=100)
    with ShardWriter(tmp_path, plans) as writer:
        writer.write("t0", SIX["t0"])

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with user_error("disk_full"):
        ShardWriter(tmp_path, plans, written=["t0"])
    assert torch.equal(TensorFile(tmp_path / plans[0].name).read("t0"), SIX["t0"])


def test_a_failing_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with ShardWriter(tmp_path, plan_files(parts_of(SIX))) as writer:
        monkeypatch.setattr(os, "pwrite", broken)
        with user_error("file_failed", "model.safetensors"):
            writer.write("t0", SIX["t0"])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    save(tmp_path, SIX)
    assert torch.equal(oracle.load_file(tmp_path / "model.safetensors")["t3"], SIX["t3"])


def in_child(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    src = Path(module.__file__).parents[2]
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(src)}, capture_output=True, text=True)


def test_the_systems_own_limit_is_a_sentence_too(tmp_path: Path) -> None:
    script = """
import resource, sys
from attar.checkpoints.writer import ShardWriter, plan_files
from attar.formats.scheme import Part
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    ShardWriter(sys.argv[1], plan_files({"t": Part("int8", (200_000,))}))
except ValueError as error:
    print(error)
"""
    done = in_child(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no room for it (File too large)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_require_free_states_both_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(tmp_path))(10**12, 10**12 - 10**9, 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    require_free(tmp_path / "not" / "yet", 10**9)
    with user_error("disk_full"):
        require_free(tmp_path / "not" / "yet", 2_500_000_000)


# Absent or complete ---------------------------------------------------------------------------------------------------


def model(folder: Path, text: str = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(text)
    return folder


def test_the_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    dst = tmp_path / "runs" / "out"
    with atomic_folder(dst) as work:
        model(work.out)
        (work.state / "block").write_text("3")
        assert not dst.exists()
    assert [p.name for p in dst.iterdir()] == ["config.json"]
    assert [p.name for p in dst.parent.iterdir()] == ["out"]


def test_a_failed_run_keeps_its_work_for_the_next(tmp_path: Path) -> None:
    def stopped() -> None:
        with atomic_folder(tmp_path / "out") as work:
            (work.state / "block").write_text("3")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert not (tmp_path / "out").exists()
    with atomic_folder(tmp_path / "out") as work:
        assert (work.state / "block").read_text() == "3"
        model(work.out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_run_that_failed_before_it_did_anything_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "out"):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_resume_leaves_nothing_and_finds_nothing(tmp_path: Path) -> None:
    def stopped(resumes: bool) -> None:
        with atomic_folder(tmp_path / "out", resumes=resumes) as work:
            assert not any(work.out.iterdir())
            model(work.out)
            raise KeyboardInterrupt

    for resumes in (True, False):
        with pytest.raises(KeyboardInterrupt):
            stopped(resumes)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_kept_unless_overwritten(tmp_path: Path) -> None:
    dst = model(tmp_path / "out", "old")
    with user_error("output_exists"), atomic_folder(dst):
        pytest.fail("begun")

    def fail() -> None:
        with atomic_folder(dst, overwrite=True) as work:
            model(work.out, "half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (dst / "config.json").read_text() == "old"
    with atomic_folder(dst, overwrite=True) as work:
        assert (work.out / "config.json").read_text() == "half"
        model(work.out, "new")
        assert (dst / "config.json").read_text() == "old"
    assert (dst / "config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_overwriting_spares_what_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("x")
    for name, words in {"home": "output_invalid", "file": "output_invalid"}.items():
        with user_error(words), atomic_folder(tmp_path / name, overwrite=True):
            pytest.fail("begun")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years"
    (tmp_path / "empty").mkdir()
    with atomic_folder(tmp_path / "empty", overwrite=True) as work:
        model(work.out)
    assert (tmp_path / "empty" / "config.json").exists()


def test_an_output_of_another_kind_is_known_by_the_file_that_its_maker_names(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    for text in ("old", "new"):
        with atomic_folder(adapter, overwrite=True, known_by="adapter_config.json") as work:
            (work.out / "adapter_config.json").write_text(text)
        assert (adapter / "adapter_config.json").read_text() == text
    with user_error("output_invalid"), atomic_folder(adapter, overwrite=True):
        pytest.fail("begun")
    dst = model(tmp_path / "model")
    with (
        user_error("output_invalid", "adapter_config.json"),
        atomic_folder(dst, overwrite=True, known_by="adapter_config.json"),
    ):
        pytest.fail("begun")


def test_a_folder_that_turns_up_meanwhile_is_kept(tmp_path: Path) -> None:
    def late() -> None:
        with atomic_folder(tmp_path / "out") as work:
            model(work.out, "ours")
            model(tmp_path / "out", "theirs")

    with user_error("file_failed"):
        late()
    assert (tmp_path / "out" / "config.json").read_text() == "theirs"
    assert (tmp_path / ".out.attar-partial" / "out" / "config.json").read_text() == "ours"


def test_a_link_to_a_folder_is_replaced_where_it_points(tmp_path: Path) -> None:
    model(tmp_path / "disk" / "real", "old")
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    with atomic_folder(tmp_path / "link", overwrite=True) as work:
        model(work.out, "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "real" / "config.json").read_text() == "new"


@pytest.mark.parametrize("killed_at", ["sync", "first rename", "second rename", "state removal"])
def test_a_kill_at_the_end_loses_neither_folder(killed_at: str, tmp_path: Path) -> None:
    script = """
import os, pathlib, signal, sys
from attar.checkpoints import writer
tmp, killed_at = pathlib.Path(sys.argv[1]), sys.argv[2]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
renames, rename = [], pathlib.Path.rename
def counted(self, target):
    renames.append(target)
    if killed_at == ("", "first rename", "second rename")[len(renames)]:
        die()
    return rename(self, target)
pathlib.Path.rename = counted
with writer.atomic_folder(tmp / "out", overwrite=True) as work:
    (work.out / "config.json").write_text("new")
    (work.state / "block").write_text("all")
    if killed_at == "sync":
        writer._sync_tree = die
    if killed_at == "state removal":
        writer.remove = die
"""
    dst = model(tmp_path / "out", "old")
    assert in_child(script, tmp_path, killed_at).returncode == -signal.SIGKILL
    if dst.exists():
        assert (dst / "config.json").read_text() == ("new" if killed_at == "state removal" else "old")
    else:
        assert killed_at == "second rename"
    with atomic_folder(dst, overwrite=True) as work:
        assert (dst / "config.json").exists()  # the old one is back
        resumable = killed_at != "state removal"
        assert (work.state / "block").exists() == (work.out / "config.json").exists() == resumable
        model(work.out, "new")
    assert (dst / "config.json").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_two_processes_on_one_output_are_refused(tmp_path: Path) -> None:
    script = """
import sys
from attar.checkpoints.writer import atomic_folder
try:
    with atomic_folder(sys.argv[1]):
        print("begun")
except ValueError as error:
    print(error)
"""
    with atomic_folder(tmp_path / "out") as work:
        assert "another process is writing it" in in_child(script, tmp_path / "out").stdout
        with user_error("output_locked"), atomic_folder(tmp_path / "out"):
            pytest.fail("begun")
        model(work.out)
    assert (tmp_path / "out" / "config.json").exists()
    assert "begun" in in_child(script, tmp_path / "other").stdout


def test_an_output_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with user_error("file_failed"), atomic_folder(tmp_path / "file" / "out"):
        pytest.fail("begun")
