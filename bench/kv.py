"""What keeping keys and values in few bits costs over a long context, beside how llama.cpp and KIVI keep them.

    python bench/kv.py [--model demo] [--context 4096] [--windows 12] [--only NAME ...] [--json FILE]

The figure is KL(model with keys and values as they are || the same model with them rounded), over held-out text and
over text of another kind (`--other`), in windows each of whose tokens sees the cache as if it had been generated. It
falls short of what a trained model of that context would show where `--model` was trained on less: then a copy of it
reads the longer windows by YaRN (Peng et al. 2023), which is no more than a change of its configuration; its perplexity
there is printed beside that within what it was trained for. How far keys, values and weights of attention resemble
those of a model made for the context is not known; every scheme is judged by the same.

Peers run on the same float32 model: llama.cpp's q4_0 (blocks of 32 columns, one float16 each: 4.5 bits), plain and with
keys and values turned by a Hadamard matrix; and KIVI and KVQuant as published (`attar.kv.published`), KIVI also in
groups of 64. attar's own kivi2 has other windows (`attar.kv.schemes`).

Bits are what a sequence of the context stores, 16-bit windows included: of attar's schemes all that is allocated; of
KIVI's keys what their window has on average, half of its most, which favours KIVI where bits are compared. Calibrated
matrices and levels belong to the model: the column `alone` counts them in one sequence that has no other beside it.
Ratios are of schemes that store no more than the peer. Intervals are 95 % bootstraps over windows, paired for a ratio.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressors import DATA
from lanes import contents
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hub, opening
from attar.execution import kv_cache as engine_kv
from attar.execution.kv_cache import MeasuredCache
from attar.kernels import dispatch, ops
from attar.kernels.operands import Norm
from attar.kv.bit_planes import hadamard
from attar.kv.pages import AttentionMetadata, PagedKV, Rotation
from attar.kv.published import PUBLISHED, PublishedFormat
from attar.kv.schemes import LENGTH, RANDOM, SCHEMES, WRITTEN, KvScheme, Layout
from attar.metrics.bootstrap import paired_bootstrap_ratio
from attar.metrics.divergence import Comparison, compare
from attar.metrics.measure import measure
from attar.metrics.perplexity import plan_windows
from attar.metrics.streaming import ROWS_AT_ONCE, Measurement, decoder_states
from attar.model.decoder import Decoder

Q4_0 = 32  # columns of a block
KIVIS = (
    PublishedFormat("KIVI-4 g64", "kivi", 4, 64),
    PublishedFormat("KIVI-2 g64", "kivi", 2, 64), PublishedFormat("KIVI-2 g64, last 64", "kivi", 2, 64, 64),
)  # fmt: skip
KLTS = (
    KvScheme("klt4, 4.75 stored", Layout.BIT_PLANES, 4.625, calibrated=True),
    KvScheme("klt4, 3.375 stored", Layout.BIT_PLANES, 3.25, calibrated=True),
    KvScheme("klt2, 3 stored", Layout.BIT_PLANES, 2.875, calibrated=True, recent=True),  # as KIVI in groups of 32
    KvScheme("klt2, 2.25 stored", Layout.BIT_PLANES, 2.125, calibrated=True, recent=True),
    KvScheme("klt2, 2 stored", Layout.BIT_PLANES, 1.875, calibrated=True, recent=True),
    KvScheme("klt2, 1.5 stored", Layout.BIT_PLANES, 1.375, calibrated=True, recent=True),
    KvScheme("klt2, 1.25 stored", Layout.BIT_PLANES, 1.125, calibrated=True, recent=True),
)  # 64 columns; with larger heads a scale takes less


@dataclass(frozen=True)
class Way:
    """One way to keep keys and values. Of pages of float32, `rounded` makes numbers [N, G, D] what they are read as."""

    name: str
    form: KvScheme | PublishedFormat
    rounded: Callable[[Tensor], Tensor] | None = None
    bits: float = 0.0  # of a number, where the form does not say

    def bits_at(self, cache: MeasuredCache, context: int) -> tuple[float, float]:
        """Bits of a number, and with what all sequences share, where one alone has it."""
        stored, config = self.bits or cache.bits(context), cache.decoder.config
        return stored, stored + 8 * cache.model_bytes / (2 * config.kv_heads * config.head_dim * context)


def q4_0(x: Tensor) -> Tensor:
    """As llama.cpp's quantize_row_q4_0 and back: of 32 neighbours, the one of greatest size becomes -8."""
    groups: Tensor = x.unflatten(-1, (-1, Q4_0))
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
    names = ("int8", "fp8", "klt4", "kivi4", "int4", "klt2", "kivi2", "nuq4", "nuq3")
    return [
        Way("q4_0", plain, rounded=q4_0, bits=4.5),
        Way("q4_0 rotated", plain, rounded=rotated, bits=4.5),
        *(Way(each.name, each) for each in KIVIS),
        *(Way(name, each) for name, each in PUBLISHED.items()),
        *(Way(name, SCHEMES[name]) for name in names),
        *(Way(each.name, each) for each in KLTS),
    ]


