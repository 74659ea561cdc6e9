"""Attention over a paged KV cache: prefill beside the multiply-add peak and torch, decode beside the read bandwidth.

    python bench/attention.py [--threads 2] [--rounds 7]

Both limits are loops compiled here and run in the same rounds, alternating with what they are compared with; figures
are medians, and a fraction is the median of the rounds' own fractions. The peak is a loop on registers alone. The
bandwidth is that of reading the very pages of the cache, in order. `torch` is its attention on contiguous keys
and values of the same numbers. Causal prefill counts the multiply-adds of the lower triangle.

The last table is about caches of fewer bits: decode over a long cache, and the writing of a prompt, each beside int8's
in the same rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attar import machine
from attar.kernels import dispatch
from attar.kernels.native import attention, extension
from attar.kernels.operands import AttentionForm
from attar.kv.bit_planes import Basis
from attar.kv.kvquant import Channels
from attar.kv.pages import AttentionMetadata, Bases, PagedKV
from attar.kv.schemes import BUCKET, UNIT, KvScheme, Layout, divide, scheme

SHAPES = {"llama-3.2-1b": (32, 8, 64), "qwen2.5-0.5b": (14, 2, 64), "llama-3.1-8b": (32, 8, 128)}
BLOCK = 64
NARROW = ("int8", "int4", "klt4", "klt2", "kivi4", "kivi2", "nuq4", "nuq3")

LIMITS = r"""
#include <cstdint>
#if defined(__AVX512F__)
constexpr int BYTES = 64;
#else
constexpr int BYTES = 32;
#endif
typedef float Floats __attribute__((vector_size(BYTES)));
typedef int64_t Words __attribute__((vector_size(BYTES), aligned(8)));
extern "C" double multiply_adds(int64_t rounds) {
#pragma omp parallel
  {
    Floats acc[12];
    for (auto& each : acc) each = Floats{} + 1.0f;
    Floats a = Floats{} + 0.999f, b = Floats{} + 0.001f;
    for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) acc[j] = acc[j] * a + b;
      asm volatile("" : "+v"(a), "+v"(b));
    }
    for (auto& each : acc) asm volatile("" : : "v"(each));
  }
  return 2.0 * 12 * (BYTES / 4) * rounds;
}
extern "C" void read_all(const char* from, int64_t bytes) {
  const int64_t chunk = 1 << 16, chunks = bytes / chunk;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < chunks; ++i) {
    Words acc[8] = {};
    for (const char* p = from + i * chunk; p < from + (i + 1) * chunk; p += 8 * BYTES)
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) acc[j] ^= *reinterpret_cast<const Words*>(p + j * BYTES);
    for (auto& each : acc) asm volatile("" : : "v"(each));
  }
}
"""


def limits() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "limits.cpp", Path(folder) / "limits.so"
        source.write_text(LIMITS)
        command = ["c++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.multiply_adds.restype = ctypes.c_double
    loaded.multiply_adds.argtypes = [ctypes.c_int64]
    loaded.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return loaded


def seconds(work: Callable[[], object], at_least: float = 0.05) -> float:
    """Of one call, over as many as take `at_least`."""
    calls, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < at_least:
        work()
        calls += 1
    return passed / calls


def filled(
    kv_heads: int, size: int, lengths: list[int], dtype: torch.dtype, rows: int
) -> tuple[PagedKV, AttentionMetadata]:
    """Pages of random numbers, the blocks of each sequence scattered, and a call of `rows` last rows each."""
    width = max(-(-length // BLOCK) for length in lengths)
    blocks = width * len(lengths)
    pages = dispatch.pages(blocks, BLOCK, kv_heads, size, scheme(str(dtype).removeprefix("torch.")))
    for part in (pages.keys, pages.values):
        part.random_(-127, 128) if dtype == torch.int8 else part.normal_()
    if pages.key_scales is not None and pages.value_scales is not None:
        pages.key_scales.fill_(0.02)
        pages.value_scales.fill_(0.02)
    tables = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).view(len(lengths), width)
    return pages, AttentionMetadata(
        row_starts=torch.arange(len(lengths) + 1, dtype=torch.int32) * rows,
        lengths=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables.int(),
        positions=torch.cat([torch.arange(length - rows, length) for length in lengths]).int(),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
    )


def contiguous(kv_heads: int, size: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, 1, kv_heads, length, size).to(dtype).unbind()
    return keys, values


def prefill(name: str, length: int, dtype: torch.dtype, lib: ctypes.CDLL, rounds: int) -> dict[str, object]:
    heads, kv_heads, size = SHAPES[name]
    form = AttentionForm(heads, kv_heads, size, size**-0.5)
    pages, place = filled(kv_heads, size, [length], dtype, length)
    q, out = torch.randn(length, heads, size), torch.empty(length, heads * size)
    k, v = contiguous(kv_heads, size, length, torch.float32)
    operations = 2.0 * 2 * heads * size * length * (length + 1) / 2
    threads, found = torch.get_num_threads(), []
    for _ in range(rounds):
        ours = operations / seconds(lambda: attention.paged_attention(q, pages, place, form, out=out))
        theirs = operations / seconds(
            lambda: F.scaled_dot_product_attention(q[None].transpose(1, 2), k, v, is_causal=True, enable_gqa=True)
        )
        begin = time.perf_counter()
        peak = lib.multiply_adds(3_000_000) * threads / (time.perf_counter() - begin)
        found.append((ours, theirs, peak))
    ours, theirs, peak = (statistics.median(column) for column in zip(*found, strict=True))
    fraction = statistics.median(a / c for a, _, c in found)
    kind = str(dtype).removeprefix("torch.")
    print(
        f"{name:<14}{length:>7}{kind:>10}{ours / 1e9:>12.0f}{theirs / 1e9:>12.0f}{peak / 1e9:>12.0f}{fraction:>10.0%}"
    )
    return {"shape": name, "length": length, "kv": kind, "gflops": ours / 1e9, "torch_gflops": theirs / 1e9,
            "peak_gflops": peak / 1e9, "fraction": fraction}  # fmt: skip


def decode(name: str, length: int, batch: int, dtype: torch.dtype, lib: ctypes.CDLL, rounds: int) -> dict[str, object]:
    heads, kv_heads, size = SHAPES[name]
    form = AttentionForm(heads, kv_heads, size, size**-0.5)
    layers = max(1, 500_000_000 // (2 * length * batch * kv_heads * size * dtype.itemsize))  # beyond the caches
    made = [filled(kv_heads, size, [length] * batch, dtype, 1) for _ in range(min(layers, 64))]
    q, out = torch.randn(batch, heads, size), torch.empty(batch, heads * size)
    kv = sum(pages.nbytes for pages, _ in made)

    def ours() -> None:
        for pages, place in made:
            attention.paged_attention(q, pages, place, form, out=out)

    def read() -> None:
        for pages, _ in made:
            for part in (pages.keys, pages.values):
                lib.read_all(part.data_ptr(), part.nbytes)

    k, v = contiguous(kv_heads, size, length, torch.float32)

    def theirs() -> None:
        for _ in made[: max(1, len(made) // 4)]:
            F.scaled_dot_product_attention(q[:1, :, None], k, v, enable_gqa=True)

    found = []
    for _ in range(rounds):
        found.append((kv / seconds(ours), sum(p.keys.nbytes * 2 for p, _ in made) / seconds(read)))
    rate, limit = (statistics.median(column) for column in zip(*found, strict=True))
    fraction = statistics.median(a / b for a, b in found)
    sdpa = seconds(theirs) / max(1, len(made) // 4) * batch
    kind = str(dtype).removeprefix("torch.")
    each = kv / len(made) / rate
    print(
        f"{name:<14}{length:>7}{batch:>4}{kind:>10}{rate / 1e9:>10.1f}{limit / 1e9:>10.1f}{fraction:>10.0%}"
        f"{each * 1e6:>12.0f}{sdpa * 1e6:>12.0f}"
    )
    return {"shape": name, "length": length, "batch": batch, "kv": kind, "read_gb_s": rate / 1e9,
            "limit_gb_s": limit / 1e9, "fraction": fraction, "us": each * 1e6, "torch_us": sdpa * 1e6}  # fmt: skip


def basis(kind: KvScheme, kv_heads: int, size: int) -> Basis:
    """Axes at random, with bits as uneven as a trained model's: variances a thousandfold apart."""
    axes = torch.linalg.qr(torch.randn(kv_heads, size, size))[0]
    variances = torch.logspace(0, -3, size)
    bits = divide(variances.view(-1, BUCKET).mean(1).tolist(), kind.units(size))
    factor = variances.sqrt() / UNIT
    back = (factor[:, None] * axes.transpose(1, 2)).contiguous()
    weights = factor.square().expand(kv_heads, -1).contiguous()
    return Basis((axes / factor).contiguous(), back, torch.zeros(kv_heads, size), weights, (tuple(bits),) * kv_heads)


