"""The process that runs one program which a model wrote, in namespaces of its own: its verdict is the only answer.

Started by `sandbox.py` in a bare Python, without environment. Namespaces bound what the program sees: its own user, a
network without interfaces, a process tree of its own, and a file system that holds Python read-only and an empty folder
in memory. Limits bound the rest: memory, processor time, the size of a file, and no further process or thread. What the
program runs in holds no capability, so that it undoes none of this. The supervisor, which the program cannot see, kills
it at the deadline. Nothing is run where a step of that is refused.

Answers, in UTF-8: `+` and a verdict, `passed` or why not; `-` and why the program was not run.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from pathlib import Path
from resource import RLIMIT_AS, RLIMIT_CORE, RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_NPROC
from typing import NoReturn

from attar.protocol.child_process import limit, send
from attar.protocol.framing import read

PROCESSOR_SECONDS = 2
MEMORY = 512 << 20  # bytes of address space
FOLDER = 16 << 20  # bytes of all its files
FILE = 1 << 20
NOBODY = 65534
PASSED, SHUT_IN, NOT_SHUT_IN = "passed", b".", b"!"
MAX_REASON = 300  # bytes

# <sched.h>, <sys/mount.h>, <sys/prctl.h>, <linux/capability.h>
NEW_USER, NEW_NET, NEW_PID, NEW_MOUNTS, NEW_IPC, NEW_UTS = 1 << 28, 1 << 30, 1 << 29, 1 << 17, 1 << 27, 1 << 26
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 1 << 5, 1 << 12, 1 << 14, 1 << 18
SET_DEATH_SIGNAL, SET_DUMPABLE, NO_NEW_PRIVILEGES = 1, 4, 38
CAPABILITIES = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Answer one request: an empty folder and seconds in the first two lines, then the source of a program."""
    send(b"+")  # ready
    request = read(sys.stdin.buffer)
    if request is None:
        return
    folder, seconds, source = request.decode().split("\n", 2)
    try:
        said = supervise(source, Path(folder), float(seconds))
    except OSError as error:
        send(f"-{error.filename or 'a limit'}: {error.strerror}".encode())
    else:
        send(f"+{said}".encode())


def supervise(source: str, root: Path, seconds: float) -> str:
    """Run a program in a process of its own, with a root mounted on the folder `root`, and return its verdict. It is
    killed after `seconds`.

    Raises OSError where a step is refused: then nothing was run.
    """
    user, group, kinds = os.geteuid(), os.getegid(), NEW_USER | NEW_NET | NEW_PID | NEW_IPC | NEW_UTS
    if user == 0:  # the limit of processes does not bind root, who may on the other hand mount as it is
        _call("unshare", NEW_MOUNTS)
        at = _build(root)
        user = group = NOBODY
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        _call("prctl", SET_DUMPABLE, 1, 0, 0, 0)  # else the files of its identity are not its own
        _call("unshare", kinds)
        _identify(user, group)
    else:
        _call("unshare", kinds | NEW_MOUNTS)
        _identify(user, group)
        at = _build(root)
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        _inside(source, at, told)
    os.close(told)
    return _verdict(child, ready, seconds)


def _identify(user: int, group: int) -> None:
    """Map the only user and group that this namespace has."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"{NOBODY} {group} 1")
    Path("/proc/self/uid_map").write_text(f"{NOBODY} {user} 1")


def _build(root: Path) -> int:
    """Mount a file system in memory on `root`: Python's own files read-only, and an empty folder. Return it open, for
    who runs in it may not reach it by its path."""
    _mount(None, Path("/"), None, RECURSIVE | PRIVATE)
    _mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, f"size={FOLDER},nr_inodes=1024,mode=0755".encode())
    for folder in _python():
        into = root / folder.relative_to("/")
        into.mkdir(parents=True, exist_ok=True)
        _mount(str(folder), into, None, BIND | RECURSIVE)
        _mount(None, into, None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES | _kept(into))
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o777)
    return os.open(root, os.O_PATH | os.O_DIRECTORY)


def _verdict(child: int, ready: int, seconds: float) -> str:
    """Wait for a program until the deadline, and return what its process said, or how it ended."""
    handle = os.pidfd_open(child)
    if not select.select([handle], [], [], seconds)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(handle)
    _, status = os.waitpid(child, 0)
    shut_in, said = os.read(ready, 1), os.read(ready, MAX_REASON).decode("utf-8", "replace")
    if shut_in != SHUT_IN:
        raise OSError(0, said or "its process ended", "namespaces")
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return said or "ended before its tests"


def _inside(source: str, at: int, told: int) -> NoReturn:
    """Shut this process in, and run the program: the first process of its tree."""
    try:
        _call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        _shut_in(at, told)
    except BaseException as error:  # whatever it is, the program is not run
        os.write(told, NOT_SHUT_IN + f"{type(error).__name__}: {error}".encode()[:MAX_REASON])
        os._exit(1)
    try:
        os.write(told, SHUT_IN)
        os.write(told, _run(source).encode("utf-8", "replace")[:MAX_REASON])
    finally:
        os._exit(0)


def _shut_in(at: int, told: int) -> None:
    """Leave nothing open but `told`, nothing to see but the root `at`, and no capability."""
    os.fchdir(at)
    none = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(none, fd)
    os.closerange(3, told)
    os.closerange(told + 1, os.sysconf("SC_OPEN_MAX"))
    os.chroot(".")
    os.chdir("/tmp")
    limit({RLIMIT_AS: MEMORY, RLIMIT_CPU: PROCESSOR_SECONDS, RLIMIT_FSIZE: FILE, RLIMIT_CORE: 0, RLIMIT_NPROC: 1})
    _call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("capset", (ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)())


def _python() -> list[Path]:
    """Return the folders of Python's library, and those of the system's libraries that its modules load."""
    library = [Path(os.__file__).parent, *(Path(name) for name in sys.path if name.endswith("lib-dynload"))]
    system = [Path("/usr/lib"), Path("/usr/lib64"), Path("/lib"), Path("/lib64")]
    wanted = [folder for folder in dict.fromkeys([*system, *library]) if folder.is_dir()]
    return [one for one in wanted if not any(one.is_relative_to(other) for other in wanted if other != one)]


def _kept(folder: Path) -> int:
    """Return the flag of a mount that a remount must repeat: no programs are run from it."""
    return os.statvfs(folder).f_flag & os.ST_NOEXEC


def _run(source: str) -> str:
    try:
        exec(compile(source, "program", "exec"), {"__name__": "program"})
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return PASSED


def _mount(source: str | None, target: Path, kind: str | None, flags: int, options: bytes | None = None) -> None:
    name, form = (None if each is None else each.encode() for each in (source, kind))
    _call("mount", name, os.fsencode(target), form, ctypes.c_ulong(flags), options)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError where it fails."""
    if getattr(_libc, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), name)
