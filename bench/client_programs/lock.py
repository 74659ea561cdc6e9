"""Makes the locks of `bench/clients.py`: every package that a client needs, pinned, with hashes.

    python bench/client_programs/lock.py [NAME ...]

It needs `uv` and `npm`. A Python lock holds for CPython 3.11 and newer on x86-64 and 64-bit Arm Linux, and has the
hashes of wheels for these; of a package without such wheels, that of its source. No lock names a registry's host.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.markers import Marker

from client_programs.catalog import CLIENTS, LOCKS, Client

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
WHEEL = re.compile(
    r"-(py3|py2\.py3|cp3(1[1-4]|\d)-abi3|cp31[1-4]-cp31[1-4])\b.*-(any|.*manylinux.*(x86_64|aarch64))\.whl$"
)
ABI3 = re.compile(r"-cp3\d+-abi3-")


def main(names: list[str]) -> None:
    LOCKS.mkdir(exist_ok=True)
    for name in names or CLIENTS:
        client = CLIENTS[name]
        (lock_npm if client.node else lock_python)(name, client)
        print(f"{name}: locked", flush=True)


def lock_python(name: str, client: Client) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted, made = Path(folder, "wanted.in"), Path(folder, "pylock.toml")
        wanted.write_text("\n".join(client.packages) + "\n")
        subprocess.run(
            ["uv", "pip", "compile", "--universal", "--python-version", PYTHONS[0], "--no-sources", "--quiet",
             "--format", "pylock.toml", wanted, "--output-file", made],
            check=True,
        )  # fmt: skip
        packages = tomllib.loads(made.read_text())["packages"]
    lines = [f"# What {client.packages[0]} needs; made by lock.py."]
    for package in packages:
        if wanted_here(package.get("marker")):
            marker = f" ; {package['marker']}" if "marker" in package else ""
            hashes = "".join(f" \\\n    --hash=sha256:{each}" for each in hashes_of(package))
            lines.append(f"{package['name']}=={package['version']}{marker}{hashes}")
    (LOCKS / f"{name}.txt").write_text("\n".join(lines) + "\n")


def wanted_here(marker: str | None) -> bool:
    """Whether a package is for any of the systems of a lock."""
    if marker is None:
        return True
    rule = Marker(marker)
    system = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    system |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return any(
        rule.evaluate(
            system | {"python_version": python, "python_full_version": f"{python}.7", "platform_machine": machine}
        )
        for python in PYTHONS
        for machine in MACHINES
    )


def hashes_of(package: dict[str, Any]) -> list[str]:
    wheels = [each for each in package.get("wheels", ()) if fits(each["url"].rpartition("/")[2])]
    found = wheels or [package["sdist"]]
    return sorted({each["hashes"]["sha256"] for each in found})


def fits(file: str) -> bool:
    """Whether a wheel is for any of the systems of a lock."""
    return bool(WHEEL.search(file) or (ABI3.search(file) and re.search(r"manylinux.*(x86_64|aarch64)\.whl$", file)))


def lock_npm(name: str, client: Client) -> None:
    """Write `package.json` and `package-lock.json`, without the addresses that packages came from."""
    folder = LOCKS / name
    folder.mkdir(exist_ok=True)
    wanted = dict(each.rsplit("@", 1) for each in client.packages)
    (folder / "package.json").write_text(json.dumps({"private": True, "dependencies": wanted}, indent=2) + "\n")
    lock = folder / "package-lock.json"
    lock.unlink(missing_ok=True)
    subprocess.run(
        ["npm", "install", "--package-lock-only", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"],
        cwd=folder,
        check=True,
    )
    made = json.loads(lock.read_text())
    for package in made["packages"].values():
        package.pop("resolved", None)
        package.pop("funding", None)
    lock.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
