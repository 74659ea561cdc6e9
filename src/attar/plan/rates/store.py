"""Where machine profiles are kept between commands: a private folder of small files.

The folder is ATTAR_CACHE, or `attar` in XDG_CACHE_HOME, or in ~/.cache. It belongs to the user alone (0700). A file
has the name of its key's hash, is written whole or not at all, and is at most 10 MB. A folder that cannot be used, a
file of another user, and a damaged one cost a warning: rates are then measured anew and not kept. Torch-free.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

from attar import env, machine
from attar.errors import UserError
from attar.plan.rates import private
from attar.plan.rates import profile as profiles
from attar.plan.rates.profile import MAX_BYTES, MachineKey, MachineProfile

MOST_FILES = 32  # of other machines and builds: older ones are removed


def folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of kept profiles, which need not exist."""
    if (chosen := env.get().cache) is not None:
        return chosen
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "attar"


def key(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> MachineKey:
    """Return the key of this machine, process and build."""
    cores = machine.cores(root)
    threads = environ.get("OMP_NUM_THREADS", "")
    count = int(threads) if threads.isdecimal() and 0 < int(threads) < 1 << 20 else cores
    return MachineKey(_machine(root), cores, count, env.get().cpu or "highest", _kernels())


def _machine(root: Path) -> str:
    """Return the processor's name, the number of processors, and a hash of what they can do."""
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    name = found.get("model name") or platform.processor() or platform.machine()
    features = found.get("flags") or found.get("Features") or ""
    digest = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:8]
    return f"{name[:80]}, {os.cpu_count() or 1} processors, {digest}"


def _kernels() -> str:
    """Return a hash of the compiled extension, without loading it; empty where there is none."""
    found = importlib.util.find_spec("attar._native")
    if found is None or found.origin is None:
        return ""
    return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:16]


class RatesStore:
    """The kept profiles. `problem` is the one warning: why nothing can be kept, None where all is well."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self.problem: str | None = None

    def path(self, of: MachineKey) -> Path:
        """Return the file of a key's profile."""
        return self.at / f"rates-{hashlib.sha256(repr(astuple(of)).encode()).hexdigest()[:16]}.json"

    def find(self, of: MachineKey) -> MachineProfile | None:
        """Return the kept profile of a key; None where there is none, where it is too old, or with a `problem`."""
        try:
            found = self._read(of)
        except (UserError, OSError) as error:
            self._warn(error)
            return None
        return None if found is None or found.too_old(datetime.datetime.now(datetime.UTC)) else found

    def _read(self, of: MachineKey) -> MachineProfile | None:
        text = private.read(self.path(of), MAX_BYTES)
        if text is None:
            return None
        found = profiles.decode(text)
        if found.key != of:
            raise UserError("file_malformed", f"{self.path(of)} is of another machine")
        return found

    def keep(self, profile: MachineProfile) -> bool:
        """Keep a profile, whole or not at all. Returns whether it was kept; a failure becomes the `problem`."""
        if self.problem is not None:
            return False
        try:
            private.write(self.path(profile.key), profiles.encode(profile))
            self._prune()
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _prune(self) -> None:
        def age(path: Path) -> float:
            try:
                return path.lstat().st_mtime
            except OSError:
                return 0.0

        for path in sorted(self.at.glob("rates-*.json*"), key=age, reverse=True)[MOST_FILES:]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _warn(self, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        self.problem = f"rates are measured anew and not kept: {self.at}: {reason[:300]}"
