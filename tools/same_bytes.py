"""Show that two commits put out the same bytes: the proof that a refactoring changed nothing.

    python tools/same_bytes.py OLD NEW --work build/same-bytes --real /models
    python tools/same_bytes.py OLD NEW --speed 5

Both commits are unpacked into the work folder and built there. Each case of `same_bytes_cases.py` runs under one and
then the other, by the command line and the facade alone: modules may move between the commits. Files
are compared by SHA-256, receipts and printed JSON value by value. A difference names the file, and the tensor or value.
The exit status is 1 where anything differs, is missing or fails.

Results are kept by commit and case, so a run that was stopped goes on, and the old commit runs once. A result counts
only for the same steps, driver, inputs, Python, torch and processor. The speed of both is measured in turn, in one run.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import same_bytes_cases as table

HERE = Path(__file__).resolve().parent
DRIVER = "same_bytes_driver.py"
SECONDS = 3600  # that one step may take
RECEIPT = "receipt.json"  # what a receipt's name ends in
VERSION = "versions.attar"  # the one value of a receipt that may differ
CARRIED = "converted.receipts"  # hashes of receipts, which differ where their versions do
SHOWN = 5  # differences of one file that are printed
FIGURES = ("prefill_tok_s", "decode_tok_s")
SLOWEST = 0.98  # of the old commit's speed
SITE = """import sys

sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in type(each).__module__]
"""
"""The `sitecustomize` of both commits: an editable install of attar would come before PYTHONPATH."""

Files = Mapping[str, Mapping[str, Any]]
"""What a case left: of each file by name its `sha256`, with `tensors` of safetensors, or its `json`."""


# What a case left


def describe(folder: Path) -> Files:
    """Describe every file of a case's folder but the links to its inputs."""
    found = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place) / name for name in names):
            if path.is_symlink():
                continue
            printed = path.parent == folder and path.suffix == ".json"
            if printed or path.name.endswith(RECEIPT):
                found[str(path.relative_to(folder))] = {"json": json.loads(path.read_bytes())}
                continue
            with path.open("rb") as file:
                found[str(path.relative_to(folder))] = {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            if path.suffix == ".safetensors":
                found[str(path.relative_to(folder))]["tensors"] = tensors(path)
    return found


def tensors(path: Path) -> dict[str, str]:
    """Hash each tensor of a safetensors file, with its dtype and shape."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    found = {}
    for name, about in header.items():
        first, last = about["data_offsets"]
        kind = f"{about['dtype']} {about['shape']} ".encode()
        found[name] = hashlib.sha256(kind + data[begin + first : begin + last]).hexdigest()
    return found


def differences(old: Files, new: Files) -> list[str]:
    """Name every file that differs, and what in it does."""
    found = [f"{name}: only the old commit writes it" for name in old if name not in new]
    found += [f"{name}: only the new commit writes it" for name in new if name not in old]
    for name in sorted(old.keys() & new.keys()):
        one, other = old[name], new[name]
        if "json" in one:
            found += [f"{name}: {each}" for each in _values(one["json"], other["json"], name.endswith(RECEIPT))]
        elif one["sha256"] != other["sha256"]:
            before, after = one.get("tensors", {}), other.get("tensors", {})
            changed = [each for each in {**before, **after} if before.get(each) != after.get(each)]
            what = ", ".join(changed[:SHOWN]) if changed else "its bytes"
            found.append(f"{name}: {what} ({len(changed)} of {len(before)} tensors)" if before else f"{name}: {what}")
    return found


def _values(old: Any, new: Any, receipt: bool) -> list[str]:
    before, after = dict(_leaves(old)), dict(_leaves(new))
    ignored: tuple[str, ...] = ()
    if receipt:
        ignored = (VERSION,) if before.get(VERSION) == after.get(VERSION) else (VERSION, CARRIED)
    changed = [each for each in {**before, **after} if before.get(each) != after.get(each)]
    changed = [each for each in changed if not each.startswith(ignored)] if ignored else changed
    shown = [f"{each} was {before.get(each, 'absent')}, is {after.get(each, 'absent')}" for each in changed[:SHOWN]]
    return shown + [f"and {len(changed) - SHOWN} values more"] * (len(changed) > SHOWN)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each number, text and empty container with its path. Floats keep every bit, and their sign."""
    if not isinstance(value, dict | list) or not value:
        yield path, json.dumps(value)
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _leaves(each, f"{path}.{key}" if path else str(key))


# Commits


@dataclass(frozen=True)
class Place:
    """The work folder, the Python and the threads that both commits share, and the repository that has them."""

    repository: Path
    work: Path
    python: Path
    threads: int

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)

    def git(self, *words: str) -> bytes:
        """Return what git prints. Raises SystemExit with what it says where it fails."""
        done = subprocess.run(["git", "-C", str(self.repository), *words], capture_output=True)
        if done.returncode:
            raise SystemExit(f"same_bytes: git {' '.join(words)}: {done.stderr.decode().strip()}")
        return done.stdout

    def unpack(self, commit: str) -> Path:
        """Unpack a commit and link its extension there. Returns the folder."""
        tree = self.work / "trees" / commit[:12]
        if not tree.exists():
            with tempfile.TemporaryDirectory(dir=self.work) as folder:
                archive = Path(folder) / "tree"
                archive.mkdir()
                subprocess.run(["tar", "-x", "-C", archive], input=self.git("archive", commit), check=True)
                tree.parent.mkdir(exist_ok=True)
                (archive / "src" / "sitecustomize.py").write_text(SITE)
                archive.rename(tree)
        if (tree / "CMakeLists.txt").exists():
            extension = self._extension(tree)
            link = tree / "src" / "attar" / extension.name
            link.unlink(missing_ok=True)
            link.symlink_to(extension)
        return tree

    def _extension(self, tree: Path) -> Path:
        """Build the extension, or find one that was built of the same sources."""
        sources = [tree / "CMakeLists.txt", *(path for path in files(tree / "src") if "csrc" in path.parts)]
        place = self.work / "native" / digest(tree, sources)[:12]
        if found := list(place.glob("_native*.so")):
            say(f"{tree.name}: the extension of these sources is there already, at {place}")
            return found[0]
        say(f"{tree.name}: building the extension")
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            path = f"{self.python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
            wheel = f"-m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir {folder}".split()
            subprocess.run([self.python, *wheel, tree], check=True, env={**os.environ, "PATH": path})
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as archive:
                (name,) = fnmatch.filter(archive.namelist(), "attar/_native*.so")
                place.mkdir(parents=True, exist_ok=True)
                (place / Path(name).name).write_bytes(archive.read(name))
        return place / Path(name).name

    def inputs(self, tree: Path) -> Path:
        """Write the inputs, unless the present version of their program did. Returns their folder."""
        program, demo = HERE / "same_bytes_models.py", tree / "src/attar/data/demo"
        folder, made_by = self.work / "inputs", self.work / "inputs.program"
        if not folder.exists() or not made_by.exists() or made_by.read_bytes() != program.read_bytes():
            say("writing the inputs")
            partial = folder.with_suffix(".partial")
            for each in (partial, folder):
                shutil.rmtree(each, ignore_errors=True)
            subprocess.run(
                [self.python, program, partial, demo, tree / "LICENSE"], check=True, stderr=subprocess.DEVNULL
            )
            partial.rename(folder)
            made_by.write_bytes(program.read_bytes())
        return folder

    @cached_property
    def machine(self) -> list[str]:
        """What else decides about the last bits."""
        asked = "import importlib.metadata as m, sys; print(sys.version, m.version('torch'))"
        versions = subprocess.run([self.python, "-c", asked], capture_output=True, text=True, check=True).stdout
        processors = Path("/proc/cpuinfo").read_text().splitlines()
        return [versions, next((line for line in processors if line.startswith("model name")), ""), str(self.threads)]


