"""Clients of the field, unmodified, against `attar serve`: what works and what fails, with the client's words.

    python bench/clients.py [--only NAME ...] [--model MODEL] [--json FILE] [--set-up]

Each client has an environment of its own in `build/clients`, from a lock with hashes (`client_programs/locks`). An
environment is kept, and made anew when its lock changes. Then the server and the clients run in a network namespace
that has loopback alone. Where no namespace can be made, the output says so, and proxies lead nowhere.

The model is Qwen2.5-Coder-0.5B of `ATTAR_REAL_MODELS`, else the embedded one, which follows no instructions: what
needs that is not asked of it. Failures that `client_programs/catalog.py` expects have a reason there. The exit status
is 1 for any other failure, and for an expected one that passes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from client_programs.catalog import CLIENTS, HERE, LOCKS

BUILD = HERE.parents[1] / "build" / "clients"
REAL = "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf"
ISOLATED = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
CONTEXT = 8192
START_SECONDS = 120.0
SET_UP_SECONDS = 3600.0
NOWHERE = "http://127.0.0.1:9"


@dataclass
class Outcome:
    """What one client did. `failed` and `unexpected` have the client's words for each check."""

    client: str
    version: str = "?"
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CLIENTS, metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--model", help="default: see above; a model that is named is taken to follow instructions")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    parser.add_argument("--set-up", action="store_true", help="make the environments, and run nothing")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the network namespace
    args = parser.parse_args()
    names = args.only or list(CLIENTS)
    if not args.inside:
        absent = [name for name in names if not set_up(name)]
        if args.set_up:
            return bool(absent)
        if (code := inside()) is not None:
            return code
    outcomes = run_all(names, args.model)
    table(outcomes)
    found = {"clients": len(outcomes), "outcomes": [asdict(each) for each in outcomes]}
    if args.json:
        args.json.write_text(json.dumps(found["outcomes"], indent=1) + "\n")
    wrong = sum(bool(each.unexpected) for each in outcomes)
    print(json.dumps({"clients": len(outcomes), "wrong": wrong, "passed": sum(len(each.passed) for each in outcomes)}))
    return wrong > 0


def inside() -> int | None:
    """Run this program again where only loopback is; None where that cannot be had."""
    if not shutil.which("unshare") or subprocess.run([*ISOLATED, "true"], capture_output=True).returncode:
        print("no network namespace can be made here: only proxies keep the clients from the network")
        return None
    return subprocess.run([*ISOLATED, sys.executable, *sys.argv, "--inside"]).returncode


