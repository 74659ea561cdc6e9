"""Plans for GPUs: bytes against the layouts that their kernels read, and what data sheets say against what follows."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest
import torch
from typer.testing import CliRunner, Result

from attar.cli import planning
from attar.cli.main import app
from attar.cli.terminal import BAD_INPUT
from attar.engine import bottleneck
from attar.formats.packed import PackedTensor, codec
from attar.formats.scheme import Scheme, multiplied_in
from attar.kernels import dispatch, ref
from attar.kernels.operands import Linear
from attar.kernels.triton import weights
from attar.kernels.triton.pages import NibblePages, PlainPages
from attar.kernels.triton.store import GpuWeights
from attar.kv.schemes import SCHEMES as KV_SCHEMES
from attar.model.shapes import shape
from attar.plan import comparison, costs, gpus, report
from attar.plan.comparison import Hardware, Precisions, Subject, usual_storages
from attar.plan.costs import Matrix, Storage
from attar.plan.fit import Demand
from attar.plan.gpus import GPUS, gpu_spec
from attar.plan.steps import StepLimits
from tests.cli.test_commands import last_json, refused
from tests.errors import user_error

CONFIG = shape("llama-3.1-8b")
GB = 10**9
A100 = Hardware(72 * GB, "a", gpu=gpu_spec("a100-80gb"))
SCHEMES = (
    "w4g128", "w4g64", "w4g32", "w4g16", "w4", "w4-asym", "w4-tensor", "w4g64-asym", "w4a8", "w4a8g64", "w4a8g32",
    "w3g64", "w8", "w8a8", "w8-asym", "w8g64", "fp8", "fp8-weight", "fp8-e5m2", "fp8-block", "qserve-g64", "nf4",
    "w8a8-static", "w8a8-atensor", "w8a8-asym", "w3a8g64", "w4a8g64-atensor", "fp8-static", "fp8-atensor",
    "fp8-e5m2-weight",
)  # fmt: skip


@pytest.mark.parametrize("float8", [True, False])
@pytest.mark.parametrize("rows", [64, 70])
@pytest.mark.parametrize("name", SCHEMES)
def test_a_weight_takes_what_its_layout_takes(
    name: str, rows: int, float8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On cards that know float8 and on others, whatever becomes of it as it is taken in."""
    monkeypatch.setattr(weights, "knows_float8", lambda device: float8)
    parsed, columns = Scheme.parse(name), 256
    source = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    one = Linear("one", codec(parsed.weight.kind).quantize(source, parsed))
    assert gpus.has_kernel(parsed, columns, float8) == (weights.against(one) is None)
    matrix, where = Matrix("one", rows, columns), GpuWeights("cpu", torch.bfloat16)
    where.take(one)
    if isinstance(one.weight, weights.TritonWeight):
        assert gpus.size(matrix, parsed, float8) == gpus.held(matrix, parsed, float8) == one.weight.read_bytes
        return
    assert list(where.refused) == ["one"]
    ref.linear(torch.zeros(1, columns, dtype=torch.bfloat16), [one])
    assert isinstance(one.weight, PackedTensor)
    assert one.dense is not None
    assert gpus.size(matrix, parsed, float8) == one.dense.nbytes
    stored = sum(part.nbytes for part in one.weight.parts.values())
    assert gpus.held(matrix, parsed, float8) == one.dense.nbytes + stored


@pytest.mark.parametrize("name, known", [("w8a8", False), ("w8", True), ("w4a8g64", True), ("fp8", True)])
def test_rows_whose_sums_may_overflow_have_no_kernel(name: str, known: bool) -> None:
    parsed, columns = Scheme.parse(name), weights.MOST_COLUMNS + 64
    assert gpus.has_kernel(parsed, weights.MOST_COLUMNS, True)
    assert gpus.has_kernel(parsed, columns, True) == known
    one = Linear("one", codec(parsed.weight.kind).quantize(torch.zeros(2, columns), parsed))
    assert (weights.against(one) is None) == known


def test_a_card_without_float8_is_planned_without_it() -> None:
    config = CONFIG
    for name, known in (("a100-80gb", False), ("a10", False), ("h100", True), ("rtx-4090", True), ("l40s", True)):
        assert gpu_spec(name).float8 is known
    storage, dense = Storage.named("fp8"), Storage()
    linears = gpus.weight_bytes(config, dense, False).linears
    assert gpus.weight_bytes(config, storage, True).linears == pytest.approx(linears / 2, rel=0.01)
    assert gpus.weight_bytes(config, storage, False).linears == pytest.approx(1.5 * linears, rel=0.01)
    assert gpus.weight_bytes(config, Storage.named("fp8-weight"), False).linears == linears
    made = comparison.plan(
        Subject("x", config, storage), Demand(4096), A100, Precisions([storage], [KV_SCHEMES["int8"]])
    )
    assert made.rows[0].references == 32 * 7
    assert "fp8 has linears without a kernel for this card: held in 16 bits there" in report.to_text(made)
    with user_error("kv_unsupported"):
        gpus.block_bytes(config, KV_SCHEMES["fp8"], False)


