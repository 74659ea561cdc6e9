"""Other servers' tests against `attar serve`: llama.cpp's of its server, and vLLM's of its entrypoints.

    python bench/suites.py {llama.cpp,vllm} [--model MODEL] [--source DIR] [--json FILE] [--only WORDS]

The tests are those of the source package that `suite_programs/sources.txt` pins with its hash. They are unpacked to
`build/suites`, never committed, and run as they are, but for what `PATCHES` names. A harness starts attar in place of
their server and does nothing else: no request or answer is changed. Some of vLLM's tests want a model that follows
instructions: `--model` names one.

The denominator is frozen: `suite_programs/llama.cpp.txt` and `suite_programs/vllm.txt` name the tests that count. Each
excluded test has its reason there. The output ends with one line of JSON: how many of the tests that count pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent / "suite_programs"
BUILD = Path(__file__).parents[1] / "build" / "suites"
KEY = "sk-this-is-the-secret-key-of-32-characters"  # attar takes no shorter one

FOLDERS = {
    "llama.cpp": {
        "vendor/llama.cpp/tools/server/tests": "tools/server/tests",
        "vendor/llama.cpp/models/templates": "models/templates",
    },
    "vllm": {"tests": "tests"},
}
"""Folders of the source package, and where tests and their data are copied to."""
PACKAGES = {"llama.cpp": "llama_cpp_python", "vllm": "vllm"}
PATCHES = {
    "llama.cpp": {
        "unit/test_security.py": [("sk-this-is-the-secret-key", KEY)],
        "utils.py": [("import wget\n", "")],  # it downloads models
        "conftest.py": [("        ServerPreset.load_all()", "        pass")],
    },
    "vllm": {
        "tests/entrypoints/openai/chat_completion/test_root_path.py": [('API_KEY = "abc-123"', f'API_KEY = "{KEY}"')]
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=FOLDERS)
    parser.add_argument("--source", type=Path, help="an unpacked source package, in place of the pinned one")
    parser.add_argument("--model", default="demo", help="the model that attar serves; default: the embedded one")
    parser.add_argument("--only", help="words for pytest's -k")
    parser.add_argument("--json", type=Path, help="write the outcome of every test to this file")
    args = parser.parse_args()
    tests = prepared(args.suite, args.source or unpacked(args.suite))
    counted, excluded = denominator(args.suite)
    found = run(
        args.suite, tests, sorted({name.partition("::")[0] for name in [*counted, *excluded]}), args.only, args.model
    )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    report(found, counted, excluded, whole=args.only is None)
    return 0


def denominator(suite: str) -> tuple[list[str], dict[str, str]]:
    """Return the tests that count, and the reason for each that does not."""
    counted, excluded = list[str](), dict[str, str]()
    for line in (HERE / f"{suite}.txt").read_text().splitlines():
        name, _, reason = line.partition("  # ")
        if name and not name.startswith("#"):
            if reason:
                excluded[name] = reason
            else:
                counted.append(name)
    return counted, excluded


def unpacked(suite: str) -> Path:
    """Return the unpacked source package. pip unpacks it before it asks for metadata, which cannot be had here."""
    folder = BUILD / "sources" / suite
    if not (found := next(folder.glob("*/PKG-INFO"), None)):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        lines = [line for line in (HERE / "sources.txt").read_text().splitlines() if line.startswith(PACKAGES[suite])]
        (folder / "wanted.txt").write_text("\n".join(lines) + "\n")
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
             "--no-clean", "--require-hashes", "--requirement", str(folder / "wanted.txt"), "--dest", str(folder)],
            env={**os.environ, "TMPDIR": str(folder)}, capture_output=True,
        )  # fmt: skip
        found = next(folder.glob("pip-*/*/PKG-INFO"), None)
        if found is None:
            sys.exit(f"the source package of {PACKAGES[suite]} cannot be had")
        found = Path(shutil.move(found.parent, folder / PACKAGES[suite]), "PKG-INFO")
    return found.parent


def prepared(suite: str, source: Path) -> Path:
    """Return a copy of the tests with the patches in."""
    root = BUILD / suite
    shutil.rmtree(root, ignore_errors=True)
    for folder, place in FOLDERS[suite].items():
        shutil.copytree(source / folder, root / place)
    tests = root if suite == "vllm" else root / "tools" / "server" / "tests"
    if suite == "vllm":
        for name in ("utils", "conftest"):
            shutil.copy(HERE / f"vllm_{name}.py", tests / "tests" / f"{name}.py")
        (tests / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    for name, changes in PATCHES.get(suite, {}).items():
        text = (tests / name).read_text()
        for old, new in changes:
            assert old in text, f"{name} has no {old!r}"
            text = text.replace(old, new)
        (tests / name).write_text(text)
    return tests


def run(suite: str, tests: Path, files: list[str], only: str | None, model: str) -> dict[str, str]:
    """Run the files; return the outcome of each test: `passed`, or what it said."""
    result, pool = BUILD / f"{suite}.xml", BUILD / f"{suite}-pool"
    shutil.rmtree(pool, ignore_errors=True)
    pool.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ, "SUITE_POOL": str(pool), "SUITE_PYTHON": sys.executable, "SUITE_HARNESS": str(HERE),
        "SUITE_MODEL": model,
        "PORT": str(port), "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1",
        "LLAMA_SERVER_BIN_PATH": str(HERE / "llama_server.py"),
    }  # fmt: skip
    command = [
        str(interpreter()), "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short",
        f"--junitxml={result}", *files,
    ]  # fmt: skip
    with stopped(pool):
        process = subprocess.Popen([*command, *(["-k", only] if only else [])], cwd=tests, env=environment)
        try:
            process.wait()
        except KeyboardInterrupt:  # pytest, which was interrupted too, reports what has run
            process.wait()
    return outcomes(result)


def interpreter() -> Path:
    """Return the Python of the suites' environment, which is made from its lock."""
    folder = BUILD / "environment"
    python, lock = folder / "bin" / "python", HERE / "lock.txt"
    if not (folder / ".made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        wanted = ["--require-hashes", "--no-deps", "--requirement", str(lock)]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / ".made").touch()
    return python


@contextlib.contextmanager
def stopped(pool: Path) -> Iterator[None]:
    """End the servers that were started meanwhile, also where this process is told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield
    finally:
        for each in pool.glob("*.json"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads(each.read_text())["pid"], signal.SIGTERM)


def outcomes(result: Path) -> dict[str, str]:
    """Return the outcomes of pytest's report, by the names of the denominator."""
    found = {}
    for case in ElementTree.parse(result).iter("testcase"):
        path = case.get("classname", "").replace(".", "/") + ".py"
        bad = [each for each in case if each.tag in ("failure", "error", "skipped")]
        words = "passed" if not bad else f"{bad[0].tag}: {(bad[0].get('message') or '')[:300]}"
        found[f"{path}::{case.get('name')}"] = words
    return found


def report(found: dict[str, str], counted: list[str], excluded: dict[str, str], whole: bool) -> None:
    passed = [name for name in counted if found.get(name) == "passed"]
    for name in counted:
        if name in found and name not in passed:
            print(f"{name}\n    {' '.join(found[name].split())}")
    if unknown := sorted(found.keys() - {*counted, *excluded}):
        print(f"{len(unknown)} tests that the denominator does not name, of which the first is {unknown[0]}")
    ran = len(counted) if whole else sum(name in found for name in counted)
    share = round(len(passed) / max(ran, 1), 3)
    print(json.dumps({"passed": len(passed), "counted": ran, "excluded": len(excluded), "share": share}))


if __name__ == "__main__":
    sys.exit(main())