@dataclass
class Side:
    """One commit: `name` is old or new, `spelling` which of two spellings it understands."""

    place: Place
    name: str
    spelling: str
    commit: str

    @cached_property
    def tree(self) -> Path:
        return self.place.unpack(self.commit)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every command: no flag of attar, and what decides about bits fixed."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("ATTAR_", "OMP_", "GOMP_", "PYTHON"))}
        fixed = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
        return kept | fixed | {"OMP_NUM_THREADS": str(self.place.threads), "PYTHONPATH": str(self.tree / "src")}

    @cached_property
    def driver(self) -> subprocess.Popen[str]:
        """The process that runs this commit's steps."""
        command = [str(self.place.python), str(HERE / DRIVER)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=self.environment)

    def result(self, case: table.Case, key: str, keep: bool) -> dict[str, Any]:
        """Return {"key", "seconds", "error", "files"} of a case: the stored one, or of a run now."""
        results = f"{self.name}-{self.commit[:12]}-{self.place.threads}"
        stored = self.place.work / "results" / results / f"{case.name}.json"
        steps = case.spelt(self.spelling)
        key = hashlib.sha256(json.dumps([key, self.commit, steps]).encode()).hexdigest()
        if stored.exists() and not keep:
            found: dict[str, Any] = json.loads(stored.read_bytes())
            if found["key"] == key:
                return found
        began, folder = time.perf_counter(), self.place.work / "run" / case.name  # of both: no path may decide
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for each in (self.place.work / "inputs").iterdir():
            (folder / each.name).symlink_to(each)
        log = folder.with_suffix(".log")
        log.unlink(missing_ok=True)
        error = self._ask({"folder": str(folder), "log": str(log), "steps": steps, "seconds": SECONDS})
        left = {} if error else describe(folder)
        if keep:
            kept = self.place.work / "kept" / f"{self.name}-{self.commit[:12]}" / case.name
            shutil.rmtree(kept, ignore_errors=True)
            shutil.move(folder, kept)
        shutil.rmtree(folder, ignore_errors=True)
        result = {"key": key, "seconds": round(time.perf_counter() - began, 1), "error": error, "files": left}
        if error is None:
            stored.parent.mkdir(parents=True, exist_ok=True)
            stored.with_suffix(".tmp").write_text(json.dumps(result))
            stored.with_suffix(".tmp").rename(stored)
        return result

    def _ask(self, job: Mapping[str, Any]) -> str | None:
        driver = self.driver
        assert driver.stdin is not None
        assert driver.stdout is not None
        driver.stdin.write(json.dumps(job) + "\n")
        driver.stdin.flush()
        if not (answer := driver.stdout.readline()):
            del self.driver
            return f"the driver ended with {driver.wait()}"
        error: str | None = json.loads(answer)
        return error

    def bench(self, words: str) -> dict[str, float]:
        """Run one `attar bench` and return its figures."""
        command = [str(self.place.python), "-m", *shlex.split(words)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=self.environment)
        figures: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return figures


# Both


def compare(sides: Sequence[Side], chosen: Sequence[table.Case], key: str, keep: bool) -> dict[str, Any]:
    """Run each case under both commits, say what came of it, and return it by the case's name."""
    found = {}
    for case in chosen:
        old, new = (side.result(case, key, keep) for side in sides)
        failed = [
            f"{side.name}: {each['error']}" for side, each in zip(sides, (old, new), strict=True) if each["error"]
        ]
        different = failed or differences(old["files"], new["files"])
        word = "FAILED" if failed else "DIFFERS" if different else "same"
        say(f"{word:8}{case.name}: {len(old['files'])} files, {old['seconds']} and {new['seconds']} s")
        for each in different:
            say(f"        {each}")
        found[case.name] = {"differences": different, "seconds": [old["seconds"], new["seconds"]]}
    return found


