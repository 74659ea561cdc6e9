"""Worker processes that hang or cannot be started: nothing waits for them for ever, and nothing is left."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attar.execution.parallel import worker_group
from attar.execution.parallel.commands import Call, Job
from attar.execution.parallel.worker_group import WorkerGroup


def test_a_worker_that_reads_nothing_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for what in ("UNREAD_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(worker_group, what, 0.1)
    folder = tmp_path / "folder"
    folder.mkdir()
    workers = WorkerGroup(folder, [Job("model", 1, 2, 1, "cpu", "float32", "int8g128", True, 1, str(folder))])
    (child,) = workers.children
    child.send_signal(signal.SIGSTOP)
    said: list[str] = []
    workers.on_lost = said.append
    long = Call(None, [], (1,), 1, list(range(1 << 17)), None)  # more than any pipe takes
    for _ in range(2):
        with pytest.raises(RuntimeError, match="process 1 of the model no longer reads its commands"):
            workers.tell(long)
    assert folder.exists(), "who is lost may still be closing what it met by"
    workers.end()
    assert said == ["process 1 of the model no longer reads its commands"]
    assert child.returncode == -signal.SIGKILL
    assert not folder.exists()


def test_where_one_process_cannot_be_started_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Few(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **how: Any) -> None:
            if started:
                raise BlockingIOError("too many processes")
            super().__init__(*args, **how)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Few)
    monkeypatch.setattr(worker_group, "END_SECONDS", 0.1)
    folder = tmp_path / "folder"
    folder.mkdir()
    jobs = [Job("model", rank, 3, 1, "cpu", "float32", "int8g128", True, 1, str(folder)) for rank in (1, 2)]
    with pytest.raises(BlockingIOError, match="too many processes"):
        WorkerGroup(folder, jobs)
    assert started[0].returncode is not None
    assert not folder.exists()
