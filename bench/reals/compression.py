"""One compression of a real model: seconds, memory and stored bits, and the KL of what comes out.

    PYTHONPATH=bench python -m reals.compression FILE.gguf --place FOLDER (--recipe NAME [--bits B] | --kv NAME |
        --peer PROGRAM --job NAME --lane LANE --python PYTHON | --llama-quantize MIX --python PYTHON)
        [--group N] [--calib prose|code|chat|mixed] [--samples N] [--seed N] [--tokens N]

The original is the file's values in bfloat16 (`dense.py`), kept in FOLDER; what comes out is deleted. It is scored in
float32 on held-out text of the kind that it was calibrated on, in windows of 512 tokens. `peak_mb` is what this process
held at most until the output was written, imports included; of a peer it is the peer's process. The original is not in
the page cache when a compression begins. `inputs_s`, `solve_s` and others are attar's seconds a layer by stage;
`layer_s` is the whole time over the layers, of everybody.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lanes
import torch
from compressors import ROOT
from dense import dense

import attar
from attar.checkpoints import inspect
from attar.checkpoints.sources import opening
from attar.compression.calibration import importance
from attar.compression.request.request import CompressionRequest, Target
from attar.compression.runs.pipeline import compress_request
from attar.formats.codecs.ggml_mix import MIXES, find
from attar.text.tokenizer import Tokenizer
from reals.scoring import score
from reals.texts import KINDS, LENGTH, MIXED, calibration, scored

Made = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--place", type=Path, required=True, help="where the dense original is kept")
    parser.add_argument("--recipe")
    parser.add_argument("--bits", type=float, help="a target for the recipe's bits a weight")
    parser.add_argument("--kv", help="only how keys and values are kept; nothing is compressed")
    parser.add_argument("--peer", help="a program of bench/peers")
    parser.add_argument("--job", help="of the peer's, as bench/lanes.py calls it")
    parser.add_argument("--lane", help="of bench/lanes.py, which has the job")
    parser.add_argument("--group", type=int, default=64, help="columns of a group in the peer's job")
    parser.add_argument("--llama-quantize", metavar="MIX", help="llama.cpp's own, with an importance matrix")
    parser.add_argument("--python", type=Path, help="of the peer's environment")
    parser.add_argument("--calib", choices=(*KINDS, MIXED), default="prose")
    parser.add_argument("--samples", type=int, default=128, help=f"calibration sequences of {LENGTH} tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=32768, help="to score on")
    args = parser.parse_args()
    original = dense(args.file, args.place / args.file.stem)
    tokenizer = Tokenizer.load(original)
    text = scored(tokenizer, args.calib, args.tokens)
    with kept(args) as folder:
        if args.kv is not None:
            made, out = Made(), original
        else:
            sequences = calibration(tokenizer, args.calib, args.samples, args.seed)
            forget(original)
            out = folder / "out"
            if args.recipe is not None:
                made, out = ours(original, out, sequences, args)
            elif args.peer is not None:
                made = peer(original, out, sequences, args)
            else:
                made, out = llama_quantize(original, folder, sequences, args)
        model = opening.load(out, torch.float32)
        windows = [text[at : at + LENGTH] for at in range(0, len(text), LENGTH)]
        figures = score(model, original, args.place, windows, args.kv)
    if "seconds" in made:
        made["layer_s"] = made["seconds"] / model.config.layers
    print(json.dumps(made | {name: each.value for name, each in figures.items()}))


@contextmanager
def kept(args: argparse.Namespace) -> Iterator[Path]:
    """Yield a folder for outputs. One of attar's that was killed on the way is found there by the same command."""
    if args.recipe is None:
        with tempfile.TemporaryDirectory(dir=args.place) as name:
            yield Path(name)
        return
    told = hashlib.sha256(repr(sorted(vars(args).items())).encode()).hexdigest()
    folder = args.place / f"made-{told[:16]}"
    folder.mkdir(exist_ok=True)
    yield folder
    shutil.rmtree(folder)


def forget(folder: Path) -> None:
    """Take the files of a folder out of the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def peak_mb(of: int = resource.RUSAGE_SELF) -> float:
    return resource.getrusage(of).ru_maxrss * 1024 / 1e6


def ours(original: Path, out: Path, sequences: list[list[int]], args: argparse.Namespace) -> tuple[Made, Path]:
    """attar's output. A recipe of a mix of GGUF's types writes a file. An interrupted run goes on, and its times are
    not told: they would be of its end alone."""
    if args.recipe.rpartition("-")[2] in MIXES:
        out = out.with_suffix(".gguf")
    if out.exists():
        return {"bits": inspect.inspect(out).bits_per_weight}, out
    target = None if args.bits is None else Target(bits=args.bits)
    whole = not any(out.parent.iterdir())
    done = compress_request(CompressionRequest(
        original, out, recipe=args.recipe, target=target, calibration=sequences, seed=args.seed,
    ))  # fmt: skip
    if not whole:
        return {"bits": done.bits_per_weight}, out
    stages = {f"{name}_s": seconds for name, seconds in done.block_seconds.items()}
    return {"seconds": done.seconds, "bits": done.bits_per_weight, "peak_mb": peak_mb(), **stages}, out


def peer(original: Path, out: Path, sequences: list[list[int]], args: argparse.Namespace) -> Made:
    """Have a peer compress, by a job of `bench/lanes.py`."""
    jobs = lanes.lanes(args.group, 200)[args.lane].peers[args.peer]
    job = next(each for each in jobs if each["name"] == args.job)
    said = lanes.peer(args.python, args.peer, job, original, sequences, out)
    return {
        "seconds": said["seconds"],
        "bits": said["bits"] or lanes.bits_of(job, out),
        "peak_mb": peak_mb(resource.RUSAGE_CHILDREN),
    }


def llama_quantize(
    original: Path, folder: Path, sequences: list[list[int]], args: argparse.Namespace
) -> tuple[Made, Path]:
    """Have llama.cpp quantize, with importances of attar's. Bits are those of attar's file, of the same types."""
    whole, imatrix, out = folder / "f32.gguf", folder / "imatrix.gguf", folder / "theirs.gguf"
    attar.compress(original, whole, recipe="f32")
    importance.make(original, imatrix, calibration=sequences)
    mix, since = find(args.llama_quantize), time.perf_counter()
    assert mix is not None, f"no mix is called {args.llama_quantize}"
    program = ROOT / "bench" / "peers" / "llama_quantize.py"
    command = [args.python, program, whole, out, "--type", str(mix.file_type), "--imatrix", imatrix]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama.cpp's quantize: {done.stderr[-2000:]}")
    made: Made = {"seconds": time.perf_counter() - since, "peak_mb": peak_mb(resource.RUSAGE_CHILDREN)}
    mine = compress_request(
        CompressionRequest(original, folder / "ours.gguf", recipe=args.llama_quantize, imatrix=imatrix)
    )
    assert mine.path.stat().st_size == out.stat().st_size, "the two files have other types"
    return made | {"bits": mine.bits_per_weight}, out


if __name__ == "__main__":
    main()