def set_up(name: str) -> bool:
    """Make a client's environment where its lock is new; return whether it is there."""
    client, folder = CLIENTS[name], BUILD / name
    lock = LOCKS / name / "package-lock.json" if client.node else LOCKS / f"{name}.txt"
    digest, mark = hashlib.sha256(lock.read_bytes()).hexdigest(), folder / ".lock-digest"
    if mark.exists() and mark.read_text() == digest:
        return True
    print(f"setting up {name}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if client.node:
        folder.mkdir()
        for each in ("package.json", "package-lock.json"):
            shutil.copy(lock.with_name(each), folder)
        steps = [["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error", "--prefix", str(folder)]]
    else:
        python = str(folder / "bin" / "python")
        steps = [
            [sys.executable, "-m", "venv", str(folder)],
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps",
             "--requirement", str(lock)],
        ]  # fmt: skip
    for step in steps:
        try:
            done = subprocess.run(step, capture_output=True, text=True, timeout=SET_UP_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{name} could not be set up: no end in {SET_UP_SECONDS:.0f} s", flush=True)
            return False
        if done.returncode:
            print(f"{name} could not be set up:\n{(done.stdout + done.stderr)[-2000:]}", flush=True)
            return False
    mark.write_text(digest)
    return True


def run_all(names: list[str], model: str | None) -> list[Outcome]:
    real = Path(os.environ.get("ATTAR_REAL_MODELS", "/nonexistent"), REAL)
    sense = model not in (None, "demo") or (model is None and real.exists())
    path = model or (str(real) if sense else "demo")
    with tempfile.TemporaryDirectory() as home, serving(path, Path(home)) as (url, name):
        outcomes = []
        for each in names:
            outcomes.append(run(each, [url, name, *(["--sense"] if sense else [])], Path(home)))
            print(f"{each}: {len(outcomes[-1].passed)} passed, {len(outcomes[-1].failed)} failed", flush=True)
    return outcomes


def run(name: str, arguments: list[str], home: Path) -> Outcome:
    """Run one client's program; whatever it starts ends with its time."""
    client, outcome, folder = CLIENTS[name], Outcome(name), BUILD / name
    if not (folder / ".lock-digest").exists():
        outcome.unexpected = outcome.failed = {"environment": "could not be set up"}
        return outcome
    if client.node:
        # A module finds its packages beside itself.
        program = [shutil.which("node") or "node", shutil.copy(HERE / "node" / client.program, folder)]
        shutil.copy(HERE / "node" / "checks.mjs", folder)
    else:
        program = [str(folder / "bin" / "python"), str(HERE / "python" / client.program)]
    began = time.monotonic()
    work = home / name
    work.mkdir()
    with (home / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(
            [*program, *arguments], cwd=work, env=environment(work, folder), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=client.seconds)
        except subprocess.TimeoutExpired:
            output = ""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.seek(0)
        words = log.read()
    outcome.seconds = time.monotonic() - began
    found = result(output)
    if found is None:
        late = outcome.seconds >= client.seconds
        outcome.failed = {"program": f"did not end in {client.seconds:.0f} s" if late else words[-400:]}
    else:
        outcome.version, outcome.passed, outcome.failed = found["version"], found["passed"], found["failed"]
    (BUILD / f"{name}.log").write_text(words)
    outcome.unexpected = {check: words for check, words in outcome.failed.items() if check not in client.expected}
    outcome.unexpected |= {check: "passes now" for check in client.expected if check in outcome.passed}
    return outcome


def result(output: str) -> dict[str, Any] | None:
    """Return the JSON object of a program's last line."""
    with contextlib.suppress(ValueError, IndexError):
        found = json.loads(output.strip().splitlines()[-1])
        if isinstance(found, dict) and {"version", "passed", "failed"} <= found.keys():
            return found
    return None


def environment(home: Path, folder: Path) -> dict[str, str]:
    """Return a client's environment: a home of its own, no keys, no word to anyone, proxies that lead nowhere."""
    kept = {name: os.environ[name] for name in ("LANG", "LD_LIBRARY_PATH") if name in os.environ}
    return kept | {
        "PATH": f"{folder}/bin:{folder}/node_modules/.bin:{os.environ['PATH']}",
        "HOME": str(home),
        "TMPDIR": str(home),
        "http_proxy": NOWHERE, "https_proxy": NOWHERE, "HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE,
        "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost",
        "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "OTEL_SDK_DISABLED": "true",
        "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@contextlib.contextmanager
def serving(model: str, home: Path) -> Iterator[tuple[str, str]]:
    """Start `attar serve`; yield its address and the name of its model."""
    command = [sys.executable, "-m", "attar", "serve", model, "--port", "0", "--json"]
    if model != "demo":
        command += ["--context", str(CONTEXT), "--memory", "4GB"]
    with (home / "serve.log").open("w") as log:
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            first = server.stdout.readline()
            if "url" not in (said := json.loads(first or "{}")):
                sys.exit(f"the server does not start: {first}{(home / 'serve.log').read_text()[-2000:]}")
            url = said["url"]
            await_ready(url)
            with urllib.request.urlopen(url + "/v1/models") as answer:
                name = json.load(answer)["data"][0]["id"]
            yield url, name
        finally:
            server.terminate()
            server.wait()
            shutil.copy(home / "serve.log", BUILD / "serve.log")


def await_ready(url: str) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url + "/readyz"):
                return
        except urllib.error.URLError:
            if time.monotonic() > end:
                sys.exit("the server does not become ready")
            time.sleep(0.1)


def table(outcomes: list[Outcome]) -> None:
    print(f"\n{'client':<18}{'version':<12}{'passed':>7}  failed")
    for each in outcomes:
        print(f"{each.client:<18}{each.version:<12}{len(each.passed):>7}  {', '.join(each.failed) or '-'}")
    for each in outcomes:
        for check, words in each.failed.items():
            reason = CLIENTS[each.client].expected.get(check)
            print(f"\n{each.client} {check}: {words}" + (f"\n  expected: {reason}" if reason else ""))
        for check, words in each.unexpected.items():
            if check not in each.failed:
                print(f"\n{each.client} {check}: {words}, which {HERE.name}/catalog.py does not expect")
    print()


if __name__ == "__main__":
    sys.exit(main())