RATIOS = (
    ("klt4", "q4_0 rotated", 0.60), ("int4", "q4_0 rotated", 0.60), ("klt4", "KIVI-4 g64", 0.50),
    ("klt4", "kivi4-published", 0.50), ("klt4, 4.75 stored", "kivi4-published", 0.50), ("klt4", "nuq4-published", 0.50),
    ("klt2", "KIVI-2 g64", 0.50), ("klt2, 2.25 stored", "KIVI-2 g64", 0.50),
    ("klt2, 2.25 stored", "KIVI-2 g64, last 64", 0.50), ("klt2", "kivi2-published", 0.50),
    ("klt2, 3 stored", "kivi2-published", 0.50), ("klt2, 2.25 stored", "nuq2-published", 0.50),
)  # fmt: skip


@contextmanager
def keeping(way: Way) -> Iterator[None]:
    """Keys, once they are rotated, and values are rounded before they are written."""
    plain = ops.write_kv

    def write(
        q: Tensor, k: Tensor, v: Tensor, pages: PagedKV, place: AttentionMetadata, rotation: Rotation | None = None,
        q_norm: Norm | None = None, k_norm: Norm | None = None,
    ) -> Tensor:  # fmt: skip
        assert way.rounded is not None
        if q_norm is not None and k_norm is not None:
            q, k = ops.norm(q, None, q_norm)[1], ops.norm(k, None, k_norm)[1]
        if rotation is not None:
            angles = rotation.cos[rotation.rows.long()], rotation.sin[rotation.rows.long()]
            q, k = ops.rope(q, *angles), ops.rope(k, *angles)
        return plain(q.contiguous(), way.rounded(k).contiguous(), way.rounded(v).contiguous(), pages, place)

    if way.rounded is not None:
        ops.write_kv = write
    try:
        yield
    finally:
        ops.write_kv = plain


