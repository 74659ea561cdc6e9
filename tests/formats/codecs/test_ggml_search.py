"""The encoders that search: never worse than rounding, and no worse than llama.cpp's, by the error they minimise."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attar.formats.codecs import ggml_blocks, ggml_codec, ggml_round, ggml_search
from attar.formats.codecs.ggml import IQ4_VALUES, TYPES
from attar.formats.scheme import Scheme
from tests.errors import user_error

NAMES = list(ggml_search.FORMS)
AFFINE = [name for name in NAMES if ggml_search.FORMS[name].affine]
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


def plain(name: str, x: Tensor) -> Tensor:
    """The values of rows of whole blocks, float32 [R, I], by plain rounding: no search, no importances."""
    if name in ggml_round.ROUNDED:
        return ggml_blocks.decode(TYPES[name], ggml_round.encode(TYPES[name], x))
    form = ggml_search.FORMS[name]
    values = torch.tensor(form.values, dtype=torch.float32)
    groups = x.reshape(-1, TYPES[name].elements // form.group, form.group)
    offset = torch.zeros(())
    if form.affine:
        assert form.scales is not None
        least = (-groups.amin(2, keepdim=True)).clamp(min=0)
        scale = (groups.amax(2, keepdim=True) + least) / values[-1]
        scale, least = (by_integers(each, form.scales[1], form.scales) for each in (scale, least))
        offset = -least
    else:
        scale = groups.gather(2, groups.abs().argmax(2, keepdim=True)) / values[0]
        scale = scale.half().float() if form.scales is None else by_integers(scale, form.scales[0], form.scales)
    scaled = torch.where(scale == 0, 0.0, (groups - offset) / scale)
    codes = values[(scaled[..., None] - values).abs().argmin(-1)]
    return (scale * codes + offset).view(x.shape)


def by_integers(scale: Tensor, extreme: int, bounds: tuple[int, int]) -> Tensor:
    """Scales of groups [N, G, 1] as an fp16 number times integers, of which that of the largest is `extreme`."""
    d = (scale.gather(1, scale.abs().argmax(1, keepdim=True)) / extreme).half().float()
    return d * torch.where(d == 0, 0.0, scale / d).round().clamp(*bounds)


GROUPS: Mapping[str, Callable[[np.random.Generator], np.ndarray]] = {
    "normal": lambda r: r.standard_normal(16),
    "zero": lambda r: np.zeros(16),
    "constant": lambda r: np.full(16, r.standard_normal()),
    "nearly constant": lambda r: r.standard_normal() * (1 + 10 ** r.uniform(-8, -2) * r.standard_normal(16)),
    "vanishing": lambda r: 1e-30 * r.standard_normal(16),
    "outlier": lambda r: np.where(np.arange(16) == r.integers(16), 100, 0.1) * r.standard_normal(16),
    "positive": lambda r: 1 + 0.1 * r.random(16),
    "negative": lambda r: -1 - 0.1 * r.random(16),
    "whole": lambda r: r.integers(-3, 4, 16),
}
IMPORTANCES: Mapping[str, Callable[[np.random.Generator], np.ndarray | None]] = {
    "none": lambda r: None,
    "near": lambda r: np.exp(r.standard_normal(256)),
    "far apart": lambda r: np.exp(r.uniform(-40, 40, 256)),
    "some zero": lambda r: np.where(r.random(256) < 0.6, 0, np.exp(r.standard_normal(256))),
    "groups zero": lambda r: np.repeat(r.integers(0, 2, 16), 16) * np.exp(r.standard_normal(256)),
}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(
    groups=st.lists(st.sampled_from(list(GROUPS)), min_size=16, max_size=16),
    size=st.sampled_from([1.0, 0.02, 1e-4, 1e-6, 1e-8, 1e-30, 1e4, 65504.0]),
    weighing=st.sampled_from(list(IMPORTANCES)),
    seed=st.integers(0, 1 << 32),
)
def test_no_block_is_worse_than_its_plain_rounding(
    name: str, groups: list[str], size: float, weighing: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x = torch.from_numpy(np.concatenate([GROUPS[each](random) for each in groups])).float()[None]
    if size > 1:
        x /= x.abs().max().clamp(min=1e-30)  # the largest numbers that fp16 holds, and no larger
    x *= size
    drawn = IMPORTANCES[weighing](random)
    w = None if drawn is None else torch.from_numpy(drawn).float()
    raw = ggml_search.encode(TYPES[name], x, w)
    found = ggml_blocks.decode(TYPES[name], raw)
    assert found.isfinite().all()
    assert torch.equal(ggml_search.encode(TYPES[name], x, w), raw)
    counted = torch.ones(1, 256, dtype=torch.float64) if w is None else w.double()[None]
    counted = counted.view(-1, TYPES[name].elements)
    lost, most = (
        ((values - x).double().square().view(counted.shape) * counted).sum(1) for values in (found, plain(name, x))
    )
    # What is left is the rounding of sums, and of importances and squares far below the least of float32.
    assert (lost <= most * (1 + 1e-6) + 1e-40 * counted.amax(1)).all()


@pytest.mark.parametrize("name", AFFINE)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("value", [0.37, -0.37])
def test_nearly_equal_values_keep_theirs(name: str, weighted: bool, noise: float, value: float) -> None:
    """Their codes are all equal, which leaves nothing to fit a scale and an offset to."""
    random = np.random.default_rng(0)
    x = torch.from_numpy(value * (1 + noise * random.standard_normal((64, 256)))).float()
    w = importances(256) if weighted else None
    values = ggml_blocks.decode(TYPES[name], ggml_search.encode(TYPES[name], x, w))
    torch.testing.assert_close(values, x, rtol=5 * noise + 1e-3, atol=0.0)


@pytest.mark.parametrize("name", ["q4_k", "q5_k"])
def test_nearly_equal_values_keep_theirs_as_large_weights_count_more(name: str) -> None:
    x = torch.from_numpy(0.37 * (1 + 1e-5 * np.random.default_rng(0).standard_normal((256, 256)))).float()
    torch.testing.assert_close(ggml_codec.quantize(x, Scheme.parse(name)).dequantize(), x, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("name", ["Q4_1", "Q5_1"])
@pytest.mark.parametrize("offset", [0.02, 0.1, 1.0, -1.0])
def test_an_offset_of_either_sign_costs_nothing(name: str, offset: float) -> None:
    """But for the rounding of the offset itself, which is fp16."""
    x, w = numbers(8, 512), importances(512)
    at_zero, off = (error(name, ggml_search.encode(TYPES[name], each, w), each, w) for each in (x, x + offset))
    assert off < 1.03 * at_zero


@pytest.mark.parametrize("name", [name for name in NAMES if TYPES[name].elements == 256])
def test_groups_without_importance_cost_the_others_nothing(name: str) -> None:
    x = numbers(8, 256)
    x[:, :128] *= 5.0
    least, none = torch.ones(256), torch.ones(256)
    least[:128], none[:128] = 1e-6, 0.0
    found = [error(name, ggml_search.encode(TYPES[name], x, w), x, none) for w in (none, least)]
    assert found[0] < 1.002 * found[1]
    dead = (ggml_blocks.decode(TYPES[name], ggml_search.encode(TYPES[name], x, none)) - x)[:, :128]
    assert dead.square().mean() < 0.3 * x[:, :128].square().mean()


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
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30, 1e38])
def test_what_no_scale_can_hold_is_refused(name: str, value: float) -> None:
    x = torch.zeros(2, 256)
    x[1, 200] = value
    with user_error("not_finite"):
        ggml_search.encode(TYPES[name], x)


def test_bad_arguments_are_refused() -> None:
    with user_error("scheme_unsupported"):
        ggml_search.encode(TYPES["BF16"], torch.zeros(1, 32))
    with user_error("group_size_indivisible"):
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
