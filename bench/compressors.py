"""KL of attar's checkpoints beside those of llm-compressor: the same tokens, options and grid, scored by one forward.

    make bench-compressors
    python bench/compressors.py [MODEL ...] [--peers PYTHON] [--text FILE] [--seed N] [--keep FOLDER]

Each side compresses the model and writes its checkpoint; attar then reads both and measures each against the original
in float32 on the same held-out windows, so that neither side is judged by its own forward. Ratios are attar's KL over
the peer's, with paired-bootstrap intervals over windows. Beside them stands the share of codes that are the same; of
SparseGPT, whose output is dense, the share of weights that both set to zero or both keep.

Tokens are sampled from the model itself, calibration and held-out text with different seeds, so that no data is needed;
of a `--text`, the first half calibrates and the second is held out. The models are the embedded one and, where the
test data is at hand, TinyStories-656K.

The status is 1 unless RTN stores the same codes and scales, and these come to at most `TOLERANCE` times the peer's KL:
both orders of GPTQ on min-max scales, which are set before the sweep on both sides, and SparseGPT at 2:4. The other
rows only report, since there the two sides differ by design: in the grid that MSE and AWQ search, and, in
`gptq-dynamic`, in when scales are set (attar's when the sweep reaches the group, the peer's before).

What an interval does not show: GPTQ feeds each rounding error back, so a small difference ends in many other codes.
Where codes differ, another calibration seed moves the ratio by more than the interval over windows says
(docs/log/2026-11.md, "Peers"): a verdict on such a row needs several `--seed`s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attar.checkpoints.receipts import receipt
from attar.checkpoints.sources import hf, hub
from attar.compression.calibration import texts as calibrate
from attar.compression.calibration.amount import Amount
from attar.compression.recipe.recipe_file import recipe_from_dict
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.evaluation.report import evaluate
from attar.formats import affine
from attar.formats.packed import PackedTensor
from attar.metrics.bootstrap import paired_bootstrap_ratio
from attar.model.assembly import all_compressible
from attar.model.decoder import Decoder
from attar.text.files import read_text
from attar.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("ATTAR_TEST_DATA", ROOT.parent / "shared"))
MODELS = ("demo", str(DATA / "models" / "TinyStories-656K"))
PEER = ROOT / "bench" / "peers" / "llm_compressor.py"

SAMPLES, LENGTH = 128, 256
BLOCK, DAMPING = 128, 0.01
TOLERANCE = 1.03


@dataclass(frozen=True)
class Row:
    """One comparison: a recipe of attar's with its options, and the job of the peer's that it stands beside. `{group}`
    in the recipe stands for the size of the model's groups."""

    name: str
    recipe: str
    options: Mapping[str, Any]
    job: str
    must: str  # "equal", "near", or "" where the row only reports


def gptq(name: str, order: str, search: str, job: str, must: str, **options: bool) -> Row:
    common = {"block": BLOCK, "damping": DAMPING, "order": order, "scale_search": search}
    return Row(name, "gptq-w4g{group}", common | options, job, must)


