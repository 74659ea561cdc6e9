"""What keeping keys and values in few bits costs over a long context, beside how llama.cpp and KIVI keep them.

    python bench/kv.py [--model demo] [--context 4096] [--windows 12] [--only NAME ...] [--json FILE]

The figure is KL(model with keys and values as they are || the same model with them rounded), over held-out text and
over text of another kind (`--other`), in windows each of whose tokens sees the cache as if it had been generated. It
falls short of what a trained model of that context would show where `--model` was trained on less: then a copy of it
reads the longer windows by YaRN (Peng et al. 2023), which is no more than a change of its configuration; its perplexity
there is printed beside that within what it was trained for. How far keys, values and weights of attention resemble
those of a model made for the context is not known; every scheme is judged by the same.

Peers are built here by their published formulas, on the same float32 model: llama.cpp's q4_0 (blocks of 32 columns, one
float16 each: 4.5 bits), plain and with keys and values turned by a Hadamard matrix; and KIVI in 2 bits (`Kivi`), in
groups of 32 and 64, with its windows of 16 bits as published. attar's own kivi2 has others (`attar.kv.schemes`).

Bits are what a sequence of the context stores, 16-bit windows included: of attar's schemes all that is allocated; of
KIVI's keys what their window has on average, half of its most, which favours KIVI where bits are compared. Calibrated
bases belong to the model, not to a sequence, and are not counted. Ratios are of schemes that store no more than the
peer. Intervals are 95 % bootstraps over windows, paired where they are of a ratio.
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
from lanes import contents
from torch import Tensor

from attar.checkpoints import vocabulary
from attar.checkpoints.sources import hf, hub
from attar.execution import kv_cache as engine_kv
from attar.kernels import ops, ref_attention
from attar.kernels.operands import AttentionForm, Norm
from attar.kv import kivi
from attar.kv.bit_planes import hadamard
from attar.kv.pages import AttentionMetadata, Bases, PagedKV, Rotation
from attar.kv.schemes import SCHEMES, KvScheme, Layout
from attar.metrics.bootstrap import paired_bootstrap_ratio
from attar.metrics.divergence import Comparison, compare
from attar.metrics.measure import measure
from attar.metrics.perplexity import plan_windows
from attar.metrics.streaming import Measurement, decoder_logits
from attar.model import kv_basis
from attar.model.cache import BLOCK, KVCache
from attar.model.decoder import Decoder

Q4_0 = 32  # columns of a block
TILE = 128  # queries that are computed at once
KLT_LESS = KvScheme("klt2, 2.25 stored", Layout.BIT_PLANES, 2.125, calibrated=True, recent=True)
KLT_MORE = KvScheme("klt2, 3 stored", Layout.BIT_PLANES, 2.875, calibrated=True, recent=True)  # as KIVI in groups of 32


@dataclass(frozen=True)
class Kivi:
    """KIVI as published (Liu et al. 2024, and their program): the last `recent` values are always in 16 bits, a window
    that slides; keys gather in 16 bits until there are `recent` of them, which are then rounded together.

    The cache is simulated: its pages hold float32, and each query reads what its step would have found. That step's own
    key and value are counted before any is rounded, so a query sees `recent` values before its own in 16 bits.
    """

    group: int
    recent: int = 128

    def bits_at(self, head_dim: int, context: int) -> float:
        rounded = KvScheme("KIVI", Layout.KIVI, 2, group=self.group).bits_per_value(head_dim, self.recent)
        whole = (self.recent / 2 + self.recent) / 2  # tokens in 16 bits: keys on average, values; mean of the sides
        return rounded + (16 - rounded) * min(1, whole / context)

    def attend(
        self, q: Tensor, pages: PagedKV, place: AttentionMetadata, form: AttentionForm, want_mass: bool = False
    ) -> tuple[Tensor, None]:
        """As `ops.paged_attention`, of one sequence."""
        assert len(place.lengths) == 1
        assert not want_mass
        length, repeat = int(place.lengths[0]), form.heads // form.kv_heads
        k, v = ref_attention.read_sequence(pages, place.block_tables[0], length, None, torch.float32)
        k, v = (x.half().float().transpose(0, 1) for x in (k, v))  # [G, S, D]
        full = length // self.recent * self.recent
        rounded_k = torch.cat((self._rounded(k[:, :full], 2), k[:, full:]), 1)
        k, rounded_k, v, rounded_v = (
            x.repeat_interleave(repeat, 0) for x in (k, rounded_k, v, self._rounded(v, 3))
        )  # [H, S, D]
        key_at, mixed = torch.arange(length), []
        for rows, at in zip(q.split(TILE), place.positions.split(TILE), strict=True):
            one, since = rows.transpose(0, 1), max(0, int(at[0]) // self.recent - 1) * self.recent
            new = slice(since, None)  # all that any of these reads in 16 bits
            scores = one @ rounded_k.mT  # [H, T, S]
            old = key_at[new] < at[:, None] // self.recent * self.recent
            scores[..., new] = torch.where(old, scores[..., new], one @ k[:, new].mT)
            scores *= form.scale
            if form.soft_cap is not None:
                scores = form.soft_cap * torch.tanh(scores / form.soft_cap)
            seen = ref_attention.visible(at, key_at, form.window)
            weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
            old = key_at[new] < at[:, None] - self.recent
            found = weights[..., new].masked_fill(old, 0) @ v[:, new]
            weights[..., new].masked_fill_(~old, 0)
            found += weights @ rounded_v
            mixed.append(found.transpose(0, 1).flatten(1))
        return torch.cat(mixed), None

    def _rounded(self, x: Tensor, along: int) -> Tensor:
        """[G, S, D] as it is read once it is rounded: keys along axis 2 of [1, G, S, D], values along axis 3."""
        return kivi.dequantize(*kivi.quantize(x[None], along, self.group), along)[0] if x.numel() else x


@dataclass(frozen=True)
class Way:
    """One way to keep keys and values. Of pages of float32, `rounded` makes numbers [N, G, D] what they are read as, or
    `kivi` reads them."""

    name: str
    scheme: KvScheme
    block: int = BLOCK
    rounded: Callable[[Tensor], Tensor] | None = None
    bits: float = 0.0  # of a number, where the scheme does not say
    kivi: Kivi | None = None

    def bits_at(self, head_dim: int, context: int) -> float:
        if self.kivi is not None:
            return self.kivi.bits_at(head_dim, context)
        return self.bits or self.scheme.bits_per_value(head_dim, self.block, context)


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
    names = ("int8", "fp8", "klt4", "int4", "klt2", "kivi2", "nuq4", "nuq3")
    return [
        Way("q4_0", plain, rounded=q4_0, bits=4.5),
        Way("q4_0 rotated", plain, rounded=rotated, bits=4.5),
        Way("KIVI g64", plain, kivi=Kivi(64)),
        Way("KIVI g64, last 64", plain, kivi=Kivi(64, 64)),
        Way("KIVI g32", plain, kivi=Kivi(32)),
        *(Way(name, SCHEMES[name]) for name in names),
        *(Way(each.name, each) for each in (KLT_LESS, KLT_MORE)),
    ]


RATIOS = (
    ("klt4", "q4_0 rotated", 0.60), ("int4", "q4_0 rotated", 0.60),
    ("klt2", "KIVI g64", 0.50), ("klt2, 2.25 stored", "KIVI g64", 0.50),
    ("klt2, 2.25 stored", "KIVI g64, last 64", 0.50), ("klt2", "KIVI g32", 0.50), ("klt2, 3 stored", "KIVI g32", 0.50),
)  # fmt: skip


@contextmanager
def keeping(way: Way) -> Iterator[None]:
    """Keys, once they are rotated, and values are rounded before they are written, or read as KIVI would."""
    plain, attention = ops.write_kv, ops.paged_attention

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
    if way.kivi is not None:
        ops.paged_attention = way.kivi.attend
    try:
        yield
    finally:
        ops.write_kv, ops.paged_attention = plain, attention


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
    ids = [i for part in contents(text) for i in tokenizer.encode(part, add_special_tokens=False)]
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
    parser.add_argument("--other", type=Path, default=DATA / "data" / "text" / "wikitext2_test.txt")
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
    decoder = hf.load(path, torch.float32)
    chosen = [way for way in ways() if not args.only or way.name in args.only]
    calibrated = {way.scheme.name: way.scheme for way in chosen if way.scheme.calibrated}
    likely = engine_kv.sample(decoder) if calibrated else torch.zeros((0, 0))
    bases = {name: kv_basis.calibrate(decoder, likely, scheme) for name, scheme in calibrated.items()}
    texts = {}
    for name, text in (("held out", args.text), ("another kind", args.other)):
        ids, bos = windows(source, text, args.context, args.windows)
        print(f"\n{name}")
        if path != source:
            within = hf.load(source, torch.float32)
            short = measure(within, ids[:2], bos=bos, context=within.config.context).figures["ppl"].value
            print(f"perplexity in windows of {within.config.context}, which the model was trained for: {short:.1f}")
        measured, seconds = compared(decoder, chosen, bases, ids, bos, args.context)
        texts[name] = told(decoder, chosen, measured, seconds, args.context)
    return {"model": args.model, "context": args.context, "windows": args.windows, "texts": texts}


def told(
    decoder: Decoder, chosen: list[Way], measured: dict[str, Measurement], seconds: dict[str, float], context: int
) -> dict[str, Any]:
    """Print the table and the ratios of one text."""
    print(f"{'':<28}{'bits':>8}{'KL':>10}{'95 % interval':>22}{'top-1':>8}{'ppl':>8}{'seconds':>9}")
    rows: dict[str, dict[str, Any]] = {}
    for way in chosen:
        found, bits = measured[way.name].figures(), way.bits_at(decoder.config.head_dim, context)
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
    bases: dict[str, list[Bases]],
    ids: list[list[int]],
    bos: int | None,
    context: int,
) -> tuple[dict[str, Measurement], dict[str, float]]:
    """Each way's divergence, and its seconds: window by window, the model's own logits made once for all."""
    columns: dict[str, list[Comparison]] = {way.name: [] for way in chosen}
    seconds = dict.fromkeys(columns, 0.0)
    for number, text in enumerate(ids, 1):
        (window,) = plan_windows(text, context, context, bos)
        inputs, targets = torch.tensor(window.inputs), torch.tensor(window.counted)
        base = torch.cat(list(decoder_logits(decoder)(inputs, window.first)))
        for way in chosen:
            begin = time.perf_counter()
            logits = decoder_logits(decoder, partial(_cache, decoder, way, bases.get(way.scheme.name)))
            with keeping(way):
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
