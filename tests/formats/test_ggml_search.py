"""The encoders that search: never worse than rounding, and no worse than llama.cpp's, by the error they minimise."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from attar.formats import ggml_blocks, ggml_round, ggml_search
from attar.formats.ggml import IQ4_VALUES, TYPES

NAMES = list(ggml_search.FORMS)
AGAINST_LLAMA_CPP = 1.0  # the most that our error may be of theirs, for any type; the gate is 1.02
OF_THEIR_OWN = 0.05  # error of encoding what a block already holds, of that of rounding random numbers
ROOT = Path(__file__).resolve().parents[2]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Heavier tails than a normal distribution has, as weights do."""
    return torch.from_numpy(np.random.default_rng(seed).standard_t(5, shape).astype(np.float32) * 0.02)


def importances(columns: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.exp(np.random.default_rng(seed).standard_normal(columns) * 1.5).astype(np.float32))


def error(name: str, raw: Tensor, x: Tensor, w: Tensor | float = 1.0) -> float:
    return float((w * (ggml_blocks.decode(TYPES[name], raw) - x).double() ** 2).sum())


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("weighted", [False, True])
def test_search_is_better_than_rounding(name: str, weighted: bool) -> None:
    x, w = numbers(8, 512), importances(512) if weighted else None
    searched = ggml_search.encode(TYPES[name], x, w)
    rounded = ggml_round.encode(TYPES[name], x)
    scale = 1.0 if w is None else w
    assert error(name, searched, x, scale) < 0.97 * error(name, rounded, x, scale)


def test_more_bits_are_better() -> None:
    x = numbers(8, 512)
    for order in (("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"), ("Q3_K", "IQ4_XS", "Q5_0", "Q8_0")):
        errors = [error(name, ggml_search.encode(TYPES[name], x), x) for name in order]
        assert all(finer < coarser / 2 for coarser, finer in pairwise(errors)), errors


@pytest.mark.parametrize("name", NAMES)
def test_importances_move_error_to_where_it_counts_less(name: str) -> None:
    x = numbers(8, 512)
    w = torch.where(torch.arange(512) % 16 == 3, 1000.0, 1.0)
    plain, weighted = (ggml_search.encode(TYPES[name], x, each) for each in (None, w))
    assert error(name, weighted, x, w) < 0.8 * error(name, plain, x, w)
    assert error(name, weighted, x) > error(name, plain, x)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_do_not_depend_on_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = numbers(6, 512, seed=1), importances(512)
    x[3] *= 1000.0
    together = ggml_search.encode(TYPES[name], x, w)
    monkeypatch.setattr(ggml_search, "SLICE", 512)
    assert torch.equal(ggml_search.encode(TYPES[name], x, w), together)
    assert torch.equal(ggml_search.encode(TYPES[name], x.view(2, 3, 512), w.expand(2, 3, 512)).view(6, -1), together)
    assert torch.equal(ggml_search.encode(TYPES[name], x[4], w * 1e20), together[4])


@pytest.mark.parametrize("name", NAMES)
def test_what_blocks_hold_is_found_again(name: str) -> None:
    x = numbers(4, 512, seed=2)
    held = ggml_blocks.decode(TYPES[name], ggml_search.encode(TYPES[name], x))
    again = ggml_search.encode(TYPES[name], held)
    assert error(name, again, held) < OF_THEIR_OWN * error(name, ggml_search.encode(TYPES[name], x), x)