def channels(kind: KvScheme, kv_heads: int, size: int, scaled: bool) -> Channels:
    """Those of coordinates that are normal already."""
    ends = torch.linspace(0, 1, (1 << round(kind.bits)) + 2)[1:-1]
    return Channels(torch.zeros(kv_heads, size), torch.ones(kv_heads, size), torch.special.ndtri(ends), scaled)


def bases_of(kind: KvScheme, kv_heads: int, size: int) -> Bases | None:
    """For schemes that are calibrated; None for others."""
    if kind.layout == Layout.KVQUANT:
        return Bases(channels(kind, kv_heads, size, False), channels(kind, kv_heads, size, True))
    return Bases(basis(kind, kv_heads, size), basis(kind, kv_heads, size)) if kind.calibrated else None


def narrow(name: str, length: int, prompt: int, rounds: int) -> list[dict[str, object]]:
    """Decode over `length` tokens, and a prompt's writing, of each scheme in turn."""
    heads, kv_heads, size = SHAPES[name]
    form = AttentionForm(heads, kv_heads, size, size**-0.5)
    width = -(-length // BLOCK)
    q, out = torch.randn(1, heads, size), torch.empty(1, heads * size)
    rows = torch.randn(prompt, heads + 2 * kv_heads, size).split((heads, kv_heads, kv_heads), 1)
    turned = torch.empty(prompt, heads, size)
    decodes: dict[str, Callable[[], object]] = {}
    writes: dict[str, Callable[[], object]] = {}
    takes = {}
    for each in NARROW:
        kind = scheme(each)
        bases = bases_of(kind, kv_heads, size)
        takes[each] = kind.bits_per_value(size, BLOCK, length)
        layers = max(1, 300_000_000 // (width * kind.bytes(kv_heads, size, BLOCK)))  # beyond the caches
        made = [dispatch.pages(width, BLOCK, kv_heads, size, kind, tails=1, bases=bases) for _ in range(layers)]
        for pages in made:
            for part in pages.parts():
                if part.is_floating_point():
                    part.fill_(0.02)
                else:
                    part.random_(-127, 128) if each == "int8" else part.random_(0, 256)
            for scales in (pages.key_scales, pages.value_scales):
                if scales is not None and scales.dtype == torch.uint8:
                    scales.fill_(0x4A)  # 0.02, as a byte has it
            for part_name, part in pages.more.items():
                if part_name.endswith("columns"):
                    part.random_(0, size)
        table = torch.randperm(width, generator=torch.Generator().manual_seed(0)).int()[None]
        tails = torch.zeros(1, dtype=torch.int64) if kind.recent else None
        place = AttentionMetadata(
            torch.tensor([0, 1]).int(), torch.tensor([length]).int(), table, torch.tensor([length - 1]).int(),
            torch.zeros(0, dtype=torch.int64), tails=tails,
        )  # fmt: skip

        def decode(made: list[PagedKV] = made, place: AttentionMetadata = place) -> None:
            for pages in made:
                attention.paged_attention(q, pages, place, form, out=out)

        def write(pages: PagedKV = made[0], table: Tensor = table, tails: Tensor | None = tails) -> None:
            step = BLOCK if tails is not None else prompt
            for first in range(0, prompt, step):
                at = torch.arange(first, first + step)
                slots = table[0, at // BLOCK].long() * BLOCK + at % BLOCK
                where = AttentionMetadata(
                    torch.tensor([0, step]).int(), torch.tensor([first + step]).int(), table, at.int(), slots,
                    tails=tails,
                )  # fmt: skip
                wanted, keys, values = (part[first : first + step] for part in rows)
                attention.write_kv(wanted, keys, values, pages, where, out=turned[first : first + step])

        decodes[each], writes[each] = decode, write
        decode()
        write()
    found: dict[str, list[tuple[float, float]]] = {each: [] for each in NARROW}
    layers_of = {each: max(1, 300_000_000 // (width * scheme(each).bytes(kv_heads, size, BLOCK))) for each in NARROW}
    for _ in range(rounds):
        for each in NARROW:
            found[each].append((seconds(decodes[each]) / layers_of[each], seconds(writes[each])))
    results: list[dict[str, object]] = []
    for each in NARROW:
        decoding, writing = (statistics.median(column) for column in zip(*found[each], strict=True))
        ratios = [
            statistics.median(a[i] / b[i] for a, b in zip(found[each], found["int8"], strict=True)) for i in (0, 1)
        ]
        print(
            f"{name:<14}{length:>7}{each:>10}{takes[each]:>10.3f}{decoding * 1e6:>12.0f}{ratios[0]:>10.2f}"
            f"{writing * 1e6:>12.0f}{ratios[1]:>10.2f}"
        )
        results.append({"shape": name, "length": length, "kv": each, "bits": takes[each], "decode_us": decoding * 1e6,
                        "decode_ratio": ratios[0], "write_us": writing * 1e6, "write_ratio": ratios[1]})  # fmt: skip
    return results


def memory(length: int) -> int:
    """Bytes by which a prefill of `length` raises the process's peak, above its inputs and its output."""
    form = AttentionForm(32, 8, 64, 0.125)
    pages, place = filled(8, 64, [length], torch.int8, length)
    q, out = torch.zeros(length, 32, 64), torch.zeros(length, 32 * 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    attention.paged_attention(q, pages, place, form, out=out)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def narrows(rounds: int) -> list[dict[str, object]]:
    print(
        f"\n{'few bits':<14}{'keys':>7}{'kv':>10}{'bits':>10}{'decode us':>12}{'to int8':>10}{'512 rows us':>12}"
        f"{'to int8':>10}"
    )
    return [row for name in ("llama-3.2-1b", "llama-3.1-8b") for row in narrow(name, 8192, 512, rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only-narrow", action="store_true", help="the last table alone")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.only_narrow:
        print(json.dumps({"threads": args.threads, "level": extension.cpu_level(), "narrow": narrows(args.rounds)}))
        return
    lib, results = limits(), []
    lib.multiply_adds(1)
    grown = memory(8192)
    print(f"threads {args.threads}, level {extension.cpu_level()}; prefill of 8192 took {grown / 1e6:.1f} MB\n")
    print(f"{'prefill':<14}{'keys':>7}{'kv':>10}{'GFLOP/s':>12}{'torch':>12}{'peak':>12}{'of peak':>10}")
    for name in ("llama-3.2-1b", "qwen2.5-0.5b"):
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            results.append(prefill(name, 2048, dtype, lib, args.rounds))
    print(
        f"\n{'decode':<14}{'keys':>7}{'B':>4}{'kv':>10}{'GB/s':>10}{'limit':>10}{'of limit':>10}"
        f"{'us':>12}{'torch us':>12}"
    )
    for name, batch in (("llama-3.2-1b", 1), ("qwen2.5-0.5b", 1), ("llama-3.1-8b", 1), ("llama-3.2-1b", 8)):
        for dtype in (torch.int8, torch.bfloat16, torch.float32):
            results.append(decode(name, 8192, batch, dtype, lib, args.rounds))
    found = {"threads": args.threads, "level": extension.cpu_level(), "grown": grown, "runs": results}
    print(json.dumps({**found, "narrow": narrows(args.rounds)}))


if __name__ == "__main__":
    main()
