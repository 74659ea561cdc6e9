"""What keeping keys and values in few bits costs over a long context, beside how llama.cpp and KIVI keep them.

    python bench/kv.py [--model demo] [--context 4096] [--windows 12] [--only NAME ...] [--json FILE]

The figure is KL(model with keys and values as they are || the same model with them rounded), over held-out text in
windows that go through a cache as prompts do. It falls short of what a trained model of that context would show where
`--model` was trained on less: then a copy of it reads the longer windows by YaRN (Peng et al. 2023), which is no more
than a change of its configuration; its perplexity there is printed beside that within what it was trained for. How far
keys, values and weights of attention resemble those of a model made for the context is not known; every scheme is
judged by the same.

Peers are built here by their published formulas, on the same float32 model: llama.cpp's q4_0 (blocks of 32 columns, one
float16 each: 4.5 bits), plain and with keys and values turned by a Hadamard matrix; and KIVI in 2 bits, in groups of 32
and 64, whose tokens see their own block of 64 (or of 128) in 16 bits, as klt2's do, so that windows are equal. Bits are
all that is stored, the unfinished block of one sequence of the context included. Intervals are 95 % bootstraps over
windows, paired where they are of a ratio.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressors import DATA
from torch import Tensor

from attar.checkpoints import hf, hub, vocabulary
from attar.engine import kv as engine_kv
from attar.formats.kv import SCHEMES, KvScheme
from attar.kernels import ops
from attar.kernels.operands import Norm
from attar.kernels.pages import Bases, Pages, Placement, Rotation
from attar.kernels.planes import hadamard
from attar.metrics.bootstrap import paired_bootstrap_ratio
from attar.metrics.divergence import Comparison, compare
from attar.metrics.measure import measure
from attar.metrics.perplexity import plan_windows
from attar.metrics.streaming import Measurement, decoder_logits
from attar.model import kv_basis
from attar.model.cache import BLOCK, KVCache
from attar.model.decoder import Decoder

Q4_0 = 32  # columns of a block
KIVI64 = KvScheme("kivi2 g64", "kivi", 2, recent=True, group=64)
KLT_LESS = KvScheme("klt2, 2.25 stored", "planes", 2, calibrated=True, recent=True)  # a quarter of a bit below KIVI's


@dataclass(frozen=True)
class Way:
    """One way to keep keys and values. `rounded` makes numbers [N, G, D] what they are read as, of pages of float32."""

    name: str
    scheme: KvScheme
    block: int = BLOCK
    rounded: Callable[[Tensor], Tensor] | None = None
    bits: float = 0.0  # of a number, where the scheme does not say

    def bits_at(self, head_dim: int, context: int) -> float:
        return self.bits or self.scheme.bits_per_value(head_dim, self.block, context)


def q4_0(x: Tensor) -> Tensor:
    """As llama.cpp's quantize_row_q4_0 and back: of 32 neighbours, the one of greatest size becomes -8."""
    groups = x.unflatten(-1, (-1, Q4_0))
    greatest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    exact = greatest / -8
    inverse = torch.where(exact == 0, 0.0, 1 / exact)
    codes = (groups * inverse + 8.5).floor().clamp(0, 15) - 8
    return (codes * exact.half().float()).flatten(-2)


def rotated(x: Tensor) -> Tensor:
    turn = hadamard(x.shape[-1])
    return q4_0(x @ turn) @ turn


def ways() -> list[Way]:
    plain = SCHEMES["float32"]
    ours = [Way(name, SCHEMES[name]) for name in ("int8", "fp8", "klt4", "int4", "klt2", "nuq4", "nuq3")]
    return [
        Way("q4_0", plain, rounded=q4_0, bits=4.5),
        Way("q4_0 rotated", plain, rounded=rotated, bits=4.5),
        Way("kivi2 g64", KIVI64),
        Way("kivi2 g32", SCHEMES["kivi2"]),
        Way("kivi2 g64, blocks of 128", KIVI64, 128),
        *ours,
        Way("klt2, 2.25 stored", KLT_LESS),
        Way("klt2, blocks of 128", SCHEMES["klt2"], 128),
    ]


