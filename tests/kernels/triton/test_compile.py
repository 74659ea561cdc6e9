"""Every kernel compiled for a Hopper card, of which none need be there: Triton brings its own assembler.

The interpreter takes what no compiler would, and cannot compute in bfloat16; this is the other half. A driver that
answers for a card stands in for the one of this machine, and launches end once they are compiled. What is asserted is
what would ruin a kernel silently: registers spilled to memory, more shared memory than there is, products that miss the
tensor cores, and loops that wait for every load.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here: `make test-triton` has it")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels that are interpreted are not compiled", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from attar.formats.packed import codec
from attar.formats.scheme import Scheme
from attar.kernels.operands import AttentionForm, Linear, Norm
from attar.kernels.triton import attention, kv_write, linear, nibbles, rows, w4, w8, weights
from attar.kernels.triton.pages import NibblePages, PlainPages
from attar.kv.pages import AttentionMetadata, Rotation
from attar.kv.schemes import scheme

SHARED = 227 << 10  # bytes of shared memory that a program of a Hopper card can have
TARGET = GPUTarget("cuda", 90, 32)
DTYPE = torch.bfloat16
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Card:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Name and compiled form of each kernel that was launched."""
    found: list[tuple[str, Any]] = []
    run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    monkeypatch.setattr(jit.JITFunction, "run", compile_only)
    for module in (w4, w8, attention):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    for module in (w4, w8):
        monkeypatch.setattr(module, "device_name", lambda device: "")
    monkeypatch.setattr(w8, "scaled_mm_fits", lambda *shapes: False)
    monkeypatch.setattr(driver, "_active", Card())
    return found


def spilled(compiled: Any, folder: Path) -> int:
    """Bytes of a thread's memory that hold what registers could not."""
    (folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [CUOBJDUMP, "--dump-resource-usage", folder / "kernel.cubin"]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(number) for number in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))


def product(scheme: str, n: int) -> None:
    parsed = Scheme.parse(scheme)
    one = Linear("l", codec(parsed.weight.kind).quantize(torch.ones(128, 2048), parsed))
    weights.prepare(one, DTYPE)
    one.bias = torch.ones(128)
    linear.linear(torch.ones(n, 2048, dtype=DTYPE), (one,))