def stretched(source: Path, context: int, folder: Path) -> Path:
    """The model with YaRN to `context` positions, where it has fewer."""
    if source.suffix == ".gguf":
        return source
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
    ids = [i for part in contents(text) for i in tokenizer.encode(part, add_special_tokens=False)]
    room = len(ids) // length
    if room < count:
        raise SystemExit(f"{text} has {room} windows of {context} tokens, not {count}")
    return [ids[i * room // count * length :][:length] for i in range(count)], bos


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder, a GGUF file, a Hub id or `demo`")
    parser.add_argument("--activations", help="native kernels with such activations, instead of the reference")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--text", type=Path, default=DATA / "data" / "text" / "novels_valid.jsonl")
    parser.add_argument("--other", type=Path, default=DATA / "data" / "text" / "wikitext2_test.txt")
    parser.add_argument("--calibrate", type=Path, help="a text for KVQuant's calibration, instead of the model's own")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="compare every N-th row alone")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the first column")
    parser.add_argument("--json", type=Path, help="where the result goes; else it is the last line")
    args = parser.parse_args()
    source = hub.resolve(args.model)
    for option, text in (("--text", args.text), ("--other", args.other)):
        if not text.exists():
            raise SystemExit(f"there is no {text}: give {option}, a text file or JSON lines")
    with tempfile.TemporaryDirectory() as folder:
        found = run(source, stretched(source, args.context, Path(folder)), args)
    args.json.write_text(json.dumps(found) + "\n") if args.json else print(json.dumps(found))


def run(source: Path, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    decoder = opening.load(path, torch.float32)
    chosen = [way for way in ways() if not args.only or way.name in args.only]
    caches = calibrated(decoder, chosen, source, args)
    if args.activations is not None:
        decoder = opening.load(path, torch.float32, None, dispatch.store(args.activations))
        for cache in caches.values():
            cache.decoder = decoder
    texts = {}
    for name, text in (("held out", args.text), ("another kind", args.other)):
        ids, bos = windows(source, text, args.context, args.windows)
        print(f"\n{name}")
        if path != source:
            within = opening.load(source, torch.float32)
            short = measure(within, ids[:2], bos=bos, context=within.config.context).figures["ppl"].value
            print(f"perplexity in windows of {within.config.context}, which the model was trained for: {short:.1f}")
        measured, seconds = compared(decoder, chosen, caches, ids, bos, args)
        texts[name] = told(chosen, caches, measured, seconds, args.context)
    return {"model": args.model, "context": args.context, "windows": args.windows, "texts": texts}


def calibrated(decoder: Decoder, chosen: list[Way], source: Path, args: argparse.Namespace) -> dict[str, MeasuredCache]:
    """Factories of the caches of each way; all are calibrated on the same text, unless KVQuant has one of its own."""

    @functools.cache
    def likely() -> Tensor:
        return engine_kv.sample(decoder)

    @functools.cache
    def given() -> Tensor:
        sequences, length = WRITTEN + RANDOM, LENGTH
        return torch.tensor(windows(source, args.calibrate, length, sequences)[0])

    found = {}
    for way in chosen:
        own = args.calibrate is not None and isinstance(way.form, PublishedFormat)
        found[way.name] = engine_kv.calibrated(decoder, way.form, given if own else likely)
        print(f"calibrated {way.name}", flush=True)
    return found


def told(
    chosen: list[Way],
    caches: dict[str, MeasuredCache],
    measured: dict[str, Measurement],
    seconds: dict[str, float],
    context: int,
) -> dict[str, Any]:
    """Print the table and the ratios of one text."""
    print(f"{'':<28}{'bits':>8}{'alone':>8}{'KL':>10}{'95 % interval':>22}{'top-1':>8}{'ppl':>8}{'seconds':>9}")
    rows: dict[str, dict[str, Any]] = {}
    for way in chosen:
        found, (bits, alone) = measured[way.name].figures(), way.bits_at(caches[way.name], context)
        kl, top, perplexity, base = (found[name] for name in ("kl_mean", "top1", "ppl", "ppl_base"))
        rows[way.name] = {"bits": bits, "bits_alone": alone, "kl": [kl.value, kl.low, kl.high], "top1": top.value,
                          "ppl": perplexity.value, "ppl_base": base.value,
                          "windows": measured[way.name].kl_windows.tolist()}  # fmt: skip
        interval = "" if kl.low is None or kl.high is None else f"[{kl.low:.6f}, {kl.high:.6f}]"
        print(
            f"{way.name:<28}{bits:>8.3f}{alone:>8.3f}{kl.value:>10.6f}{interval:>22}{top.value:>8.4f}"
            f"{perplexity.value:>8.1f}{seconds[way.name]:>9.1f}",
        )
    print(f"{'as they are':<28}{32:>8}{'':>40}{rows[chosen[0].name]['ppl_base']:>8.1f}")
    ratios = {}
    for ours, theirs, goal in RATIOS:
        if ours in measured and theirs in measured:
            if rows[ours]["bits"] > rows[theirs]["bits"]:
                print(f"{ours} stores more than {theirs}: no ratio")
                continue
            ratio = paired_bootstrap_ratio(measured[ours].kl_windows, measured[theirs].kl_windows)
            ratios[f"{ours} / {theirs}"] = [ratio.value, ratio.low, ratio.high, goal]
            print(f"{ours} over {theirs}: {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], goal {goal:.2f}")
    return {"rows": rows, "ratios": ratios}


def compared(
    decoder: Decoder,
    chosen: list[Way],
    caches: dict[str, MeasuredCache],
    ids: list[list[int]],
    bos: int | None,
    args: argparse.Namespace,
) -> tuple[dict[str, Measurement], dict[str, float]]:
    """Each way's divergence, and its seconds of the processor. Hidden states are kept, and logits made a few rows at
    a time: those of the model itself once for all."""
    columns: dict[str, list[Comparison]] = {way.name: [] for way in chosen}
    seconds = dict.fromkeys(columns, 0.0)
    for number, text in enumerate(ids, 1):
        (window,) = plan_windows(text, args.context, args.context, bos)
        inputs, targets = torch.tensor(window.inputs), torch.tensor(window.counted)[:: args.every]
        base = decoder_states(decoder, decoder.cache)(inputs)[window.first :: args.every]
        for way in chosen:
            begin = time.process_time()
            with keeping(way):
                ours = decoder_states(decoder, caches[way.name])(inputs)[window.first :: args.every]
            seconds[way.name] += time.process_time() - begin
            runs = zip(*(each.split(ROWS_AT_ONCE) for each in (base, ours, targets)), strict=True)
            for one, other, wanted in runs:
                with torch.inference_mode():
                    columns[way.name].append(compare(decoder.logits(one), decoder.logits(other), wanted))
            done = torch.cat([part.kl for part in columns[way.name]]).mean()
            print(f"window {number} of {len(ids)}: {way.name} {done:.6f}", flush=True)
    measured = {}
    for name, parts in columns.items():
        size = sum(len(part[0]) for part in parts) // len(ids)
        of = np.arange(len(ids)).repeat(size)
        measured[name] = Measurement(of, *(torch.cat(each).double().numpy() for each in zip(*parts, strict=True)))
    return measured, seconds


if __name__ == "__main__":
    main()