MINMAX, MSE = {"observer": "memoryless_minmax"}, {"observer": "memoryless_mse"}
GPTQ = {"method": "gptq", "block_size": BLOCK, "damping": DAMPING}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "rtn": {"method": "rtn", **MINMAX},
    "gptq": {**GPTQ, "order": "static", **MINMAX},  # activation order, with static groups
    "gptq-natural": {**GPTQ, "order": None, **MINMAX},
    "gptq-mse": {**GPTQ, "order": "static", **MSE},
    "awq": {"method": "awq", **MINMAX},
    "sparsegpt": {"method": "sparsegpt", "pattern": "2:4", "damping": DAMPING},
}
ROWS = (
    Row("rtn", "rtn-w4g{group}", {}, "rtn", "equal"),
    gptq("gptq", "activation", "minmax", "gptq", "near"),
    gptq("gptq-natural", "natural", "minmax", "gptq-natural", "near"),
    gptq("gptq-dynamic", "natural", "minmax", "gptq-natural", "", static_groups=False),
    gptq("gptq-mse", "activation", "mse", "gptq-mse", ""),  # attar's default
    Row("awq", "awq-w4g{group}", {}, "awq", ""),
    Row("sparsegpt", "sparsegpt-2:4", {"block": BLOCK, "damping": DAMPING}, "sparsegpt", "near"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help="folders, Hub ids or `demo`")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers" / "bin" / "python", metavar="PYTHON")
    parser.add_argument("--text", type=Path, help="calibrate and score on this text instead of the model's own")
    parser.add_argument("--seed", type=int, default=0, help="of the calibration text; the held-out text takes the next")
    parser.add_argument("--keep", type=Path, help="leave the checkpoints in this folder")
    args = parser.parse_args()
    if not args.peers.exists():
        parser.error(f"there is no {args.peers}: `make bench-compressors` sets it up")
    results: dict[str, Any] = {}
    versions: dict[str, str] = {}
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as place:
        for model in args.models:
            label = Path(model).name
            if model == MODELS[1] and not Path(model).is_dir():
                print(f"{label}: skipped, there is no {model}: set ATTAR_TEST_DATA to the folder of the test data\n")
                continue
            results[label], versions = compare(hub.resolve(model), label, Path(place) / label, args)
    ok = all(row["holds"] for one in results.values() for row in one["rows"].values())
    print(json.dumps({"ok": ok, "peers": versions, "models": results}))
    raise SystemExit(0 if ok else 1)


def compare(source: Path, label: str, place: Path, args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    """Compress with both sides, score both, print the table: what goes into the JSON, and the peer's versions."""
    place.mkdir(parents=True, exist_ok=True)
    checkpoint = hf.Checkpoint.open(source)
    weights = receipt.combined_hash(checkpoint.folder.source_hashes())
    decoder = hf.load(source, torch.float32)
    calibration, held_out = texts(source, decoder, args)
    group = group_size(checkpoint)
    print(
        f"{label}, w4g{group}: calibrated on {len(calibration)} sequences of {len(calibration[0])} tokens, "
        f"scored on {len(held_out)} of {len(held_out[0])}"
    )
    seconds, versions = run_peer(args.peers, source, calibration, group, place)
    print(f"{'':<14}{'attar':>10}{'peer':>10}{'ratio':>9}{'95 % interval':>18}{'codes':>9}{'attar s':>9}{'peer s':>8}")
    rows = {}
    for row in ROWS:
        ours, theirs = place / f"attar-{row.name}", place / f"peer-{row.job}"
        recipe = recipe_from_dict({"recipe": row.recipe.format(group=group), **row.options})
        done = compress_request(
            CompressionRequest(source, ours, recipe=recipe, calibration=calibration, overwrite=True, resume=False)
        )
        a, b = (evaluate(path, against=decoder, tokens=held_out) for path in (ours, theirs))
        ratio = paired_bootstrap_ratio(a.measurement.kl_windows, b.measurement.kl_windows)
        codes, scales = agreement(ours, theirs)
        kl, kl_peer = a.figures["kl_mean"].value, b.figures["kl_mean"].value
        rows[row.name] = {
            "kl": kl,
            "kl_peer": kl_peer,
            "ratio": ratio.value,
            "interval": [ratio.low, ratio.high],
            "same_codes": codes,
            "same_scales": scales,
            "seconds": round(done.seconds, 3),
            "seconds_peer": seconds[row.job],
            "must": row.must,
            "holds": holds(row.must, ratio.value, codes, scales),
        }
        print(
            f"{row.name:<14}{kl:>10.6f}{kl_peer:>10.6f}{ratio.value:>9.4f}{f'[{ratio.low:.4f}, {ratio.high:.4f}]':>18}"
            f"{codes:>9.2%}{done.seconds:>9.1f}{seconds[row.job]:>8.1f}"
            + ("" if rows[row.name]["holds"] else f"  FAILS: must be {row.must}"),
            flush=True,
        )
    print()
    if weights != receipt.combined_hash(hf.Checkpoint.open(source).folder.source_hashes()):
        raise SystemExit(f"{label} changed on disk while it was being measured: run again")
    return {"source": weights, "group": group, "seed": args.seed, "rows": rows}, versions


def texts(source: Path, decoder: Decoder, args: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Token sequences to calibrate on and to score on."""
    if args.text is None:
        amounts = (Amount(SAMPLES, LENGTH, args.seed + i) for i in range(2))
        calibration, held_out = (calibrate.sample_from(decoder, amount).tolist() for amount in amounts)
        return calibration, held_out
    tokenizer = Tokenizer.load(source)
    ids = tokenizer.encode(read_text(args.text), add_special_tokens=False)
    halves = (ids[: len(ids) // 2], ids[len(ids) // 2 :])
    calibration, held_out = (calibrate.windows(half, SAMPLES, LENGTH, tokenizer.added_bos).tolist() for half in halves)
    return calibration, held_out


def group_size(checkpoint: hf.Checkpoint) -> int:
    """The largest common group size that gives every row at least two groups: with one, groups would test nothing."""
    widths = {checkpoint.linear_shape(name)[1] for name in linears(checkpoint)}
    return next(size for size in (128, 64, 32) if all(width % size == 0 and width > size for width in widths))


def linears(checkpoint: hf.Checkpoint) -> list[str]:
    return all_compressible(checkpoint.config)


def run_peer(
    python: Path, source: Path, tokens: Sequence[Sequence[int]], group: int, place: Path
) -> tuple[dict[str, float], dict[str, str]]:
    """All jobs in one process of the peers' environment: seconds by job, and versions."""
    jobs = [
        {"name": name, "out": str(place / f"peer-{name}"), "group_size": group, **job} for name, job in JOBS.items()
    ]
    file, log = place / "jobs.json", place / "peer.log"
    file.write_text(json.dumps({"model": str(source), "tokens": tokens, "jobs": jobs}))
    with log.open("w") as errors:
        done = subprocess.run([python, PEER, file], stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        raise SystemExit(f"llm-compressor failed; the end of its log:\n{log.read_text()[-4000:]}")
    said = json.loads(done.stdout.splitlines()[-1])
    return said["seconds"], said["versions"]


def agreement(ours: Path, theirs: Path) -> tuple[float, bool]:
    """The share of codes that both checkpoints store alike, and whether all scales are the same."""
    a, b = hf.Checkpoint.open(ours), hf.Checkpoint.open(theirs)
    same = total = 0
    scales = True
    for name in linears(a):
        (codes_a, scale_a), (codes_b, scale_b) = stored(a, name), stored(b, name)
        same += int((codes_a == codes_b).sum())
        total += codes_a.numel()
        if scale_a is None or scale_b is None:
            scales &= scale_a is scale_b
        else:
            scales &= torch.equal(scale_a, scale_b)
    return same / total, scales


def stored(checkpoint: hf.Checkpoint, name: str) -> tuple[Tensor, Tensor | None]:
    """Codes and scales of one linear; of a dense one which weights are not zero."""
    weight = checkpoint.linear(name).weight
    if not isinstance(weight, PackedTensor):
        assert isinstance(weight, Tensor)
        assert (weight == 0).any(), f"{name} is neither compressed nor pruned"
        return weight.ne(0), None
    codes, scale, _ = affine.decode(weight)
    return codes, scale


def holds(must: str, ratio: float, codes: float, scales: bool) -> bool:
    if must == "equal":
        return codes == 1 and scales and ratio == 1
    return not must or ratio <= TOLERANCE


if __name__ == "__main__":
    main()