def test_a_dense_weight_takes_sixteen_bits() -> None:
    assert gpus.size(Matrix("one", 70, 256), None, True) == 2 * 70 * 256
    assert gpus.weight_bytes(CONFIG, Storage(), True).total == pytest.approx(16.06e9, rel=0.01)


@pytest.mark.parametrize("kv", ["float32", "bfloat16", "int8", "fp8", "int4"])
def test_keys_and_values_take_what_their_pages_take(kv: str) -> None:
    chosen, heads, width = KV_SCHEMES[kv], CONFIG.kv_heads, CONFIG.head_dim
    if kv == "int4":
        pages: PlainPages = NibblePages.rotated(1, costs.BLOCK, heads, width, chosen)
    else:
        dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "float32": torch.float32}.get(kv, torch.bfloat16)
        pages = PlainPages.make(1, costs.BLOCK, heads, width, dtype)
    held = pages.nbytes
    assert gpus.block_bytes(CONFIG, chosen, True) == CONFIG.layers * held
    with user_error("kv_unsupported"):
        gpus.block_bytes(CONFIG, KV_SCHEMES["kivi2"], True)


def test_the_ridges_of_an_a100() -> None:
    """The rows at which arithmetic takes longer than reading, by its data sheet."""
    a100 = gpu_spec("a100-80gb")
    for scheme, operations, bits, rows in (
        (None, "bf16", 16, 153), ("w4g128", "bf16", 4.25, 41), ("w8a8", "int8", 8, 153),
    ):  # fmt: skip
        parsed = None if scheme is None else Scheme.parse(scheme)
        assert multiplied_in(parsed) == operations
        assert costs.ridge(a100.operations[operations], a100.bandwidth, bits) == pytest.approx(rows, abs=0.6)


def test_the_least_latency_of_a_4090() -> None:
    """7B numbers at 16, 8 and 4 bits, read once at 1008 GB/s."""
    bandwidth = gpu_spec("rtx-4090").bandwidth
    for bits, milliseconds in ((16, 13.9), (8, 6.9), (4, 3.5)):
        assert 7e9 * bits / 8 / bandwidth * 1e3 == pytest.approx(milliseconds, abs=0.1)


def test_cards_are_named_and_whole() -> None:
    for name, each in GPUS.items():
        assert each.name == name
        assert each.operations.keys() == {"bf16", "int8", "fp8"}
        assert 20 * GB <= each.memory <= 200 * GB
        assert 0.2e12 <= each.bandwidth <= 10e12
        assert each.operations["int8"] >= each.operations["bf16"] >= (1e14 if each.verified else 4e13)
    with user_error("name_unknown"):
        gpu_spec("h300")
    with user_error("name_unknown", "did you mean h100"):
        gpu_spec("h1000")


def test_a_plan_for_a_card() -> None:
    h100 = gpu_spec("h100")
    subject, hardware = Subject("x", CONFIG, Storage()), Hardware(72 * GB, "h100", gpu=h100)
    made = comparison.plan(subject, Demand(4096, 16), hardware, limits=StepLimits())
    assert [row.weights for row in made.rows[::3]] == ["bf16", "w8a8", "w4g128"]  # no kernel of a card knows w3
    assert {row.kv.name for row in made.rows} == {"bfloat16", "int8", "int4"}
    for row in made.rows:
        assert sum(count for _, count in row.fit.table()) == 72 * GB
        assert row.fit.processes == 0
        assert row.fits
        assert row.speed is not None
        scheme = None if row.weights == "bf16" else Scheme.parse(row.weights).with_scale_dtype("bfloat16")
        read = sum(gpus.size(each, scheme if each.compressible else None, True) for each in costs.matrices(CONFIG))
        assert row.speed.read == pytest.approx(read + 16 * costs.kv_read_bytes(CONFIG, row.kv, 4096), rel=1e-3)
        assert row.speed.tokens_per_second <= 16 * h100.bandwidth / read
    text = report.to_text(made)
    assert "3,350 GB/s" in text
    assert "CPU kernel" not in text
    assert "not counted: what driver and graphs take" in text
    assert "a data sheet's GB are taken as 10^9 bytes" in text
    assert report.to_dict(made)["card"] == "h100"