RATIOS = (
    ("klt4", "q4_0 rotated", 0.60), ("int4", "q4_0 rotated", 0.60), ("nuq4", "q4_0 rotated", 0.60),
    ("klt2", "kivi2 g64", 0.50), ("klt2, 2.25 stored", "kivi2 g64", 0.50), ("klt2", "kivi2 g32", 0.50),
    ("klt2, blocks of 128", "kivi2 g64, blocks of 128", 0.50),
)  # fmt: skip


@contextmanager
def rounding(rounded: Callable[[Tensor], Tensor] | None) -> Iterator[None]:
    """Keys, once they are rotated, and values are rounded before they are written."""
    plain = ops.write_kv

    def write(
        q: Tensor, k: Tensor, v: Tensor, pages: Pages, place: Placement, rotation: Rotation | None = None,
        q_norm: Norm | None = None, k_norm: Norm | None = None,
    ) -> Tensor:  # fmt: skip
        assert rounded is not None
        if q_norm is not None and k_norm is not None:
            q, k = ops.norm(q, None, q_norm)[1], ops.norm(k, None, k_norm)[1]
        if rotation is not None:
            angles = rotation.cos[rotation.rows.long()], rotation.sin[rotation.rows.long()]
            q, k = ops.rope(q, *angles), ops.rope(k, *angles)
        return plain(q.contiguous(), rounded(k).contiguous(), rounded(v).contiguous(), pages, place)

    if rounded is not None:
        ops.write_kv = write
    try:
        yield
    finally:
        ops.write_kv = plain


