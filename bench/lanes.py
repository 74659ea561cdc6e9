"""KL at equal bits, lane by lane, beside what else can be installed here: each at the best of its settings.

    make bench-quality
    python bench/lanes.py [LANE ...] [--model demo] [--tokens N] [--samples N] [--ours NAME ...] [--json FILE]

    int4    4 bits in groups of 128, stored as compressed-tensors, AWQ and GPTQ store them. Peers: llm-compressor's AWQ
            and GPTQ on MSE and min-max ranges, symmetric or not; auto-round, its extended algorithm too; GPTQModel's
            GPTQ; and of those that read no text HQQ, in groups of 64 too, and torchao.
    int3    the same with 3 bits.
    int8    8 bits with a scale for each row. Peer: torchao.
    w4a8kv4 4-bit weights of two levels, int8 activations a token, keys and values in 4 bits. Instead of a peer, QoQ as
            published, on the same storage; all beside 4-bit weights alone (AWQ), keys and values as they are.
    w8a8    int8 weights a row and activations a token, with outliers of all kinds injected (`outliers.py`; other kinds
            by --kinds). Peers: llm-compressor's SmoothQuant before GPTQ, at strengths 0.5 and 0.8, of norms alone
            and of up as well.
    w4a4    4-bit weights a row and 4-bit activations a token, with the same outliers. Instead of a peer, our quarot
            without balance, and turned across heads before o: as published, but for its clipping.
    sparse  two of four weights are zero, the others dense. Peers: llm-compressor's SparseGPT and Wanda.

With --injected all lanes get outliers. llm-compressor and auto-round run in one environment, each other peer in one of
its own; a peer whose environment is not there is left out, which is said.

Every side gets the same token ids to calibrate on, and writes its output; attar reads all of them and measures each
against the original in one float32 forward, so that nobody is judged by its own. Scored is held-out text of the kind
that the embedded model was trained on, and another kind (`--other`): never what anybody calibrated on. Settings were
chosen with an eye on the windows that are scored by default; those of --final lie halfway between them (of as many
--tokens), and are there to be read once, when all is chosen. Ratios are KL over that of the best of each program,
"best" by the held-out text itself, which favours the peers; with paired-bootstrap intervals over windows: over its
best, and over the best that stores no more. Bits are all stored bytes of the linears; what auto-round, HQQ and torchao
round is written dense here, and their bits are those of their own formats.

With --drawn N everybody's text is followed by N sequences that the model writes (`attar compress --self-samples N`).
Without test data both texts are sampled from the model, with other seeds than the calibration text's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressors import DATA, ROOT, group_size
from outliers import KINDS, inject

from attar.checkpoints import inspect
from attar.checkpoints.sources import hf, hub
from attar.compression.calibration import texts as calibrate
from attar.compression.calibration.amount import Amount
from attar.compression.recipe.recipe import Recipe
from attar.compression.recipe.recipe_file import recipe_from_dict
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.evaluation.report import evaluate
from attar.metrics.bootstrap import paired_bootstrap_ratio
from attar.metrics.measure import Report
from attar.text.tokenizer import Tokenizer

PEERS = ROOT / "bench" / "peers"
APART = {"gptq_model": ".venv-gptqmodel", "hqq_rounding": ".venv-hqq", "torchao_rounding": ".venv-torchao"}
"""Environments of peers that have one of their own, by program."""
LENGTH = 512
SAME = 0.01  # bits a weight that two storages of one kind may differ by: headers, an order of columns
MINMAX, MSE = "memoryless_minmax", "memoryless_mse"

FIGURES = {"kl": "kl_mean", "kl_p999": "kl_p999", "top1": "top1", "ear": "ear", "ln_ppl_change": "ln_ppl_change"}
"""Of each output, by their names in the result."""

Job = dict[str, Any]


@dataclass(frozen=True)
class Lane:
    """What is compared: recipes of attar's, jobs of the peers' by program, and the goal as a ratio to the best peer.

    What no peer can be installed for is made here from a recipe that does as was `published`, and counts as a peer.
    `kv` is how everybody keeps keys and values, but for `uncached` recipes, beside which all others are shown as well.
    """

    ours: tuple[str, ...]
    peers: Mapping[str, tuple[Job, ...]]
    goal: float
    injected: bool = False  # whether the model gets outliers first
    published: Mapping[str, Recipe] = field(default_factory=dict)
    kv: str | None = None
    uncached: tuple[str, ...] = ()


def integers(bits: int, group: int, iterations: int) -> Mapping[str, tuple[Job, ...]]:
    """Every peer on a grid of so many bits."""
    grid = {"bits": bits, "group_size": group}
    gptq = {"method": "gptq", "block_size": 128, "damping": 0.01, "order": "static"}
    theirs = []
    for word, observer in (("minmax", MINMAX), ("mse", MSE)):
        for also, symmetric in (("", True), (", asymmetric", False)):
            given = {**grid, "observer": observer, "symmetric": symmetric}
            theirs.append({"name": f"GPTQ, {word}{also}", **given, **gptq})
            theirs.append({"name": f"AWQ, {word}{also}", **given, "method": "awq", "duo_scaling": "both"})
    rounding = {**grid, "iterations": iterations}
    rounded = (
        {"name": f"auto-round, {iterations}", **rounding, "symmetric": True},
        {"name": f"auto-round, {iterations}, extended", **rounding, "symmetric": True, "extended": True},
        {"name": f"auto-round, {iterations}, asymmetric", **rounding, "symmetric": False},
    )
    searched = tuple(
        {"name": f"GPTQModel, {word}{also}", **grid, "mse": mse, "symmetric": symmetric}
        for word, mse in (("minmax", 0.0), ("mse", 2.4))
        for also, symmetric in (("", True), (", asymmetric", False))
    )
    sizes = tuple(dict.fromkeys((group, min(group, 64))))
    return {
        "llm_compressor": tuple(theirs),
        "auto_round": rounded,
        "gptq_model": searched,
        "hqq_rounding": tuple({"name": f"HQQ, g{size}", "bits": bits, "group_size": size} for size in sizes),
        "torchao_rounding": (
            {"name": "torchao", **grid, "symmetric": True},
            {"name": "torchao, asymmetric", **grid, "symmetric": False},
        ),
    }


def lanes(group: int, iterations: int) -> dict[str, Lane]:
    def recipes(scheme: str) -> tuple[str, ...]:
        symmetric = tuple(f"{method}-{scheme}g{group}" for method in ("rtn", "gptq", "qronos", "guided", "guided+tune"))
        others = ("gptq", "guided", "guided+tune", "guided+distill", "rotate+guided")
        return (*symmetric, *(f"{method}-{scheme}g{group}-asym" for method in others))

    smooth = tuple(
        {
            "name": f"SmoothQuant {s:g}{', into up' * through}, GPTQ",
            "method": "smoothquant",
            "strength": s,
            "through": through,
        }
        for through in (False, True)
        for s in (0.5, 0.8)
    )
    rotated = (
        "rotate+gptq-w8a8", "quarot+gptq-w8a8", "quarot+guided-w8a8", "quarot+gptq+tune-w8a8", "spinquant+gptq-w8a8",
    )  # fmt: skip
    eights = ("rtn-w8a8", "smoothquant+gptq-w8a8", *rotated)
    fours = ("smoothquant+gptq-w4a4", "quarot+gptq-w4a4", "spinquant+gptq-w4a4", "spinquant+guided-w4a4")
    quarot = {"QuaRot, GPTQ": recipe_from_dict({"recipe": "quarot+gptq-w4a4", "balance": False, "across": True})}
    whole = {"name": "torchao", "bits": 8, "group_size": None, "symmetric": True}
    damped = tuple(
        {"name": f"SparseGPT, damping {d:g}", "method": "sparsegpt", "pattern": "2:4", "damping": d}
        for d in (0.01, 0.1)
    )
    sparse: tuple[Job, ...] = ({"name": "Wanda", "method": "wanda", "pattern": "2:4"}, *damped)
    return {
        "int4": Lane(recipes("w4"), integers(4, group, iterations), 0.60),
        "int3": Lane(recipes("w3"), integers(3, group, iterations), 0.55),
        "int8": Lane(("rtn-w8", "gptq-w8", "guided-w8"), {"torchao_rounding": (whole,)}, 1.0),
        "w8a8": Lane(eights, {"llm_compressor": smooth}, 0.30, True),
        "w4a4": Lane(fours, {}, 0.60, True, published=quarot),
        "w4a8kv4": four_eight_four(group),
        "sparse": Lane(("sparsegpt-2:4", "prune-2:4", "prune+tune-2:4"), {"llm_compressor": sparse}, 0.80),
    }


def four_eight_four(group: int) -> Lane:
    """W4A8KV4. QoQ's own program wants a GPU and models of its list; what it does to a Llama (Lin et al. 2024, and the
    settings published for g128) is said in a recipe of ours: block inputs rotated, keys smoothed with alpha 0.5, o and
    down smoothed with 0.3 (down alone where queries share heads), ranges searched by outputs, then GPTQ on levels from
    least to greatest, columns in the order of their inputs' size. Without the rotation too, should that be better."""
    scheme = f"qserve-g{group}"
    keys = {"key_alpha": 0.5, "values": False}
    smooth = {"through": True, "norms": False, "alpha": 0.3}
    steps = f"smoothattention+smoothquant+clip+gptq-{scheme}"
    published: dict[str, Job] = {
        "QoQ": {"recipe": f"rotate+{steps}", "heads": False, "balance": False},
        "QoQ, not rotated": {"recipe": steps},
    }
    ours = ("gptq", "smoothattention+guided", "smoothattention+guided+tune", "rotate+smoothattention+guided")
    return Lane(
        tuple(f"{method}-{scheme}" for method in ours),
        {},
        0.70,
        published={
            name: recipe_from_dict({**said, **keys, **smooth, "scale_search": "minmax"})
            for name, said in published.items()
        },
        kv="int4",
        uncached=(f"awq-w4g{group}-asym",),
    )