def speeds(sides: Sequence[Side], rounds: int) -> dict[str, Any]:
    """Bench both commits in turn, and return medians and the median of the rounds' ratios, new over old."""
    found = {}
    for name, step in table.BENCHES.items():
        measured: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
        for i in range(rounds):
            for side in sides if i % 2 == 0 else reversed(sides):
                measured[side.name].append(side.bench(table.Case(name, (step,)).spelt(side.spelling)[0]))
        for figure in FIGURES:
            old, new = ([each[figure] for each in measured[side.name]] for side in sides)
            ratio = statistics.median(b / a for a, b in zip(old, new, strict=True))
            medians = statistics.median(old), statistics.median(new)
            word = "same" if ratio >= SLOWEST else "SLOWER"
            say(f"{word:8}{name}, {figure}: {medians[0]:.1f} and {medians[1]:.1f}, ratio {ratio:.3f} ({rounds} rounds)")
            found[f"{name} {figure}"] = {"old": medians[0], "new": medians[1], "ratio": ratio}
    return found


def digest(root: Path, paths: Iterable[Path]) -> str:
    """Hash files by their paths below `root` and their bytes."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return found.hexdigest()


def files(folder: Path) -> list[Path]:
    """Every file below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", help="a git revision")
    parser.add_argument("new", nargs="?", help="another")
    parser.add_argument("--work", type=Path, default=Path("build/same-bytes"), help="the folder of everything made")
    parser.add_argument("--repo", type=Path, default=HERE.parent, help="the repository that has both")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="has the dependencies of both, not attar"
    )
    parser.add_argument(
        "--real", type=Path, default=os.environ.get("ATTAR_REAL_MODELS"), help="folder of trained models"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of every command; default: 2")
    parser.add_argument("--only", action="append", metavar="NAME", help="cases by name or pattern; repeatable")
    parser.add_argument("--speed", type=int, metavar="N", help="instead of outputs, compare speeds in N rounds")
    parser.add_argument("--keep", action="store_true", help="run anew, and keep the outputs under WORK/kept")
    parser.add_argument("--list", action="store_true", help="print the cases and their steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    found = parser.parse_args(words)
    if not found.list and found.new is None:
        parser.error("two revisions are compared: OLD NEW")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Compare two commits. Returns the exit status."""
    asked = options(words)
    real = None if asked.real is None else Path(asked.real).resolve()
    every = table.cases(real)
    chosen = [c for c in every if not asked.only or any(fnmatch.fnmatchcase(c.name, o) for o in asked.only)]
    if asked.list:
        for case in chosen:
            print(case.name, *(f"    {step}" for step in case.spelt("old")), sep="\n")
        return 0
    if real is None:
        say("skipped: trained models, for which --real FOLDER or ATTAR_REAL_MODELS names a folder")
    place = Place(asked.repo.resolve(), asked.work.resolve(), asked.python.absolute(), asked.threads)
    with (place.work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        commits = [
            place.git("rev-parse", "--verify", f"{each}^{{commit}}").decode().strip() for each in (asked.old, asked.new)
        ]
        spellings = ("old", "old" if commits[0] == commits[1] else "new")
        sides = [Side(place, *about) for about in zip(("old", "new"), spellings, commits, strict=True)]
        report: dict[str, Any] = {"old": commits[0], "new": commits[1], "cases": {}, "speed": {}}
        if asked.speed:
            report["speed"] = speeds(sides, asked.speed)
        else:
            inputs = place.inputs(sides[0].tree)
            key = json.dumps(
                [digest(inputs, files(inputs)), place.machine, (HERE / "same_bytes_driver.py").read_text()]
            )
            report["cases"] = compare(sides, chosen, key, asked.keep)
    different = [name for name, case in report["cases"].items() if case["differences"]]
    different += [name for name, each in report["speed"].items() if each["ratio"] < SLOWEST]
    count = len(report["cases"]) + len(report["speed"])
    say(f"{len(different)} of {count} differ{': ' * bool(different)}{', '.join(different)}")
    if asked.json:
        print(json.dumps(report))
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