def attend(
    counts: list[int],
    capacity: int,
    kv: torch.dtype | None = DTYPE,
    tree: bool = False,
    placed: bool = False,
    **form: Any,
) -> None:
    wanted = AttentionForm(**({"heads": 8, "kv_heads": 2, "head_dim": 128, "scale": 0.1} | form))
    pages, n = four_bits() if kv is None else PlainPages.make(2, 64, wanted.kv_heads, wanted.head_dim, kv), sum(counts)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    tables = numbers(len(counts), capacity // 64)
    place = AttentionMetadata(numbers(len(counts) + 1), numbers(len(counts)), tables, numbers(n), torch.zeros(n).long())
    if tree:
        place.tree = torch.ones(sum(count * count for count in counts), dtype=torch.bool)
    if placed:
        place.key_positions = numbers(pages.blocks, pages.block)
    q = torch.zeros(n, wanted.heads, wanted.head_dim, dtype=DTYPE)
    attention.paged_attention(q, pages, place, wanted)


def four_bits() -> NibblePages:
    return NibblePages.rotated(2, 64, 2, 128, scheme("int4"))


def write(pages: PlainPages, offset: float = 0.0) -> None:
    heads, slots = torch.zeros(2, 2, 128, dtype=DTYPE), torch.zeros(2, dtype=torch.int64)
    rotation = Rotation(torch.zeros(9, 64), torch.zeros(9, 64), torch.zeros(2, dtype=torch.int32))
    norm = Norm("rms", torch.zeros(128, dtype=DTYPE), offset=offset)
    kv_write.write_kv(
        heads, heads, heads, pages, AttentionMetadata(slots, slots, slots, slots, slots), rotation, norm, norm
    )


def plain(kv: torch.dtype) -> PlainPages:
    return PlainPages.make(1, 16, 2, 128, kv)


def turn_back() -> None:
    nibbles.turn_back(torch.zeros(2, 8 * 128, dtype=DTYPE), four_bits())


def element_wise() -> None:
    x = torch.zeros(2, 4096, dtype=DTYPE)
    rows.norm(x, x, Norm("rms", x[0]))
    rows.norm(x, x, Norm("rms", x[0], offset=1.0))
    rows.norm(x, None, Norm("layer", x[0], x[0]))
    rows.activate(x, "silu", True)
    rows.activate(x, "gelu_tanh", False)
    rows.round_rows(x, torch.float8_e4m3fn)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        rows.round_rows(x, dtype, torch.ones(1))
    rows.argmax(torch.zeros(2, 20000))
    rows.mask(torch.zeros(2, 20000).double(), torch.tensor([1]), torch.zeros(1, 625, dtype=torch.int32))
    for name in ("w4g128-asym", "qserve-g128"):
        parsed = Scheme.parse(name)
        one = Linear("l", codec(parsed.weight.kind).quantize(torch.ones(64, 2048), parsed))
        weights.prepare(one, DTYPE)
        assert isinstance(one.weight, weights.TritonWeight)
        w4.dense(one.weight, DTYPE)
        w4.dense(one.weight, DTYPE, torch.zeros(2, dtype=torch.int64))


LAUNCHES: dict[str, tuple[Callable[[], None], str | None]] = {
    "w4g128, one row": (lambda: product("w4g128", 1), "_product"),
    "w4g128, many rows": (lambda: product("w4g128", 500), "_product"),
    "w4g32-asym, 40 rows": (lambda: product("w4g32-asym", 40), "_product"),
    "w4a8g128, one row": (lambda: product("w4a8g128", 1), "_product"),
    "w4a8g64-asym, many rows": (lambda: product("w4a8g64-asym", 500), "_product"),
    "progressive levels, one row": (lambda: product("qserve-g128", 1), "_product"),
    "progressive levels, 40 rows": (lambda: product("qserve-g64", 40), "_product"),
    "progressive levels, many rows": (lambda: product("qserve-g128", 500), "_product"),
    "w8, one row": (lambda: product("w8", 1), "_product"),
    "fp8-weight, many rows": (lambda: product("fp8-weight", 500), "_product"),
    "w8a8, one row": (lambda: product("w8a8", 1), "_product"),
    "w8a8, many rows": (lambda: product("w8a8", 500), "_product"),
    "fp8, many rows": (lambda: product("fp8", 500), "_product"),
    "fp8 blocks, one row": (lambda: product("fp8-block", 1), "_product"),
    "fp8 blocks, many rows": (lambda: product("fp8-block", 500), "_product"),
    "fp8 blocks and wide rows": (lambda: product("fp8-block-weight", 40), "_product"),
    "decoding": (lambda: attend([1, 1], 8192), "_attend"),
    "decoding from int8": (lambda: attend([1, 1], 8192, torch.int8), "_attend"),
    "decoding from fp8": (lambda: attend([1, 1], 8192, torch.float8_e4m3fn), "_attend"),
    "decoding from int4": (lambda: attend([1, 1], 8192, None), "_attend"),
    "a prompt over int4": (lambda: attend([500], 512, None), "_attend"),
    "decoding with a window and a soft cap": (lambda: attend([1, 1], 8192, window=4096, soft_cap=50.0), "_attend"),
    "decoding from int4 with both": (lambda: attend([1, 1], 8192, None, window=4096, soft_cap=50.0), "_attend"),
    "decoding from a cache that evicts": (lambda: attend([1, 1], 8192, placed=True), "_attend"),
    "a tree of 8, split": (lambda: attend([8], 32768, tree=True), "_attend"),
    "a tree of 16 over int8, split": (lambda: attend([16], 32768, torch.int8, tree=True), "_attend"),
    "a tree of 16 over int4, split": (lambda: attend([16], 32768, None, tree=True), "_attend"),
    "a tree of 100": (lambda: attend([100], 8192, tree=True), "_attend"),
    "a tree of 8 with Gemma's heads": (lambda: attend([8], 32768, tree=True, head_dim=256, soft_cap=50.0), "_attend"),
    "16 rows, split": (lambda: attend([16], 32768), "_attend"),
    "16 rows over fp8, split": (lambda: attend([16], 32768, torch.float8_e4m3fn), "_attend"),
    "the last of a long prompt, split": (lambda: attend([60], 32768), "_attend"),
    "writing int4": (lambda: write(four_bits()), None),
    "turning int4 back": (turn_back, None),
    "a prompt over fp8": (lambda: attend([500], 512, torch.float8_e4m3fn), "_attend"),
    "a prompt": (lambda: attend([500], 512), "_attend"),
    "a prompt of Gemma's": (lambda: attend([500], 512, head_dim=256, soft_cap=50.0, window=128), "_attend"),
    "writing": (lambda: write(plain(DTYPE)), None),
    "writing with Gemma's norms": (lambda: write(plain(DTYPE), 1.0), None),
    "writing int8": (lambda: write(plain(torch.int8)), None),
    "writing fp8": (lambda: write(plain(torch.float8_e4m3fn)), None),
    "element-wise": (element_wise, None),
}


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_it_compiles_for_hopper(launch: str, made: list[tuple[str, Any]], tmp_path: Path) -> None:
    run, multiplies = LAUNCHES[launch]
    run()
    assert made
    for name, compiled in made:
        assert spilled(compiled, tmp_path) == 0, name
        assert compiled.metadata.shared <= SHARED, name
        if name == multiplies:
            assert re.search(r"wgmma\.mma_async|mma\.sync", compiled.asm["ptx"]), name
            assert "cp.async" in compiled.asm["ptx"], "nothing is loaded ahead of its use"
        if name == "_round_rows" and launch.startswith("w8a8"):  # half to even: a sum that no optimiser may drop
            assert re.search(r"0f4B400000|0fCB400000", compiled.asm["ptx"])
