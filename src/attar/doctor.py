"""`attar doctor`: report the machine, the installation, and the kernel that each operation would choose and why.

The report asks the code that decides and decides nothing again: versions of the installed packages, instruction sets
and level of `kernels.native`, choices of `kernels.dispatch.candidates`. It names neither host nor user, so that it can
be pasted into a bug report.
"""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from attar import env, machine
from attar.kernels import dispatch
from attar.kernels.native import extension
from attar.version import __version__

PACKAGES = ("torch", "numpy", "tokenizers", "huggingface_hub", "jinja2", "transformers", "compressed-tensors")
"""Packages whose version can change a result; the last two are needed only for development."""

DTYPES = (torch.float32, torch.bfloat16)

Report = dict[str, Any]


def examine() -> Report:
    """Return versions, CPU, threads, devices, environment flags and kernels as JSON-compatible values.

    Raises ValueError where an environment flag has an invalid value, or one that this machine cannot satisfy.
    """
    return {
        "versions": _versions(),
        "cpu": {
            "architecture": platform.machine(),
            "features": dict(extension.features()),
            "level": extension.cpu_level() if extension.loaded() else None,
        },
        "threads": {
            "physical_cores": machine.cores(),
            "torch": torch.get_num_threads(),
            "openmp": extension.openmp(),
            "openmp_runtimes": openmp_runtimes(),
        },
        "devices": _devices(),
        "environment": env.table(env.get()),
        "kernels": _kernels(),
    }


def to_text(report: Report) -> str:
    """Return the report as a page of text for a terminal."""
    cpu, threads = report["cpu"], report["threads"]
    sections: dict[str, dict[str, Any]] = {
        "versions": {name: version or "not installed" for name, version in report["versions"].items()},
        "cpu": {
            "architecture": cpu["architecture"],
            "instruction sets": " ".join(name for name, present in cpu["features"].items() if present) or "unknown",
            "kernel level": cpu["level"] or "none: the compiled extension does not load",
        },
        "threads": {
            "physical cores allowed": threads["physical_cores"],
            "torch": threads["torch"],
            "kernels": "as torch" if threads["openmp"] else "1 (built without OpenMP)",
            "OpenMP runtimes loaded": "unknown" if (count := threads["openmp_runtimes"]) is None else count,
        },
        "devices": {device["name"]: device["description"] for device in report["devices"]},
        "environment": {f["name"]: f["value"] or f"unset (may be: {f['type']})" for f in report["environment"]},
        "kernels": {},
    }
    lines: list[str] = []
    for title, rows in sections.items():
        lines += [title, *(f"  {name:<24}{value}" for name, value in rows.items())]
    for where, chosen in report["kernels"].items():
        lines.append(f"  {where}")
        for op, choice in chosen.items():
            against = [f"{c['backend']} {c['reason']}" for c in choice["candidates"] if c["reason"]]
            lines.append(f"    {op:<20}{choice['backend'] or 'none':<8}{'; '.join(against)}".rstrip())
    return "\n".join(lines)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"attar": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def openmp_runtimes(maps: Path = Path("/proc/self/maps")) -> int | None:
    """Return the number of OpenMP runtimes that this process has loaded, None where the system does not say.

    More than one means two pools of threads that compete for the cores, and calls up to a hundred times slower.
    """
    try:
        mapped = maps.read_text()
    except OSError:
        return None
    return len({path for path in re.findall(r"(/.*)$", mapped, re.M) if re.search(r"/lib(?:gomp|iomp5|omp)\b", path)})


def _devices() -> list[dict[str, str]]:
    found = [{"name": "cpu", "description": platform.machine()}]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        described = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute {gpu.major}.{gpu.minor}"
        found.append({"name": f"cuda:{index}", "description": described})
    return found


def _kernels() -> dict[str, dict[str, Any]]:
    """Return, per device type and dtype of the rows, each operation's backend and every candidate with its reason."""
    return {
        f"{device} {str(dtype).removeprefix('torch.')}": {op: _choice(op, device, dtype) for op in dispatch.OPS}
        for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]
        for dtype in DTYPES
    }


def _choice(op: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    candidates = dispatch.candidates(op, device, dtype)
    return {
        "backend": next((backend for backend, reason in candidates if reason is None), None),
        "candidates": [{"backend": backend, "reason": reason} for backend, reason in candidates],
    }