@pytest.mark.parametrize("name", NAMES)
def test_unusual_blocks(name: str) -> None:
    x = torch.zeros(7, 256)
    x[1] = 0.7
    x[2] = -0.7
    x[3, 5] = 3.0
    x[4] = torch.linspace(1e-7, 1e-6, 256)
    x[5, :16] = 1e4
    x[6] = 1e-30
    values = ggml_blocks.decode(TYPES[name], ggml_search.encode(TYPES[name], x))
    assert values.isfinite().all()
    assert values[0].count_nonzero() == 0
    assert values[6].abs().max() < 1e-6
    for row in (1, 2):
        torch.testing.assert_close(values[row], x[row], rtol=0.02, atol=0.0)
    # The uneven grid has no zero: its code nearest to it is 1, where the largest is 113 and the least -127.
    torch.testing.assert_close(values[3], x[3], rtol=0.02, atol=3.0 / 100 if name.startswith("IQ4") else 1e-4)
    torch.testing.assert_close(values[5, :16], x[5, :16], rtol=0.02, atol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_groups_without_importance_count_as_equal(name: str) -> None:
    x = numbers(2, 256)
    assert torch.equal(
        ggml_search.encode(TYPES[name], x, torch.zeros(256)), ggml_search.encode(TYPES[name], x, torch.ones(256))
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_what_no_scale_can_hold_is_refused(name: str, value: float) -> None:
    x = torch.zeros(2, 256)
    x[1, 200] = value
    with pytest.raises(ValueError, match=f"cannot be stored as {name}"):
        ggml_search.encode(TYPES[name], x)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="BF16 is not encoded by search: Q4_0, Q5_0"):
        ggml_search.encode(TYPES["BF16"], torch.zeros(1, 32))
    with pytest.raises(ValueError, match="Q4_K stores rows in blocks of 256, which do not divide 32"):
        ggml_search.encode(TYPES["Q4_K"], torch.zeros(8, 32))
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="importances must be finite and not negative"):
            ggml_search.encode(TYPES["Q4_0"], torch.zeros(1, 32), torch.full((32,), bad))


def test_the_nearest_value_of_the_uneven_grid_is_nearest() -> None:
    grid = ggml_search._Grid(ggml_search.FORMS["IQ4_NL"], torch.device("cpu"))
    y = torch.cat([torch.linspace(-200, 200, 100_001), torch.arange(-500, 500) / 2])
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32)
    distance = (y[:, None] - table).abs()
    found = (y - grid.nearest(y.clone())).abs()
    assert torch.equal(found, distance.amin(1))


LLAMA_CPP = """
import ctypes, os, sys
import gguf, llama_cpp
import numpy as np
ggml = ctypes.CDLL(os.path.join(os.path.dirname(llama_cpp.__file__), "lib", "libggml-base.so"))
quantize = ggml.ggml_quantize_chunk
quantize.restype = ctypes.c_size_t
quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p]
given, out = np.load(sys.argv[1]), {}
x, w = given["x"], given["w"]
for name in sys.argv[3:]:
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    for label, importance in (("weighted", w.ctypes.data), ("plain", None)):
        raw = np.zeros((x.shape[0], x.shape[1] // elements * size), np.uint8)
        quantize(kind.value, x.ctypes.data, raw.ctypes.data, 0, *x.shape, importance)
        out[f"{name} {label}"] = raw
np.savez(sys.argv[2], **out)
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_search_is_no_worse_than_llama_cpp(seed: int, tmp_path: Path) -> None:
    python = ROOT / ".venv-llamacpp" / "bin" / "python"
    if not python.exists():
        pytest.skip("llama.cpp is not built here: `make bench-peers` does")
    x, w = numbers(16, 1024, seed=seed), importances(1024, seed)
    np.savez(tmp_path / "in.npz", x=x.numpy(), w=w.numpy())
    command = [python, "-c", LLAMA_CPP, str(tmp_path / "in.npz"), str(tmp_path / "out.npz"), *NAMES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    theirs = np.load(tmp_path / "out.npz")
    for name in NAMES:
        for label, weights in (("weighted", w), ("plain", None)):
            scale = 1.0 if weights is None else weights
            ours = error(name, ggml_search.encode(TYPES[name], x, weights), x, scale)
            assert ours < AGAINST_LLAMA_CPP * error(name, torch.from_numpy(theirs[f"{name} {label}"]), x, scale), name
