"""The products of a decoder's layer, natively: beside `ref`, torch's own kernels and the machine's limits.

    python bench/kernels.py [--shapes NAME ...] [--schemes NAME ...] [--rows N ...] [--threads 2] [--rounds 7]

Each product is repeated over as many copies of its weight as take --cold megabytes, so that few rows read memory and
not a cache; `ref`, which keeps a dense float32 weight, has one copy. `torch` is what torch has for the same numbers:
its int4 product (bfloat16 rows; groups of 128), its int8 product of rows that are int8 already, without their rounding
or any scale, and its bfloat16 product. Figures are medians over rounds in which the three take turns. Run it on a
machine that does nothing else.

`read` is the weight's bytes over the time as a fraction of the read bandwidth, `peak` the multiplications and additions
as a fraction of the int8 peak (AMX tiles where there are); both limits are measured here, on the same threads, before
each product. What is bound by memory should be near 1 in the first, what is bound by arithmetic in the second.

The crossover is the number of rows from which integer products unpack weights to a buffer first (`many_rows`): both
paths, which give the same bits, are timed at each number of rows, and the first from which the second stays ahead is
named, beside the one in use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from attar.formats.packed import PackedTensor
from attar.formats.scheme import Scheme
from attar.kernels import ref
from attar.kernels.native import extension, limits
from attar.kernels.native import linear as native
from attar.kernels.native.extension import library
from attar.kernels.operands import Linear
from attar.machine import cores
from attar.model.shapes import shape

SHAPES = ("llama-3.2-1b", "qwen2.5-0.5b")
SCHEMES = ("w4g128", "w8a8", "bf16")
ROWS = (1, 2, 4, 8, 16, 64, 512)
CROSSOVER_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
COLD_ROWS = 16  # up to which torch's weights are copied too
NEVER = 1 << 40
AT_LEAST = 0.02  # seconds of one measurement

Call = Callable[[], object]


@dataclass
class Run:
    shape: str
    product: str
    scheme: str
    rows: int
    us: float
    ref_us: float
    torch_us: float | None
    read_gb_s: float
    read_fraction: float
    gops: float
    peak_fraction: float | None  # of the int8 peak; bfloat16 is multiplied in float32


def products(name: str) -> dict[str, list[tuple[int, int]]]:
    """[outputs, inputs] of the linears of one layer that are multiplied in one call."""
    config = shape(name)
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, wide = config.hidden, config.intermediate
    return {
        "qkv": [(query, hidden), (key, hidden), (key, hidden)],
        "o": [(hidden, query)],
        "gate-up": [(wide, hidden)] * 2,
        "down": [(hidden, wide)],
    }


def random_weight(scheme: str, outputs: int, inputs: int) -> Tensor | PackedTensor:
    """Speed does not depend on the values: codes are random words."""
    if scheme == "bf16":
        return torch.randn(outputs, inputs, dtype=torch.bfloat16)
    read = Scheme.parse(scheme).with_scale_dtype("float16")
    parts = {}
    for name, part in read.parts((outputs, inputs)).items():
        dtype = getattr(torch, part.dtype)
        if dtype.is_floating_point:
            parts[name] = torch.full(part.shape, 0.01, dtype=dtype)
        elif name == "shape":
            parts[name] = torch.tensor((outputs, inputs))
        elif name in ("factor", "offset"):  # of two levels: any such, but that all is int8
            parts[name] = torch.full(part.shape, 16 if name == "factor" else 120, dtype=dtype)
        else:
            low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
            parts[name] = torch.randint(low, high, part.shape, dtype=dtype)
    return PackedTensor(read, (outputs, inputs), parts)


def linears(scheme: str, sizes: Sequence[tuple[int, int]]) -> list[Linear]:
    return [Linear(f"{outputs}x{inputs}", random_weight(scheme, outputs, inputs)) for outputs, inputs in sizes]


def peer(scheme: str, sizes: Sequence[tuple[int, int]], x: Tensor) -> Call | None:
    """Torch's product of the same shape, of weights of its own; None where it has none."""
    outputs, inputs = sum(size[0] for size in sizes), sizes[0][1]
    if scheme == "bf16":
        weight, rows = torch.randn(outputs, inputs, dtype=torch.bfloat16), x.bfloat16()
        return lambda: rows @ weight.T
    if scheme == "w8a8":
        codes, whole = (torch.zeros(shape, dtype=torch.int8) for shape in ((inputs, outputs), x.shape))
        return lambda: torch._int_mm(whole, codes)
    if scheme == "w4g128":
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        scales, rows = torch.ones(inputs // 128, outputs, 2, dtype=torch.bfloat16), x.bfloat16()
        return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, 128, scales)
    return None


def seconds(calls: Sequence[Call], at_least: float = AT_LEAST) -> float:
    """Of one call, going through all of them in turn until `at_least` has passed."""
    made, begin = 0, time.perf_counter()
    while (passed := time.perf_counter() - begin) < at_least:
        calls[made % len(calls)]()
        made += 1
    return passed / made


def medians(competitors: Sequence[Sequence[Call] | None], rounds: int) -> list[float | None]:
    for calls in competitors:
        for call in calls or ():
            call()
    times = [[None if calls is None else seconds(calls) for calls in competitors] for _ in range(rounds)]
    return [None if None in column else statistics.median(column) for column in zip(*times, strict=True)]


def prepared(scheme: str, sizes: Sequence[tuple[int, int]], cold: int) -> Iterator[list[Linear]]:
    """As many copies as take `cold` bytes, all in one memory."""
    source, arena, taken = linears(scheme, sizes), library.Arena(), 0
    while taken < cold:
        copy = [Linear(each.name, each.weight) for each in source]
        for each in copy:
            native.prepare(each, arena)
            assert isinstance(each.weight, native.PackedWeight)
            taken += each.weight.read_bytes
        yield copy


