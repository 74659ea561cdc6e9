"""Programs that a model wrote: what a hostile one cannot do, and that none runs where a step of the sandbox is refused.

No model is needed.
"""

from __future__ import annotations

import builtins
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reals import humaneval, sandbox
from reals.program_child import PASSED

REFUSED = """
import sys
from pathlib import Path
from reals import program_child as child
call = child._call
def refuse(name, *arguments):
    if name == {name!r}:
        raise OSError(1, "not permitted", name)
    call(name, *arguments)
child._call = refuse
print(child.supervise("", Path({root!r}), 5.0))
"""


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if (why := sandbox.refused()) is not None:
        pytest.skip(why)


def test_a_program_passes_if_it_runs_to_its_end() -> None:
    assert sandbox.verdict("import collections, hashlib, math, random, re, typing\nopen('a', 'w').write('b')") == PASSED
    assert sandbox.verdict("assert 1 == 2, 'no'") == "AssertionError: no"
    assert sandbox.verdict("raise SystemExit(0)") == "SystemExit: 0"
    assert sandbox.verdict("import os; os._exit(0)") == "ended before its tests"
    assert sandbox.verdict("def").startswith("SyntaxError")
    assert sandbox.verdict("raise ValueError('\\udcff')") == "ValueError: ?"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', {port}), 1)", OSError),
        ("import socket; socket.create_connection(('192.0.2.1', 80), 1)", OSError),
        ("open({file!r}, 'w')", FileNotFoundError),
        ("import os; open(os.__file__, 'a')", OSError),
        ("import os; os.remove(os.__file__)", OSError),
        ("open('/etc/passwd')", FileNotFoundError),
        ("bytearray(600 << 20)", MemoryError),
        ("open('a', 'wb').write(bytes(2 << 20))", OSError),
        ("for i in range(20): open(str(i), 'wb').write(bytes(1 << 20))", OSError),
        ("import os\nwhile True: os.fork()", BlockingIOError),
        ("import threading; threading.Thread(target=print).start()", RuntimeError),
        ("import subprocess; subprocess.run(['true'])", BlockingIOError),
        ("import os; os.chroot('.')", PermissionError),
        ("import os; os.setuid(0)", OSError),
        ("import os; os.kill(-1, 9)", ProcessLookupError),
        ("def f(): f()\nf()", RecursionError),
    ],
)
def test_a_hostile_program_fails_at_a_limit(program: str, error: type[Exception], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = sandbox.verdict(program.format(port=server.getsockname()[1], file=str(kept)))
    kind = getattr(builtins, said.partition(":")[0], None)
    assert issubclass(kind or object, error), said
    assert kept.read_text() == "as it was"


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_a_program_without_end_is_killed(program: str) -> None:
    since = time.monotonic()
    assert sandbox.verdict(program, 3.0) == "killed by SIGKILL"
    assert time.monotonic() - since < 10


def test_a_program_holds_no_capability() -> None:
    said = sandbox.verdict(
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "assert libc.unshare(1 << 28) == libc.mount(None, b'/usr/lib', None, 33, None) == -1"
    )
    assert said == PASSED


@pytest.mark.parametrize("name", ["unshare", "mount", "prctl", "capset"])
def test_nothing_runs_where_a_step_is_refused(name: str, tmp_path: Path) -> None:
    program = REFUSED.format(name=name, root=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert "not permitted" in done.stderr
    assert PASSED not in done.stdout


def test_humaneval_is_skipped_where_programs_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "refused", lambda: "no namespaces")
    assert humaneval.solved(Path("no model"), 1) == {"skipped": "programs cannot be run here: no namespaces"}


def test_the_right_programs_solve_their_problems() -> None:
    if not humaneval.PROBLEMS.exists():
        pytest.skip("there is no test data: ATTAR_TEST_DATA names its folder")
    first = humaneval.problems()[:5]
    assert [sandbox.verdict(humaneval.program(each, each["canonical_solution"])) for each in first] == [PASSED] * 5
    assert PASSED not in [sandbox.verdict(humaneval.program(each, "    return None\n")) for each in first]