def stretched(source: Path, context: int, folder: Path) -> Path:
    """The model with YaRN to `context` positions, where it has fewer."""
    config = json.loads((source / "config.json").read_text())
    trained = config["max_position_embeddings"]
    if trained >= context:
        return source
    theta = config.get("rope_parameters", {}).get("rope_theta", config.get("rope_theta", 10000.0))
    config["max_position_embeddings"] = context
    config["rope_parameters"] = {
        "rope_type": "yarn", "rope_theta": theta, "factor": context / trained,
        "original_max_position_embeddings": trained,
    }  # fmt: skip
    config.pop("rope_scaling", None)
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def windows(source: Path, text: Path, context: int, count: int) -> tuple[list[list[int]], int | None]:
    """`count` windows from all over the text, and the token that goes in front of each."""
    tokenizer = vocabulary.tokenizer(source)
    bos, length = tokenizer.added_bos, context - (tokenizer.added_bos is not None)
    lines = text.read_text().splitlines()
    ids = [i for line in lines for i in tokenizer.encode(json.loads(line)["text"], add_special_tokens=False)]
    room = len(ids) // length
    if room < count:
        raise SystemExit(f"{text} has {room} windows of {context} tokens, not {count}")
    return [ids[i * room // count * length :][:length] for i in range(count)], bos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder, a Hub id or `demo`")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--text", type=Path, default=DATA / "data" / "text" / "novels_valid.jsonl")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the first column")
    parser.add_argument("--json", type=Path, help="where the result goes; else it is the last line")
    args = parser.parse_args()
    source = hub.resolve(args.model)
    if not args.text.exists():
        raise SystemExit(f"there is no {args.text}: give a held-out --text of JSON lines")
    with tempfile.TemporaryDirectory() as folder:
        found = run(source, stretched(source, args.context, Path(folder)), args)
    args.json.write_text(json.dumps(found) + "\n") if args.json else print(json.dumps(found))


def run(source: Path, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    decoder = hf.load(path, torch.float32)
    ids, bos = windows(source, args.text, args.context, args.windows)
    if path != source:
        within = hf.load(source, torch.float32)
        short = measure(within, ids[:2], bos=bos, context=within.config.context).figures["ppl"].value
        print(f"perplexity in windows of {within.config.context}, which the model was trained for: {short:.1f}")
    chosen = [way for way in ways() if not args.only or way.name in args.only]
    measured, seconds = compared(decoder, chosen, ids, bos, args.context)
    print(f"{'':<28}{'bits':>8}{'KL':>10}{'95 % interval':>22}{'top-1':>8}{'ppl':>8}{'seconds':>9}")
    rows: dict[str, dict[str, Any]] = {}
    for way in chosen:
        found, bits = measured[way.name].figures(), way.bits_at(decoder.config.head_dim, args.context)
        kl, top, perplexity, base = (found[name] for name in ("kl_mean", "top1", "ppl", "ppl_base"))
        rows[way.name] = {"bits": bits, "kl": [kl.value, kl.low, kl.high], "top1": top.value, "ppl": perplexity.value,
                          "ppl_base": base.value, "windows": measured[way.name].kl_windows.tolist()}  # fmt: skip
        interval = "" if kl.low is None or kl.high is None else f"[{kl.low:.6f}, {kl.high:.6f}]"
        print(
            f"{way.name:<28}{bits:>8.3f}{kl.value:>10.6f}{interval:>22}{top.value:>8.4f}{perplexity.value:>8.1f}"
            f"{seconds[way.name]:>9.1f}",
        )
    print(f"{'as they are':<28}{32:>8}{'':>40}{rows[chosen[0].name]['ppl_base']:>8.1f}")
    ratios = {}
    for ours, theirs, goal in RATIOS:
        if ours in measured and theirs in measured:
            ratio = paired_bootstrap_ratio(*(measured[name].kl_windows for name in (ours, theirs)))
            ratios[f"{ours} / {theirs}"] = [ratio.value, ratio.low, ratio.high, goal]
            print(f"{ours} over {theirs}: {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], goal {goal:.2f}")
    return {"model": args.model, "context": args.context, "windows": args.windows, "rows": rows, "ratios": ratios}


def compared(
    decoder: Decoder, chosen: list[Way], ids: list[list[int]], bos: int | None, context: int
) -> tuple[dict[str, Measurement], dict[str, float]]:
    """Each way's divergence, and its seconds: window by window, the model's own logits made once for all."""
    calibrated = {way.scheme.name: way.scheme for way in chosen if way.scheme.calibrated}
    likely = engine_kv.sample(decoder) if calibrated else torch.zeros((0, 0))
    bases = {name: kv_basis.calibrate(decoder, likely, scheme) for name, scheme in calibrated.items()}
    columns: dict[str, list[Comparison]] = {way.name: [] for way in chosen}
    seconds = dict.fromkeys(columns, 0.0)
    for number, text in enumerate(ids, 1):
        (window,) = plan_windows(text, context, context, bos)
        inputs, targets = torch.tensor(window.inputs), torch.tensor(window.counted)
        base = torch.cat(list(decoder_logits(decoder)(inputs, window.first)))
        for way in chosen:
            begin = time.perf_counter()
            logits = decoder_logits(decoder, partial(_cache, decoder, way, bases.get(way.scheme.name)))
            with rounding(way.rounded):
                ours = torch.cat(list(logits(inputs, window.first)))
            columns[way.name].append(compare(base, ours, targets))
            seconds[way.name] += time.perf_counter() - begin
        print(f"window {number} of {len(ids)}", flush=True)
    measured = {}
    for name, parts in columns.items():
        of = np.repeat(np.arange(len(ids)), [len(part[0]) for part in parts])
        measured[name] = Measurement(of, *(torch.cat(each).double().numpy() for each in zip(*parts, strict=True)))
    return measured, seconds


def _cache(decoder: Decoder, way: Way, bases: list[Bases] | None, length: int) -> KVCache:
    return KVCache(decoder.config, length, scheme=way.scheme, block=way.block, bases=bases)


if __name__ == "__main__":
    main()
