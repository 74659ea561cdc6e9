"""Loading the extension: levels, features, threads, and the stub that describes it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attar import _native, env
from attar.kernels.native import extension
from tests.errors import user_error

LEVELS = _native.levels()
DTYPES = [torch.float32, torch.bfloat16]
EPS = 2.0**-23

at_every_level = pytest.mark.parametrize("level", LEVELS)
for_every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def test_supports_gives_the_reason_against() -> None:
    op = "quantize_rows_int8"
    assert extension.supports(op, "cpu", torch.float32) is None
    assert extension.supports(op, "cpu", torch.bfloat16) is None
    assert extension.supports(op, "cuda", torch.float32) == "is for cpu tensors, not cuda"
    assert extension.supports(op, "cpu", torch.float16) == "takes float32 or bfloat16 rows, not float16"
    assert extension.supports("fly", "cpu", torch.float32) == "has no CPU kernel"


def test_without_the_extension_the_reason_is_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "_unavailable", "the compiled extension does not load (No module named 'x')")
    assert "does not load" in str(extension.supports("quantize_rows_int8", "cpu", torch.float32))
    assert extension.features() == {}
    assert not extension.openmp()


# ---- levels


def test_the_level_is_the_highest_unless_a_flag_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(flags: env.Env) -> str:
        monkeypatch.setattr(env, "get", lambda: flags)
        extension.cpu_level.cache_clear()
        try:
            return extension.cpu_level()
        finally:
            extension.cpu_level.cache_clear()

    assert chosen(env.Env()) == LEVELS[-1]
    assert chosen(env.Env(cpu="portable")) == "portable"
    monkeypatch.setattr(_native, "levels", lambda: ["portable", "avx2"])
    assert chosen(env.Env()) == "avx2"
    with user_error("device_unsupported"):
        chosen(env.Env(cpu="avx512"))


def test_the_extension_itself_refuses_unknown_levels_and_impossible_shapes() -> None:
    x, codes, scale = torch.ones(2, 4), torch.empty(2, 4, dtype=torch.int8), torch.empty(2, 1)

    def call(rows: int, columns: int, level: str) -> int:
        return _native.quantize_rows_int8_float32(
            x.data_ptr(), rows, columns, codes.data_ptr(), scale.data_ptr(), level
        )

    assert call(2, 4, "portable") == -1
    with pytest.raises(ValueError, match="unknown kernel level sse"):
        call(2, 4, "sse")
    for rows, columns in [(-1, 4), (2, 0), (2, -4), (2**62, 4), (2**31, 2**32)]:
        with pytest.raises(ValueError, match="impossible shape"):
            call(rows, columns, "portable")


ALL_BITS = 0xFFFFFFFF
YMM, ZMM, TILES = 0x06, 0xE6, 0x60000


def test_a_feature_counts_only_where_the_system_saves_its_registers() -> None:
    def found(leaf1_ecx: int, xcr0: int) -> set[str]:
        words = _native.decode_cpuid(leaf1_ecx, ALL_BITS, ALL_BITS, ALL_BITS, ALL_BITS, xcr0)
        return {name for name, present in words.items() if present}

    avx2 = {"avx2", "fma", "f16c", "avx_vnni"}
    avx512 = {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"}
    assert found(ALL_BITS, ZMM | TILES) == {"sse4_2"} | avx2 | avx512 | {"amx_tile", "amx_int8"}
    assert found(ALL_BITS, ZMM) == {"sse4_2"} | avx2 | avx512
    assert found(ALL_BITS, YMM | TILES) == {"sse4_2"} | avx2
    assert found(ALL_BITS, YMM) == {"sse4_2"} | avx2
    assert found(ALL_BITS, ZMM & ~0x80) == {"sse4_2"} | avx2  # the upper 16 registers are not saved
    assert found(ALL_BITS, 0x02) == {"sse4_2"}
    assert found(ALL_BITS & ~(1 << 27), ZMM) == {"sse4_2"}  # no OSXSAVE: XCR0 means nothing
    assert found(0, 0) == set()


def test_features_agree_with_what_linux_says() -> None:
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        pytest.skip("no /proc/cpuinfo to compare with")
    flags = next((set(line.split()) for line in info.splitlines() if line.startswith("flags")), None)
    if flags is None:
        pytest.skip("/proc/cpuinfo names no x86 flags")
    assert extension.features() == {name: name in flags for name in extension.features()}


# ---- threads


@pytest.mark.parametrize("flag, expected", [(None, 1), ("3", 3)])
def test_a_store_takes_no_more_threads_than_there_are_cores(flag: str | None, expected: int) -> None:
    code = (
        "import torch; from attar import machine; machine.cores = lambda: 1; torch.set_num_threads(3)\n"
        "from attar.kernels import dispatch; dispatch.store(); print(torch.get_num_threads())"
    )
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "ATTAR_KERNELS")}
    environ |= {} if flag is None else {"OMP_NUM_THREADS": flag}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(expected)


def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    code = (
        "import torch\n"
        "from attar import doctor\n"
        "from attar.kernels.native import extension, rows\n"
        "torch.set_num_threads(2)\n"
        "x = torch.ones(64, 1024)\n"
        "rows.quantize_rows_int8(x); (x @ x.T)\n"
        "print(extension.openmp(), doctor.openmp_runtimes())"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    if out[0] == "False":
        pytest.skip("built without OpenMP")
    assert out[1] in ("1", "None")


def test_the_stub_names_what_the_extension_has() -> None:
    stub = Path(extension.__file__).parents[2] / "_native.pyi"
    declared = {
        ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else node.name
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AnnAssign)
    }
    assert declared == {name for name in dir(_native) if not name.startswith("_")}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            signature = getattr(_native, node.name).__doc__.splitlines()[0]
            assert [each.arg for each in node.args.args] == re.findall(r"(\w+): ", signature), node.name