@dataclass(frozen=True)
class Texts:
    """Token sequences: to calibrate on, and by name to score on."""

    calibration: list[list[int]]
    held_out: dict[str, list[list[int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "lanes", nargs="*", metavar="LANE", help="int4, int3, int8, w8a8, w4a4, w4a8kv4, sparse; default: all"
    )
    parser.add_argument("--model", default="demo", help="a folder, a Hub id or `demo`")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers" / "bin" / "python", metavar="PYTHON")
    parser.add_argument("--samples", type=int, default=128, help=f"calibration sequences of {LENGTH} tokens")
    parser.add_argument("--drawn", type=int, default=0, help="calibration sequences more, which the model writes")
    parser.add_argument("--tokens", type=int, default=65536, help="of each held-out text")
    parser.add_argument("--iterations", type=int, default=200, help="of auto-round")
    parser.add_argument("--ours", nargs="+", metavar="RECIPE", help="instead of the lane's recipes")
    parser.add_argument("--no-peers", action="store_true", help="only attar's")
    parser.add_argument("--calib", type=Path, default=DATA / "data" / "text" / "novels.jsonl.xz")
    parser.add_argument("--text", type=Path, default=DATA / "data" / "text" / "novels_valid.jsonl")
    parser.add_argument("--other", type=Path, default=DATA / "data" / "text" / "wikitext2_test.txt")
    parser.add_argument("--seed", type=int, default=0, help="of calibration texts")
    parser.add_argument(
        "--final", action="store_true", help="score windows between those that so many --tokens are scored on otherwise"
    )
    parser.add_argument("--injected", action="store_true", help="outliers in all lanes")
    parser.add_argument("--clean", action="store_true", help="outliers in no lane")
    parser.add_argument("--kinds", default=KINDS, help="of outliers, where they are injected")
    parser.add_argument("--programs", nargs="+", metavar="PEER", help="only these of a lane's peers")
    parser.add_argument("--jobs", nargs="+", metavar="NAME", help="only these of what the peers do")
    parser.add_argument("--keep", type=Path, help="leave the outputs in this folder")
    parser.add_argument("--json", type=Path, help="where the result goes; else it is the last line")
    args = parser.parse_args()
    if not args.no_peers and not args.peers.exists():
        parser.error(f"there is no {args.peers}: `make bench-quality` sets it up")
    source = hub.resolve(args.model)
    known = lanes(group_size(hf.Checkpoint.open(source)), args.iterations)
    if unknown := set(args.lanes) - set(known):
        parser.error(f"no such lane: {', '.join(sorted(unknown))}")
    named = {job["name"] for lane in known.values() for jobs in lane.peers.values() for job in jobs}
    if unknown := set(args.jobs or ()) - named:
        parser.error(f"no peer does {', '.join(sorted(unknown))}: there are {', '.join(sorted(named))}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        place = args.keep or Path(folder)
        read = texts(source, args.calib, args.text, args.other, args.samples, args.tokens, args.seed, args.final)
        for name in args.lanes or known:
            found[name] = run(name, known[name], source, read, place / name, args)
    about = {key: getattr(args, key) for key in ("model", "samples", "drawn", "tokens", "final")}
    line = json.dumps({**about, "lanes": found})
    args.json.write_text(line + "\n") if args.json else print(line)


def texts(
    source: Path, calib: Path, text: Path, other: Path, samples: int, tokens: int, seed: int, final: bool = False
) -> Texts:
    """Sequences of one file to calibrate on, and of two to score on, `tokens` of each: other ones if `final`."""
    if not (calib.exists() and text.exists() and other.exists()):
        if final:
            raise SystemExit("--final is for texts that settings were chosen by, and there is no test data")
        print("no test data: all texts are sampled from the model")
        decoder = hf.load(source, torch.float32)
        amounts = [Amount(n, LENGTH, seed + i) for i, n in enumerate((samples, tokens // LENGTH))]
        calibration, held_out = (calibrate.sample_from(decoder, amount).tolist() for amount in amounts)
        return Texts(calibration, {"its own": held_out})
    tokenizer = Tokenizer.load(source)

    def windows(path: Path, count: int, seed: int = 0, between: bool = False) -> list[list[int]]:
        """From all over the text: `count` windows, evenly apart, the first at a place that the seed says; or those
        halfway `between` so many."""
        needed, ids = 8 * count * LENGTH, list[int]()
        for text in contents(path):
            ids += tokenizer.encode(text, add_special_tokens=False)
            if len(ids) > needed:
                break
        room = len(ids) // LENGTH
        if room < count:
            raise SystemExit(f"{path} has {room} windows of {LENGTH} tokens, not {count}")
        if between and room < 2 * count:
            raise SystemExit(f"{path} has no room for {count} windows between {count} others")
        spaced = [i * room // count * LENGTH for i in range(count)]
        if between:
            starts = [at + room // count // 2 * LENGTH for at in spaced]
        else:
            starts = [(at + seed * 7919) % ((room - 1) * LENGTH) for at in spaced]
        return [ids[at : at + LENGTH] for at in starts]

    count = tokens // LENGTH
    scored = {
        "held out": windows(text, count, between=final),
        "another kind": windows(other, count, between=final),
    }
    return Texts(windows(calib, samples, seed), scored)


def contents(path: Path) -> Iterator[str]:
    """The texts in a file: of JSON lines each one's `text`, else the whole."""
    if ".jsonl" not in path.suffixes:
        yield path.read_text()
        return
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        for line in file:
            yield json.loads(line)["text"]


def run(name: str, lane: Lane, original: Path, read: Texts, place: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One lane: everybody compresses, all are scored, the table is printed."""
    place.mkdir(parents=True, exist_ok=True)
    source = original
    if (lane.injected and not args.clean) or args.injected:
        source = place / f"injected-{args.kinds}"
        if not source.exists():  # the same in a kept folder
            inject(original, source, kinds=args.kinds)
    decoder = hf.load(source, torch.float32)
    amount = Amount(seed=args.seed, drawn=args.drawn)
    more = calibrate.sample_from(decoder, amount.besides(LENGTH)).tolist() if args.drawn else []
    count = len(read.calibration) + len(more)
    print(f"\n{name}: calibrated on {count} x {LENGTH} tokens, scored on {args.tokens:,} of each text")
    print(f"{'':<32}{'bits':>7}" + "".join(f"{text:>32}" for text in read.held_out) + f"{'seconds':>9}")
    rows: dict[str, dict[str, Any]] = {}
    scores: dict[str, dict[str, Report]] = {}

    def score(label: str, folder: Path, seconds: float, peer: str | None, bits: float) -> None:
        kv = None if label in lane.uncached else lane.kv
        scores[label] = {
            text: evaluate(folder, against=decoder, tokens=ids, kv=kv) for text, ids in read.held_out.items()
        }
        figures = {
            key: {text: one.figures[name].value for text, one in scores[label].items()} for key, name in FIGURES.items()
        }
        windows = {text: one.measurement.kl_windows.tolist() for text, one in scores[label].items()}
        rows[label] = {"peer": peer, "bits": bits, **figures, "seconds": seconds, "windows": windows}
        kls = figures["kl"]
        values = "".join(f"{kl:>32.6f}" for kl in kls.values())
        print(f"{label:<32}{bits:7.3f}{values}{seconds:>9.1f}", flush=True)

    for program, jobs in {} if args.no_peers else lane.peers.items():
        if args.programs and program not in args.programs:
            continue
        python = args.peers if program not in APART else ROOT / APART[program] / "bin" / "python"
        if not python.exists():
            print(f"{program} is left out: there is no {python}, which `make bench-quality` sets up")
            continue
        for job in jobs:
            if args.jobs and job["name"] not in args.jobs:
                continue
            out = place / slug(job["name"])
            tokens = [*read.calibration, *more]
            said = kept(out, work(source, tokens, job), partial(peer, python, program, job, source, tokens, out))
            score(job["name"], out, said["seconds"], program, said["bits"] or bits_of(job, out))
    made: list[tuple[str, str | Recipe, str | None]] = [
        (name, said, "what was published") for name, said in lane.published.items()
    ]
    made += [(recipe, recipe, None) for recipe in (*lane.uncached, *(args.ours or lane.ours))]
    for label, recipe, as_peer in made:
        out = place / slug(label)
        asked = work(source, read.calibration, {"recipe": repr(recipe), "seed": args.seed, "drawn": args.drawn})
        said = kept(out, asked, partial(ours, source, out, recipe, read.calibration, args))
        score(label, out, said["seconds"], as_peer, said["bits"])
    for program in dict.fromkeys(row["peer"] for row in rows.values() if row["peer"]):
        for no_more in (False, True):
            compare(rows, scores, program, no_more, lane.goal)
    for beside in lane.uncached:
        print(f"over {beside}, its keys and values as they are")
        for label, row in rows.items():
            row["over"] = {text: row["kl"][text] / rows[beside]["kl"][text] for text in read.held_out}
            print(f"{label:<39}" + "".join(f"{ratio:>32.3f}" for ratio in row["over"].values()), flush=True)
    return {"goal": lane.goal, "injected": None if source is original else args.kinds, "rows": rows}


def compare(
    rows: dict[str, dict[str, Any]],
    scores: Mapping[str, Mapping[str, Report]],
    program: str,
    no_more: bool,
    goal: float,
) -> None:
    """Print our KL over that of the best of a program's outputs on each text, or those that store no more than we do,
    and note it in the rows."""
    title = "... that stores no more" if no_more else f"over the best of {program}"
    texts = next(iter(rows.values()))["kl"]
    print(f"{title:<39}" + "".join(f"{text:>56}" for text in texts))
    for label, row in rows.items():
        most = row["bits"] + SAME if no_more else math.inf
        rivals = [name for name, one in rows.items() if one["peer"] == program and one["bits"] <= most]
        if row["peer"] or not rivals:
            continue
        shown, found = "", row.setdefault("ratios", {}).setdefault(f"{program}, no more" if no_more else program, {})
        for text in texts:
            rival = min(rivals, key=lambda name: rows[name]["kl"][text])
            ours, theirs = (scores[one][text].measurement.kl_windows for one in (label, rival))
            ratio = paired_bootstrap_ratio(ours, theirs)
            found[text] = {"of": rival, "value": ratio.value, "interval": [ratio.low, ratio.high]}
            shown += f"{f'{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of {rival}':>56}"
        print(f"{label:<39}{shown}   goal {goal:.2f}", flush=True)


def bits_of(job: Job, folder: Path) -> float:
    """Stored bits of a peer's linears, a weight, which it has not said. What auto-round rounded is kept dense here, and
    counted as it would be stored: a 16-bit scale a group, with a code for its zero if it has one."""
    if "iterations" not in job:
        return inspect.inspect(folder).bits_per_weight
    bits: int = job["bits"]
    group: int = job["group_size"]
    return bits + (16 if job["symmetric"] else 16 + bits) / group


def slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".+-" else "-" for c in name)


def work(source: Path, tokens: list[list[int]], job: Mapping[str, Any]) -> str:
    """What tells a job on a model and tokens from others, wherever they lie."""
    told = hashlib.sha256(json.dumps([tokens, job], sort_keys=True).encode())
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as file:
            told.update(hashlib.file_digest(file, "sha256").digest())
    return told.hexdigest()


def kept(out: Path, asked: str, make: Callable[[], Job]) -> Job:
    """What `make` says of its output. What a kept folder has, from the same work, is not made again."""
    done = out.parent / f"{out.name}.done.json"
    if done.exists() and (said := json.loads(done.read_text())).get("work") == asked:
        return dict(said)
    done.unlink(missing_ok=True)
    said = make()
    done.write_text(json.dumps({**said, "work": asked}))
    return said


def ours(source: Path, out: Path, recipe: str | Recipe, calibration: list[list[int]], args: argparse.Namespace) -> Job:
    """Our output, its seconds and bits. In a kept folder an interrupted run goes on."""
    done = compress_request(
        CompressionRequest(
            source,
            out,
            recipe=recipe,
            calibration=calibration,
            seed=args.seed,
            drawn=args.drawn,
            overwrite=True,
            resume=args.keep is not None,
        )
    )
    return {"seconds": done.seconds, "bits": done.bits_per_weight}


def peer(python: Path, program: str, job: Job, source: Path, tokens: list[list[int]], out: Path) -> Job:
    """A peer's output, made in a process of its environment: its seconds, and the bits that it says it stores (or
    None)."""
    file, log = (out.parent / f"{out.name}{ending}" for ending in (".json", ".log"))
    file.write_text(json.dumps({"model": str(source), "tokens": tokens, "jobs": [{**job, "out": str(out)}]}))
    with log.open("w") as errors:
        ended = subprocess.run(
            [python, PEERS / f"{program}.py", file], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    if ended.returncode:
        raise SystemExit(f"{job['name']} failed; the end of its log:\n{log.read_text()[-4000:]}")
    said = json.loads(ended.stdout.splitlines()[-1])
    return {key: said.get(key, {}).get(job["name"]) for key in ("seconds", "bits")}


if __name__ == "__main__":
    main()