@dataclass
class Case:
    """A product and its weights: `copies` for the kernels, `dense` for the reference."""

    shape: str
    product: str
    scheme: str
    copies: list[list[Linear]]
    dense: list[Linear]
    limit: limits.Limits

    def measure(self, rows: int, rounds: int) -> Run:
        sizes = [each.shape for each in self.dense]
        outputs, inputs = sum(size[0] for size in sizes), sizes[0][1]
        x = torch.randn(rows, inputs)
        cold = self.copies if rows <= COLD_ROWS else self.copies[:1]  # the more rows, the less it matters
        theirs = [call for _ in cold if (call := peer(self.scheme, sizes, x)) is not None]
        ours, reference, torchs = medians(
            [
                [partial(native.linear, x, each) for each in self.copies],
                [lambda: ref.linear(x, self.dense)],
                theirs or None,
            ],
            rounds,
        )
        assert ours is not None
        assert reference is not None
        read = sum(each.weight.read_bytes for each in self.copies[0] if isinstance(each.weight, native.PackedWeight))
        gops = 2 * rows * outputs * inputs / ours / 1e9
        peak = None if self.scheme == "bf16" else self.limit.tile_gops or self.limit.int8_gops
        return Run(
            self.shape,
            self.product,
            self.scheme,
            rows,
            us=ours * 1e6,
            ref_us=reference * 1e6,
            torch_us=None if torchs is None else torchs * 1e6,
            read_gb_s=read / ours / 1e9,
            read_fraction=read / ours / 1e9 / self.limit.read_gb_s,
            gops=gops,
            peak_fraction=None if peak is None else gops / peak,
        )


def crossover(scheme: str, args: argparse.Namespace) -> dict[str, object]:
    """Rows from which the path for many is the faster one, on the widest product of the first shape."""
    name, level = args.shapes[0], extension.cpu_level()
    sizes = products(name)["gate-up"]
    copies, before = list(prepared(scheme, sizes, args.cold << 20)), library.many_rows(level)
    ratios = {}
    try:
        for rows in CROSSOVER_ROWS:
            x = torch.randn(rows, sizes[0][1])

            def through(path: int, each: list[Linear], x: Tensor = x) -> Call:
                def call() -> None:
                    library.set_many_rows(level, path)
                    native.linear(x, each)

                return call

            few, many = medians([[through(path, each) for each in copies] for path in (NEVER, 0)], args.rounds)
            assert few is not None
            assert many is not None
            ratios[rows] = few / many
    finally:
        library.set_many_rows(level, before)
    behind = [rows for rows, ratio in ratios.items() if ratio < 1]
    ahead = [rows for rows in ratios if not behind or rows > max(behind)]
    found = ahead[0] if ahead else None
    print(f"\n{scheme}, {name} gate-up: few rows' time over many rows', by rows")
    print("  " + "  ".join(f"{rows}: {ratio:.2f}" for rows, ratio in ratios.items()))
    print(f"  many rows are ahead from {found if found is not None else f'more than {CROSSOVER_ROWS[-1]}'}")
    return {"scheme": scheme, "shape": name, "found": found, "few_over_many": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NAME")
    parser.add_argument(
        "--schemes", nargs="+", default=SCHEMES, metavar="NAME", help="w4g128, w2g32-asym, w8a8, bf16 ..."
    )
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, metavar="N")
    parser.add_argument("--threads", type=int, default=cores())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", type=int, default=256, metavar="MB", help="of weights to go through; default 256")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = limits.measure()
    tiles = "" if machine.tile_gops is None else f", {machine.tile_gops:.0f} by tiles"
    print(f"threads {args.threads}, level {extension.cpu_level()}; limits: read {machine.read_gb_s:.1f} GB/s, "
          f"int8 {machine.int8_gops:.0f} GOP/s{tiles}\n")  # fmt: skip
    print(f"{'shape':<14}{'product':<9}{'scheme':<10}{'rows':>5}{'us':>10}{'ref us':>10}{'torch us':>10}"
          f"{'over ref':>10}{'torch':>8}{'GB/s':>8}{'read':>7}{'GOP/s':>8}{'peak':>7}")  # fmt: skip
    runs = []
    for name in args.shapes:
        for product in products(name):
            for scheme in args.schemes:
                sizes = products(name)[product]
                copies = list(prepared(scheme, sizes, args.cold << 20))
                case = Case(name, product, scheme, copies, linears(scheme, sizes), limits.measure())
                for rows in args.rows:
                    run = case.measure(rows, args.rounds)
                    runs.append(run)
                    other = "-" if run.torch_us is None else f"{run.torch_us:.0f}"
                    ratio = "-" if run.torch_us is None else f"{run.torch_us / run.us:.2f}x"
                    peak = "-" if run.peak_fraction is None else f"{run.peak_fraction:.0%}"
                    print(f"{name:<14}{product:<9}{scheme:<10}{run.rows:>5}{run.us:>10.0f}{run.ref_us:>10.0f}{other:>10}"
                          f"{run.ref_us / run.us:>9.2f}x{ratio:>8}{run.read_gb_s:>8.1f}{run.read_fraction:>7.0%}"
                          f"{run.gops:>8.0f}{peak:>7}", flush=True)  # fmt: skip
    found = [crossover(scheme, args) for scheme in args.schemes if scheme != "bf16"]
    print(json.dumps({"threads": args.threads, "level": extension.cpu_level(), "limits": asdict(machine),
                      "runs": [asdict(run) for run in runs], "crossover": found}))  # fmt: skip


if __name__ == "__main__":
    main()
