"""GGUF files of ours against llama.cpp's own of the same name: with the same importance matrix, and with none.

    python bench/gguf_peers.py [--model demo] [--recipes q4_k_m q6_k ...] [--methods gptq] [--tokens N] [--samples N]
    python bench/gguf_peers.py --ours q4_k_m rotate-q4_k_m ... [--injected]

Both start from the same float32 file and have the same types in every matrix, so the same size to the byte. All are
decoded by one forward, in float32: what is compared is the rounding, not kernels. The ratio is of mean KL divergences
from the original on held-out text, with its paired bootstrap interval. `--methods` are ours alone, written into the
same types. Texts are those of `lanes.py`. llama.cpp is that of `.venv-llamacpp` (`make bench-peers`); its quantize is
called through its library.

With --ours only recipes of attar's are made, with their sizes and ratios to the first of them: that needs no llama.cpp.
All have the same calibration text, and those that only round are made without it too. --injected gives the model
outliers first (`outliers.py`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from compressors import DATA, ROOT
from lanes import LENGTH, Texts, texts
from outliers import KINDS, inject

from attar.checkpoints.sources import hf, hub, opening
from attar.compression.calibration import importance
from attar.compression.recipe.methods import Rtn, SpinQuant
from attar.compression.recipe.recipe_file import load_recipe
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.formats.codecs.ggml_mix import MIXES
from attar.metrics.bootstrap import paired_bootstrap_ratio
from attar.metrics.measure import Report, measure
from attar.model.decoder import Decoder

PYTHON = ROOT / ".venv-llamacpp" / "bin" / "python"
RECIPES = ("q4_k_m", "q4_k_s", "q6_k", "iq4_xs", "q3_k_m", "q5_k_m", "q2_k", "q4_0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calib", type=Path, default=DATA / "data" / "text" / "novels.jsonl.xz")
    parser.add_argument("--text", type=Path, default=DATA / "data" / "text" / "novels_valid.jsonl")
    parser.add_argument("--other", type=Path, default=DATA / "data" / "text" / "wikitext2_test.txt")
    parser.add_argument("--tokens", type=int, default=16384, help="of each held-out text")
    parser.add_argument("--samples", type=int, default=64, help=f"calibration sequences of {LENGTH} tokens")
    parser.add_argument("--seed", type=int, default=0, help="of calibration texts")
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--methods", nargs="*", default=(), help="such as gptq: that method with the same types")
    parser.add_argument("--ours", nargs="+", metavar="RECIPE", help="only these of attar's, beside the first of them")
    parser.add_argument("--injected", action="store_true", help="outliers, with --ours")
    parser.add_argument("--kinds", default=KINDS, help="of outliers, where they are injected")
    args = parser.parse_args()
    if args.injected and not args.ours:
        parser.error("--injected is for --ours")
    if args.ours is None and not PYTHON.exists():
        parser.error(f"there is no {PYTHON}: `make bench-peers` sets it up")
    source = hub.resolve(args.model)
    read = texts(source, args.calib, args.text, args.other, args.samples, args.tokens, args.seed)
    base = hf.load(source, torch.float32)
    if args.ours:
        found = ours_alone(source, read, base, args)
        print(json.dumps({"model": args.model, "injected": args.kinds if args.injected else "", "rows": found}))
        return
    rows = []

    def cost(path: Path) -> dict[str, Report]:
        model = opening.load(path, torch.float32)
        return {name: measure(model, ids, base=base) for name, ids in read.held_out.items()}

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compress(source, folder / "f32.gguf", recipe="f32")
        importance.make(source, folder / "imatrix.gguf", calibration=read.calibration)
        print(f"{'recipe':<14}{'imatrix':<9}{'bytes':>11}  {'text':<14}{'ours KL':>10}{'theirs':>10}  ours / theirs")
        for recipe in args.recipes:
            for imatrix in (None, folder / "imatrix.gguf"):
                given = [] if imatrix is None else ["--imatrix", str(imatrix)]
                theirs_at = folder / "theirs.gguf"
                subprocess.run(
                    [PYTHON, ROOT / "bench/peers/llama_quantize.py", folder / "f32.gguf", theirs_at,
                     "--type", str(MIXES[recipe].file_type), *given],
                    check=True, capture_output=True,
                )  # fmt: skip
                theirs = cost(theirs_at)
                for method in ("", *(args.methods if imatrix is not None else ())):
                    ours_at, full = folder / "ours.gguf", f"{method}-{recipe}" if method else recipe
                    compress_request(
                        CompressionRequest(
                            source,
                            ours_at,
                            recipe=full,
                            imatrix=imatrix,
                            overwrite=True,
                            resume=False,
                            calibration=read.calibration if method else None,
                        )
                    )
                    size = ours_at.stat().st_size
                    assert size == theirs_at.stat().st_size
                    for text, ours in cost(ours_at).items():
                        ratio = paired_bootstrap_ratio(ours.measurement.kl_windows, theirs[text].measurement.kl_windows)
                        kl = [each.figures["kl_mean"].value for each in (ours, theirs[text])]
                        rows.append({
                            "recipe": full, "imatrix": imatrix is not None, "bytes": size, "text": text, "ours": kl[0],
                            "theirs": kl[1], "ratio": ratio.value, "low": ratio.low, "high": ratio.high,
                        })  # fmt: skip
                        print(
                            f"{full:<14}{'yes' if imatrix else 'no':<9}{size:>11,}  {text:<14}{kl[0]:>10.6f}"
                            f"{kl[1]:>10.6f}  {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]",
                            flush=True,
                        )
    print(json.dumps({"model": args.model, "samples": args.samples, "tokens": args.tokens, "rows": rows}))


def ours_alone(source: Path, read: Texts, base: Decoder, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every recipe of `--ours` on the model, with outliers or as it is: a row for each and each text."""
    rows, first = list[dict[str, Any]](), dict[str, Report]()
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "ours.gguf"
        source = inject(source, Path(name) / "source", args.seed, args.kinds) if args.injected else source
        print(f"{'recipe':<26}{'calibrated':<12}{'bytes':>11}  {'text':<14}{'KL':>10}  / the first")
        for recipe in args.ours:
            plan = load_recipe(recipe)
            bare = plan.passes == (Rtn(),) and not isinstance(plan.rotate, SpinQuant)
            for calibration in (None, read.calibration) if bare else (read.calibration,):
                compress_request(
                    CompressionRequest(source, out, recipe=plan, calibration=calibration, overwrite=True, resume=False)
                )
                model, size = opening.load(out, torch.float32), out.stat().st_size
                for text, ids in read.held_out.items():
                    found = measure(model, ids, base=base)
                    beside = first.setdefault(text, found).measurement.kl_windows
                    ratio = paired_bootstrap_ratio(found.measurement.kl_windows, beside)
                    kl = found.figures["kl_mean"].value
                    rows.append({
                        "recipe": recipe, "calibrated": calibration is not None, "bytes": size, "text": text, "kl": kl,
                        "ratio": ratio.value, "low": ratio.low, "high": ratio.high,
                    })  # fmt: skip
                    print(
                        f"{recipe:<26}{'no' if calibration is None else 'yes':<12}{size:>11,}  {text:<14}{kl:>10.6f}  "
                        f"{ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]",
                        flush=True,
                    )
    return rows


if __name__ == "__main__":
    main()
