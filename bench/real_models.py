"""The real, trained models that tests and benches read: which files, and whether they are the right ones.

    make real-models [SCRIPT=PATH] [NAMES="NAME ..."]
    python bench/real_models.py [NAME ...] [--script PATH]

The folder is `ATTAR_REAL_MODELS`, by default `build/real-models`. Where a script is given, it is called for each file
that is missing, as `python SCRIPT FOLDER NAME`, and must leave the file there. The project ships no such script: any
other way to put the files into the folder does as well. A file counts only if its size and SHA-256 are those below.

Exit status 1 where a file is missing or another one. The standard library suffices here.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = ROOT / "build" / "real-models"
FLAG = "ATTAR_REAL_MODELS"
CALL = "make real-models SCRIPT=<path of a script that fetches them>"


@dataclass(frozen=True)
class RealModel:
    """One file, and what it is."""

    file: str
    size: int  # bytes
    sha256: str
    about: str


MODELS: Mapping[str, RealModel] = {
    "smollm2-135m": RealModel(
        "SmolLM2-135M-Instruct-Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, Q4_1: Llama, 30 layers of 576, context 8,192; Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": RealModel(
        "Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: Qwen2, 24 layers of 896, context 32,768; Apache-2.0",
    ),
    "qwen2.5-coder-1.5b": RealModel(
        "Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: Qwen2, 28 layers of 1,536, context 32,768; Apache-2.0",
    ),
    "gemma3-270m": RealModel(
        "gemma-3-270m-Q4_K_M.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma-3-270M, Q4_K_M: Gemma 3, 18 layers of 640, context 32,768; Gemma terms, for local tests only",
    ),
}


def folder() -> Path | None:
    """The folder that `ATTAR_REAL_MODELS` names; None where it is not set."""
    named = os.environ.get(FLAG)
    return Path(named) if named else None


def against(name: str, place: Path | None) -> str | None:
    """Why the model's file in the folder cannot be used, in a sentence; None where it can. The whole file is hashed."""
    if place is None:
        return f"{FLAG} is not set: it names the folder of real models, which `{CALL}` fills"
    model, path = MODELS[name], place / MODELS[name].file
    if not path.is_file():
        return f"there is no {path}: `{CALL}` fetches it"
    if path.stat().st_size != model.size:
        return f"{path} has {path.stat().st_size:,} bytes and not {model.size:,}: remove it, and fetch it again"
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        return f"{path} has SHA-256 {found} and not {model.sha256}: remove it, and fetch it again"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(MODELS)}; default: all")
    parser.add_argument("--script", type=Path, help="called with the folder and a name for each file that is missing")
    args = parser.parse_args()
    if unknown := set(args.names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if args.script is not None and not args.script.is_file():
        parser.error(f"there is no script {args.script}")
    place, missing = folder() or DEFAULT, 0
    for name in args.names or MODELS:
        model, status = MODELS[name], against(name, place)
        if status is not None and args.script is not None and not (place / model.file).exists():
            print(f"{name}: fetching {model.size / 1e6:,.0f} MB into {place}", file=sys.stderr, flush=True)
            place.mkdir(parents=True, exist_ok=True)
            ended = subprocess.run([sys.executable, args.script, place, name], stdout=subprocess.DEVNULL).returncode
            status = f"{args.script} ended with status {ended}" if ended else against(name, place)
        missing += status is not None
        print(f"{name}\n  {model.about}\n  {model.file}, {model.size:,} bytes\n  SHA-256 {model.sha256}")
        print(f"  {'is there' if status is None else status}", flush=True)
    if missing:
        print(f"{missing} of these files are not in {place}: run `{CALL}`, or put them there", file=sys.stderr)
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
