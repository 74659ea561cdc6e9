"""Formulas of the lab against oracles: plans, torch, enumeration, and a clock that ticks; and the page's copies."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attar.kv.schemes import SCHEMES
from attar.lab import formulas, page
from attar.model import shapes
from attar.plan import costs
from attar.plan.costs import Storage
from attar.plan.fit import Fit
from attar.plan.roofline import Rates, Roofline
from tests.lab.browser import Browser, need_chromium
from tests.lab.vectors import ARGUMENTS, COUNT, vectors

CLOSE = 1e-9  # relative, between Python's answer and the page's
EXACT = 1e-12  # relative, between two orders of the same sums
NODE = shutil.which("node")
LLAMA = shapes.shape("llama-3.1-8b")

PUBLIC = [
    name for name, value in inspect.getmembers(formulas, inspect.isfunction)
    if value.__module__ == formulas.__name__ and not name.startswith("_")
]  # fmt: skip

COMPARED = """
const close = (a, b) => Array.isArray(a)
  ? Array.isArray(b) && a.length === b.length && a.every((x, i) => close(x, b[i]))
  : a === b || Math.abs(a - b) <= 1e-9 * Math.max(Math.abs(a), Math.abs(b), 1e-9);
const right = ({ name, given, answer }) => close(answer, F[name](...given));
const compared = vectors => vectors.filter(each => !right(each)).map(each => each.name);
"""


def script(name: str) -> str:
    return (Path(page.__file__).parent / "page" / name).read_text()


def test_every_formula_has_vectors() -> None:
    assert sorted(ARGUMENTS) == sorted(PUBLIC)
    assert len(vectors()) == COUNT


def test_the_pages_formulas_are_pythons_by_node() -> None:
    if NODE is None:
        pytest.skip("no node on this machine")
    program = f"{script('formulas.js')}{COMPARED}\nconst data = require('fs').readFileSync(0);\n"
    program += "console.log(JSON.stringify([Object.keys(F), compared(JSON.parse(data))]));"
    done = subprocess.run(
        [NODE, "-e", program], input=json.dumps(vectors()), capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr
    assert json.loads(done.stdout) == [json.loads(json.dumps(_in_order())), []]


def _in_order() -> list[str]:
    """Names in the order of the file, which both languages keep."""
    return sorted(PUBLIC, key=lambda name: inspect.getsourcelines(getattr(formulas, name))[1])


def test_the_pages_formulas_are_pythons_in_a_browser(tmp_path: Path) -> None:
    need_chromium()
    holder = tmp_path / "formulas.html"
    text = json.dumps(vectors(seed=2))
    holder.write_text(f"<!doctype html><script>{script('formulas.js')}{COMPARED}const all = {text};</script>")
    with Browser(tmp_path / "profile") as browser:
        browser.open(holder.as_uri())
        assert browser.run("all.length") == COUNT
        assert browser.run("compared(all)") == []
        browser.run("all[0].answer *= 1 + 1e-7")  # and the comparison sees a difference
        assert browser.run("compared(all)") == [vectors(1)[0]["name"]]


# Sizes and times, against plans


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_kv_bytes_are_the_plans(name: str) -> None:
    bits = {"float32": 32, "bfloat16": 16}[name]
    found = formulas.kv_token_bytes(LLAMA.layers, LLAMA.kv_heads, LLAMA.head_dim, bits, 0)
    assert found == costs.kv_bytes(LLAMA, SCHEMES[name])


def test_kv_bytes_of_int8_count_scales() -> None:
    found = formulas.kv_token_bytes(LLAMA.layers, LLAMA.kv_heads, LLAMA.head_dim, 8, 32)
    assert found == costs.kv_bytes(LLAMA, SCHEMES["int8"])


def test_published_sizes_of_llama_2_70b() -> None:
    token = formulas.kv_token_bytes(80, 8, 128, 16, 0)
    assert token == 327_680
    assert 131_072 * token == 40 * 2**30


def test_weight_bytes_are_the_plans_where_nothing_is_padded() -> None:
    linears = sum(each.rows * each.columns for each in costs.matrices(LLAMA) if each.part == "linears")
    stored = costs.weight_bytes(LLAMA, Storage.named("w4g128"))
    assert formulas.weight_bytes(linears, 4, 128, 16) == pytest.approx(stored.linears, rel=0.02)
    assert formulas.weight_bytes(linears, 16, 0, 0) == costs.weight_bytes(LLAMA, Storage.named("bf16")).linears


@given(st.integers(0, 5000), st.sampled_from([0.0, 0.02, 0.25]), st.integers(1, 9000))
@settings(max_examples=100)
def test_users_are_those_of_a_fit(blocks: int, headroom: float, context: int) -> None:
    fit = Fit(0, 0, 0, 0, 64, 1, blocks, context, headroom=headroom)
    assert formulas.users_that_fit(blocks, headroom, context, 64) == fit.requests


def test_a_step_is_bounded_as_by_the_roofline() -> None:
    rates, kv, batch, context = Rates(50e9, lambda scheme: 400e9), SCHEMES["bfloat16"], 4, 1000
    expected = Roofline(LLAMA, Storage.named("bf16"), kv, rates).least([(context - 1, 1, 1)] * batch)
    weights = costs.step_bytes(LLAMA, Storage.named("bf16"))
    active = sum(each.rows * each.columns for each in costs.matrices(LLAMA))
    width = LLAMA.layers * LLAMA.heads * LLAMA.head_dim
    read = formulas.read_seconds(weights, batch, costs.kv_bytes(LLAMA, kv), context, 50e9)
    compute = formulas.product_seconds(batch, active, 400e9) + formulas.attention_seconds(batch, context, width, 400e9)
    assert (read, compute) == pytest.approx(expected, rel=1e-9)
    assert formulas.bound_seconds(read, compute) == pytest.approx(max(expected))
    assert formulas.step_seconds(read, compute, 0.001) >= formulas.bound_seconds(read, compute)


def test_the_ridge_is_the_plans_and_differs_by_bits() -> None:
    for bits, expected in ((16, 153), (4.125, 39)):  # A100-80 in 16-bit products
        assert formulas.ridge_rows(312e12, bits, 2039e9) == pytest.approx(costs.ridge(312e12, 2039e9, bits))
        assert round(formulas.ridge_rows(312e12, bits, 2039e9)) == expected


def test_no_batch_exceeds_the_limit_of_intensity() -> None:
    given_model = (7.5e9, 16.0, 8192.0, 131072.0, 32 * 32 * 128.0)
    limit = formulas.intensity_limit(given_model[0], given_model[2], given_model[3], given_model[4])
    found = [formulas.intensity(rows, *given_model) for rows in (1, 16, 256, 1e9)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(limit, rel=1e-3)
    assert round(limit) == 18


@pytest.mark.parametrize("at", [0.0, 1.0, 2.5, 9.0])
def test_interpolation_is_numpys_inside_and_goes_on_outside(at: float) -> None:
    xs, ys = [1.0, 2.0, 4.0], [10.0, 20.0, 60.0]
    expected = {0.0: 0.0, 1.0: 10.0, 2.5: 30.0, 9.0: 160.0}[at]
    assert formulas.interpolated(at, xs, ys) == pytest.approx(expected)


def test_no_points_are_refused() -> None:
    with pytest.raises(ValueError):
        formulas.interpolated(1, [], [])


# Rounding, against torch


def test_the_worked_tensor() -> None:
    scale, zero = formulas.grid([2.3, 1.7], 4)
    assert (round(scale, 4), zero) == (0.1533, 0)
    assert formulas.codes([2.3, 1.7], 4) == [15, 11]


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=12), st.integers(2, 8))
def test_stored_values_are_near_and_hold_zero(values: list[float], bits: int) -> None:
    scale, zero = formulas.grid(values, bits)
    assert 0 <= zero <= 2**bits - 1
    assert all(0 <= code <= 2**bits - 1 for code in formulas.codes(values, bits))
    near = formulas.stored(values, bits)
    assert all(abs(a - b) <= scale * (1 + 1e-9) for a, b in zip(near, values, strict=True))


@given(st.floats(-1e6, 1e6))
def test_rounding_is_torchs(value: float) -> None:
    assert formulas.rounded(value) == torch.tensor(value, dtype=torch.float64).round().item()


def test_the_smoothed_error_is_torchs() -> None:
    torch.manual_seed(1)
    x, w = torch.randn(6, 32, dtype=torch.float64), torch.randn(5, 32, dtype=torch.float64)
    x[:, 3] *= 40
    s = torch.tensor(formulas.smoothing(x.abs().amax(0).tolist(), w.abs().amax(0).tolist(), 0.6), dtype=torch.float64)

    def near(rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().amax(1, keepdim=True) / 127
        return (rows / scale).round() * scale

    exact = x @ w.T
    expected = ((near(x / s) @ near(w * s).T - exact) ** 2).sum() / (exact**2).sum()
    found = formulas.smoothed_error(x.tolist(), w.tolist(), s.tolist(), 8, 8)
    assert found == pytest.approx(expected.item(), rel=1e-9)
    assert found < formulas.smoothed_error(x.tolist(), w.tolist(), [1.0] * 32, 8, 8)


def test_a_half_equalises_the_maxima() -> None:
    inputs, weights = [8.0, 0.5, 3.0], [0.1, 0.4, 2.0]
    for x, w, s in zip(inputs, weights, formulas.smoothing(inputs, weights, 0.5), strict=True):
        assert x / s == pytest.approx(w * s, rel=1e-6) == pytest.approx(math.sqrt(x * w), rel=1e-6)


def test_no_exponent_is_plain_rounding() -> None:
    weights, inputs = [2.3, 1.7, -0.4], [1.0, 5.0, 2.0]
    plain = sum(((a - b) * x) ** 2 for a, b, x in zip(formulas.stored(weights, 4), weights, inputs, strict=True))
    assert formulas.awq_error(weights, inputs, 0, 4) == pytest.approx(plain)


# Paging


def test_published_wastes() -> None:
    assert round(100 * formulas.contiguous_waste(100, 2048), 1) == 95.1
    assert round(100 * formulas.paged_waste(100, 16), 1) == 10.7
    assert round(100 * formulas.paged_waste(100, 64), 1) == 21.9


@pytest.mark.parametrize("block", [1, 16, 64])
def test_the_mean_tail_is_the_mean_over_lengths(block: int) -> None:
    tails = [-(-n // block) * block - n for n in range(1, block + 1)]
    assert formulas.mean_tail(block) == pytest.approx(sum(tails) / block)


@given(st.integers(1, 1 << 20))
def test_powers_of_two_waste_less_than_half(used: int) -> None:
    assert 0 <= formulas.buddy_waste(used) < 0.5


def test_shared_blocks_count_once() -> None:
    tables = [[0, 1, 10], [0, 1, 11], [0, 1, 12]]  # three sequences whose first 40 of 48 tokens are equal, blocks of 16
    assert formulas.shared_blocks(40, 3, 16) == sum(map(len, tables)) - len(
        {each for table in tables for each in table}
    )


# Speculation, by enumeration


@given(st.lists(st.floats(0, 1), max_size=8))
def test_expected_tokens_by_enumeration(accepted: list[float]) -> None:
    total = 0.0
    for outcome in itertools.product([True, False], repeat=len(accepted)):
        weight = math.prod(p if right else 1 - p for p, right in zip(accepted, outcome, strict=True))
        total += weight * (1 + next((i for i, right in enumerate(outcome) if not right), len(outcome)))
    assert formulas.emitted_tokens(accepted) == pytest.approx(total)
    leaves = formulas.chain(accepted)
    assert sum(leaves) == pytest.approx(1)
    assert sum(i * p for i, p in enumerate(leaves)) == pytest.approx(total - 1)


def test_published_chain() -> None:
    leaves = formulas.chain(formulas.acceptance(0.8, 5))
    assert [round(each, 4) for each in leaves] == [0.2, 0.16, 0.128, 0.1024, 0.0819, 0.3277]
    assert formulas.emitted_tokens([1.0] * 5) == 6
    gain = formulas.speculation_gain(formulas.emitted_tokens(formulas.acceptance(0.8, 5)), 1, 0.1, 1, 5)
    assert round(gain, 2) == 2.46


# Batching, against a clock


def ticked(arrivals: list[float], lengths: list[float], slots: int, policy: str, delay: float) -> list[float]:
    """Starts of requests by a clock that ticks: what the scheduler does at each step, in whole units of time."""
    size, now, ends, found = (1 if policy == "none" else slots), 0.0, list[float](), list[float]()
    while len(found) < len(arrivals):
        ends = [end for end in ends if end > now]
        waiting = [at for at in range(len(found), len(arrivals)) if arrivals[at] <= now]
        opens = policy in ("none", "continuous") or not ends
        if policy == "dynamic" and waiting:
            opens = opens and (len(waiting) >= size or now - arrivals[waiting[0]] >= delay)
        for at in waiting[: size - len(ends)] if opens else []:
            found.append(now)
            ends.append(now + lengths[at])
        now += 1
    return found


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 20)), min_size=1, max_size=14), st.integers(1, 5),
    st.sampled_from(["none", "static", "dynamic", "continuous"]), st.integers(0, 30),
)  # fmt: skip
@settings(max_examples=200)
def test_starts_are_those_of_a_clock(requests: list[tuple[int, int]], slots: int, policy: str, delay: int) -> None:
    arrivals = [float(each) for each in itertools.accumulate(gap for gap, _ in requests)]
    lengths = [float(length) for _, length in requests]
    expected = ticked(arrivals, lengths, slots, policy, delay)
    assert formulas.starts(arrivals, lengths, slots, policy, float(delay)) == expected


def test_unknown_names_are_refused() -> None:
    refused: list[Callable[[], Any]] = [
        lambda: formulas.starts([0], [1], 1, "eager", 0), lambda: formulas.static_utilisation(4, "zipf"),
    ]  # fmt: skip
    for call in refused:
        with pytest.raises(ValueError):
            call()


@pytest.mark.parametrize(
    ("lengths", "batch", "gain"), [("uniform", 8, 16 / 9), ("exponential", 8, 2.7), ("exponential", 32, 4.1)]
)
def test_published_gains_of_continuous_batching(lengths: str, batch: int, gain: float) -> None:
    assert 1 / formulas.static_utilisation(batch, lengths) == pytest.approx(gain, rel=0.02)


@pytest.mark.parametrize("fraction", [0, 0.25, 0.5, 0.95, 1])
def test_percentiles_are_torchs(fraction: float) -> None:
    values = [3.0, 1.0, 4.0, 1.5, 9.0]
    expected = torch.tensor(values, dtype=torch.float64).quantile(fraction).item()
    assert formulas.percentile(values, fraction) == pytest.approx(expected, rel=EXACT)


# Attention


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=12), st.integers(1, 6))
def test_tiles_give_the_softmax(scores: list[float], tile: int) -> None:
    most, total, _ = formulas.online_softmax(scores, tile)[-1]
    expected = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
    assert [math.exp(each - most) / total for each in scores] == pytest.approx(expected, rel=1e-9)


def test_the_worked_softmax() -> None:
    most, total, _ = formulas.online_softmax([1, 2, 3], 1)[-1]
    assert (most, round(total, 4)) == (3, 1.5032)
