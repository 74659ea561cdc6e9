"""Rounding that knows the loss or the original model, on the walk: what it aims at, and that a killed run resumes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from attar.compression.calibration import loss_weights
from attar.compression.recipe.recipe_file import load_recipe, recipe_from_dict
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress, compress_request
from attar.compression.solvers.rounding import gptq, qronos
from tests.errors import user_error

Ids = list[list[int]]

RECIPES = ("guided-w4g32", "awq+qronos-w3g64-asym", "squeezellm-lut3-s45")
BOTH = {"recipe": "guided-w4g32", "couple": False, "correct": True, "residual": 0.5, "polish": 2, "guide": 3}


class Stop(Exception):
    pass


def stop_after(stage: str, count: int):  # type: ignore[no-untyped-def]
    def progress(at: str, done: int, total: int) -> None:
        if at == stage and done == count:
            raise Stop

    return progress


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, "both"])
def test_a_stopped_run_resumes_to_the_same_bytes(name: str, tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    recipe = recipe_from_dict(BOTH) if name == "both" else load_recipe(name)
    calibration = calibration[:4]
    compress(tiny, tmp_path / "whole", recipe=recipe, calibration=calibration)
    stops = [("blocks", 1), ("blocks", 2)]
    if name != "awq+qronos-w3g64-asym":
        stops = [("gradients", 2), *stops[:1]]
    for stage, count in stops:
        with pytest.raises(Stop):
            compress_request(
                CompressionRequest(tiny, tmp_path / "out", recipe=recipe, calibration=calibration, calib_memory=0),
                stop_after(stage, count),
            )
    compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration)
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


def test_what_squeezellm_weighed_stays_as_it_is(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    with user_error("recipe_conflict"):
        compress(tiny, tmp_path / "out", recipe="awq+squeezellm-lut4", calibration=calibration)


def test_a_weighted_hessian_is_the_weighted_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(5000, 8, generator=generator), torch.rand(5000, generator=generator)
    found = gptq.Hessian(8)
    found.add(x[:3000], weights[:3000])
    found.add(x[3000:], weights[3000:])
    torch.testing.assert_close(found.mean, (x * weights[:, None]).T @ x / weights.sum())
    equal, plain = gptq.Hessian(8), gptq.Hessian(8)
    equal.add(x, torch.full((5000,), 3.0))
    plain.add(x)
    torch.testing.assert_close(equal.mean, plain.mean)


def test_weights_of_tokens_are_means_over_rows() -> None:
    g = torch.randn(6, 7, generator=torch.Generator().manual_seed(0))
    found = loss_weights.weights(g, 3)
    assert found.shape == (6, 3)
    torch.testing.assert_close(found[:, 0], (g[:, :3] ** 2).sum(1) / 3)
    torch.testing.assert_close(found[:, 2], g[:, 6] ** 2)
    assert loss_weights.weights(g, 100).shape == (6, 7)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_corrected_weight_is_the_ridge_solution(weighted: bool) -> None:
    """The same as least squares on rows to which the damping adds some of its own."""
    generator = torch.Generator().manual_seed(1)
    x, noise = (torch.randn(300, 12, generator=generator) for _ in range(2))
    seen = x + 0.3 * noise @ torch.randn(12, 12, generator=generator)
    weight = torch.randn(5, 12, generator=generator)
    counts = torch.rand(300, generator=generator) if weighted else torch.ones(300)
    hessian, drift = gptq.Hessian(12), qronos.Drift(12)
    for rows in (slice(0, 100), slice(100, 300)):
        hessian.add(seen[rows], counts[rows] if weighted else None)
        drift.add(x[rows], seen[rows], counts[rows] if weighted else None)
    found = qronos.corrected(weight, drift, gptq.prepare(hessian, 0.02))
    ridge = (0.02 * hessian.mean.diagonal().mean()).sqrt() * torch.eye(12)
    root = (counts / counts.sum()).sqrt()[:, None]
    left, right = torch.cat([root * seen, ridge]), torch.cat([root * x, ridge]) @ weight.T
    torch.testing.assert_close(found, torch.linalg.lstsq(left, right).solution.T, rtol=1e-3, atol=1e-4)
    assert float((seen @ (found - weight).T).norm()) > 0.1


def test_a_residual_stream_is_corrected_by_what_adds_to_it() -> None:
    """As least squares for outputs that are to be as much larger as the stream lacks."""
    generator = torch.Generator().manual_seed(3)
    x, lacks, weight = (torch.randn(shape, generator=generator) for shape in ((200, 6), (200, 4), (4, 6)))
    seen = x + 0.2 * torch.randn(200, 6, generator=generator)
    hessian, drift = gptq.Hessian(6), qronos.Drift(6, 4)
    hessian.add(seen)
    drift.add(x, seen, None, lacks)
    found = qronos.corrected(weight[1:3], drift, gptq.prepare(hessian, 0.0), 0.7, slice(1, 3))
    expected = torch.linalg.lstsq(seen, x @ weight[1:3].T + 0.7 * lacks[:, 1:3]).solution.T
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_outputs_that_are_divided() -> None:
    """As if the gradients had been those of the folded model."""
    generator = torch.Generator().manual_seed(2)
    x, g, scales = (torch.randn(shape, generator=generator) for shape in ((50, 4), (50, 6), (6,)))
    found = []
    for gradients in (g, g * scales):
        taker = loss_weights._Taker((6, 4), 0, True, False)
        taker(x, gradients)
        found += taker.numbers()
    divided = loss_weights.Hints(None, found[0]).divided(scales).outputs
    assert divided is not None
    torch.testing.assert_close(divided, found[1])


def test_rows_that_are_scaled_are_not_weighed_before(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    recipe = recipe_from_dict({"recipe": "awq+gptq-w4g32", "guide": 2})
    with user_error("recipe_conflict"):
        compress(tiny, tmp_path / "out", recipe=recipe, calibration=calibration)


def test_tuning_judges_on_text_that_the_walk_has_not_seen(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    recipe = recipe_from_dict({"recipe": "gptq+tune-w4g32", "epochs": 1})
    compress(tiny, tmp_path / "tuned", recipe=recipe, calibration=calibration)
    compress(tiny, tmp_path / "plain", recipe="gptq-w4g32", calibration=calibration[:-1])
    tuned, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "plain"))
    codes = [name for name in plain if name.endswith("weight_packed")]
    assert len(codes) == 21
    assert all(torch.equal(tuned[name], plain[name]) for name in codes)
