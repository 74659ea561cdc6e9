"""What keeps memory low must not change a byte: weights cast in parts, Hessians in runs, rows and tables on disk.

How low it is, `bench/compress_memory.py` measures, on the shape of a model people use.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attar.checkpoints.receipts.verify import verify
from attar.checkpoints.sources import hf
from attar.compression import memory
from attar.compression.block import hessians
from attar.compression.calibration import hidden_states
from attar.compression.calibration.hidden_states import Rows
from attar.compression.runs.pipeline import compress
from attar.compression.solvers.rounding import rtn
from attar.formats.scheme import Grid, Scheme
from attar.kernels import ref
from attar.kernels.operands import Linear

Ids = list[list[int]]

SCHEMES = (
    Scheme(Grid(bits=4, granularity="group", group_size=32), scale_dtype="bfloat16"),
    Scheme(Grid(bits=3, symmetric=False, granularity="group", group_size=64)),
    Scheme(Grid(granularity="tensor"), layout="plain"),
    Scheme(Grid("e4m3"), layout="plain"),
)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("recipe", ["gptq-w4g32", "awq+gptq-w4g64"])
def test_hessians_in_runs_give_the_same_bytes(
    recipe: str, tiny: Path, calibration: Ids, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in mixtures of experts, whose Hessians are too many for one run."""
    watched: list[int] = []
    gather = hessians._gather

    def counted(*arguments: Any) -> None:
        watched.append(len(arguments))
        gather(*arguments)

    monkeypatch.setattr(hessians, "_gather", counted)
    compress(tiny, tmp_path / "one", recipe=recipe, calibration=calibration)
    once = len(watched)
    monkeypatch.setattr(hessians, "HESSIANS", 0)
    compress(tiny, tmp_path / "many", recipe=recipe, calibration=calibration)
    assert len(watched) - once > once, "a run for each group, rather than one for all four"
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "many")


def test_most_numbers_in_memory_at_once() -> None:
    assert hessians.most([4]) == 8  # a Hessian and its factor
    assert hessians.most([1, 1, 1, 16]) == 32  # the early ones are gone when the last is factored
    assert hessians.most([16, 1, 16]) == 49


def test_the_output_matrix_in_parts(tiny: Path, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored apart, and, tied, under either name: the probes that came out are those of the whole model."""
    monkeypatch.setattr(hidden_states, "HEAD_ROWS", 100)
    for source in (tiny, stories):
        compress(source, tmp_path / source.name, recipe="rtn-w8")
        assert verify(tmp_path / source.name).ok


def test_rows_of_tables(tiny: Path) -> None:
    checkpoint = hf.Checkpoint.open(tiny)
    ids = torch.tensor([0, 1, 2, 7, 5, 6, 255])
    some, names = checkpoint.rows(ids), checkpoint.config.names
    for name in (names.embed, names.head):
        assert torch.equal(some.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.weight")[ids])
    head = some.linear(names.head).weight
    assert isinstance(head, torch.Tensor)
    assert torch.equal(head, checkpoint.tensor(f"{names.head}.weight")[ids])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_some_rows_of_a_packed_weight(scheme: Scheme) -> None:
    packed = rtn.solve(torch.randn(37, 128, generator=torch.Generator().manual_seed(0)), scheme)
    whole, into = packed.dequantize(), torch.empty(12, 128)
    assert torch.equal(packed.dequantize(rows=slice(5, 17)), whole[5:17])
    assert packed.dequantize(rows=slice(5, 17), out=into) is into
    assert torch.equal(into, whole[5:17])


def test_a_weight_that_is_not_kept_gives_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ref, "WEIGHTS_AT_ONCE", 10 * 128)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 128, generator=generator)
    weight = torch.randn(37, 128, generator=generator).bfloat16()
    bias = torch.randn(37, generator=generator)
    kept = Linear("kept", rtn.solve(weight, SCHEMES[0]), bias)
    passing = Linear("passing", kept.weight, bias, keep_dense=False)
    cast = Linear("cast", weight)
    out = ref.linear(x, (kept, passing, cast))
    assert kept.dense is not None
    assert passing.dense is None
    torch.testing.assert_close(out[:, 37:74], out[:, :37])
    torch.testing.assert_close(out[:, 74:], x @ weight.float().T)


def test_rows_on_disk(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 5, generator=generator)
    rows = Rows(tmp_path, 10, 5)
    for part in x.split(4):
        rows.append(part)
    assert len(rows) == 10
    assert [len(some) for some in rows.batches(4)] == [4, 4, 2]
    assert torch.equal(torch.cat([rows.read(some) for some in rows.batches(3)]), x[:10])
    assert list(tmp_path.iterdir()) == [], "nothing is left behind, whatever happens"
    rows.close()


def test_large_models_run_fewer_rows_at_once(tiny: Path) -> None:
    config = hf.Checkpoint.open(tiny).config
    assert hidden_states.rows_at_once(config) == hidden_states.ROWS_AT_ONCE
    assert hidden_states.rows_at_once(replace(config, intermediate=8192)) == 512  # Llama-3.2-1B's


@pytest.mark.parametrize("most", [memory.WIDEST, memory.USUAL])
def test_limits_of_the_heap_nest(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some releases of glibc refuse a threshold beyond `most`."""
    limits: dict[int, int] = {}

    def mallopt(which: int, value: int) -> bool:
        if which == memory._MMAP_THRESHOLD and value > most:
            return False
        limits[which] = value
        return True

    def found() -> tuple[int, int]:
        return limits[memory._MMAP_THRESHOLD], limits[memory._TRIM_THRESHOLD]

    monkeypatch.setattr(memory, "_mallopt", mallopt)
    usual = (memory.USUAL, 2 * memory.USUAL)
    with memory.large_blocks_kept():  # a pass outside a run
        assert found() == (most, memory.KEPT)
    assert found() == usual
    with memory.large_blocks_apart():
        assert found() == (memory.LARGE, 2 * memory.LARGE)
        with memory.large_blocks_kept():
            assert found() == (most, memory.KEPT)
        assert found() == (memory.LARGE, 2 * memory.LARGE)
    assert found() == usual