def test_many_rows_are_limited_by_arithmetic() -> None:
    """At short contexts, past the ridge."""
    limits = StepLimits(rows=1024, sequences=1024)
    for users, limited in ((8, "bandwidth"), (1000, "compute")):
        compared = Precisions([Storage()], gpus.USUAL_KV)
        made = comparison.plan(Subject("x", CONFIG, Storage()), Demand(16, users), A100, compared, limits)
        assert made.rows[0].speed is not None
        assert made.rows[0].speed.limited_by == limited


@pytest.mark.parametrize(
    "users, weights_, limited",
    [(1, "w4g128", "bandwidth"), (32, "w4g128", "bandwidth"), (128, "w8a8", "bandwidth"), (512, "w8a8", "compute")],
)
def test_the_fastest_weights_for_so_many_users_and_why(users: int, weights_: str, limited: str) -> None:
    """Few rows want few bytes, many want fast products: the table of batch against scheme follows from the roofline.

    Past the ridge of 4-bit weights, 41 rows on an A100, their products in 16 bits take longer than reading 8 bits.
    """
    limits = StepLimits(rows=1024, sequences=1024)
    compared = Precisions(usual_storages(CONFIG, Storage()), [KV_SCHEMES["int8"]])
    made = comparison.plan(Subject("x", CONFIG, Storage()), Demand(64, users), A100, compared, limits)
    speeds = {row.weights: row.speed for row in made.rows if row.speed is not None}
    assert max(speeds, key=lambda name: speeds[name].tokens_per_second) == weights_
    chosen = speeds[weights_]
    assert chosen.limited_by == limited
    told = f"the fastest that fits, {weights_} with int8, could reach {chosen.tokens_per_second:,.0f} tokens/s"
    assert f"{told}, limited by {limited}" in report.answer(made)


# The command


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--shape", "llama-3.1-8b", *arguments])


def test_a_card_by_its_name() -> None:
    found = last_json(plan("--gpu", "h100", "--context", "4096", "--users", "16", "--json"))
    assert (found["card"], found["memory"], found["memory_source"]) == ("h100", 72 * GB, "h100")
    half = last_json(plan("--gpu", "h100", "--kv-fraction", "0.5", "--json"))["rows"][0]
    assert half["memory"] == 80 * GB
    left = half["memory"] - half["weights"] - half["step"]
    assert half["cache"] <= left / 2
    assert left / 2 - half["cache"] < half["block_bytes"] or half["blocks"] * 64 >= 32 * 131072
    refused(plan("--gpu", "h300", "--json"), BAD_INPUT, "name_unknown", as_json=True)
    refused(plan("--gpu", "h100", "--device", "cuda", "--json"), BAD_INPUT, "option_conflict", as_json=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_where_there_is_no_card_one_sentence_says_so() -> None:
    for device in ("cuda", "cuda:1"):
        refused(plan("--device", device, "--json"), BAD_INPUT, "device_unavailable", as_json=True)
    refused(plan("--device", "mps", "--json"), BAD_INPUT, "device_unsupported", as_json=True)


class Memory:
    """That of a card which is not there."""

    def __init__(self, device: torch.device) -> None:
        assert device == torch.device("cuda:1")

    def free(self) -> int:
        return 24 * GB


def test_the_card_at_hand_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "require", lambda device: None)
    monkeypatch.setattr("attar.engine.memory_profile.GpuMemory", Memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Card")
    monkeypatch.setattr(weights, "knows_float8", lambda device: False)
    monkeypatch.setattr(bottleneck, "card_limits", lambda device: (600.0, {"bf16": 125e3, "int8": 250e3, "fp8": 125e3}))
    found = last_json(plan("--device", "cuda:1", "--context", "2048", "--json"))
    assert found["memory_source"] == "free on cuda:1, A Card"
    assert found["memory"] == int(0.9 * 24 * GB)
    assert (found["bandwidth"], found["int8_rate"]) == (600e9, 250e12)
    assert found["rows"][0]["speed"]["tokens_per_second"] == pytest.approx(600e9 / 15.2e9, rel=0.05)
    given = last_json(plan("--device", "cuda:1", "--context", "2048", "--bandwidth", "300GB", "--json"))
    assert given["bandwidth"] == 300e9

    def full(device: torch.device) -> NoReturn:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(bottleneck, "card_limits", full)
    refused(plan("--device", "cuda:1", "--json"), BAD_INPUT, "memory_insufficient", as_json=True)


def test_a_plan_for_a_named_card_needs_neither_torch_nor_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> NoReturn:
        raise AssertionError("something was measured here")

    monkeypatch.setattr("attar.kernels.native.limits.measure", never)
    monkeypatch.setattr(dispatch, "require", never)
    assert json.loads(plan("--gpu", "l40s", "--json").stdout.splitlines()[-1])["fits"]
