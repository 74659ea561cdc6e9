"""What learning gains on the embedded model, with few tokens: on held-out text, by KL divergence from the original."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attar.checkpoints.sources import hf
from attar.checkpoints.sources.hf import Checkpoint
from attar.compression.calibration.amount import Amount
from attar.compression.calibration.texts import sample_from
from attar.compression.recipe.methods import Tune
from attar.compression.recipe.recipe_file import recipe_from_dict
from attar.compression.runs.pipeline import compress
from attar.compression.training import tune
from attar.metrics.divergence import compare
from attar.model.cache import ForwardBatch
from attar.model.decoder import Decoder

TUNED = 0.9  # of the KL without, at most
LEARNED = 0.9  # of the KL of rounding to nearest on ranges of least error, at most


@pytest.fixture(scope="module")
def base(demo: Path) -> Decoder:
    return hf.load(demo, torch.float32)


@pytest.fixture(scope="module")
def calibration(base: Decoder) -> Tensor:
    return sample_from(base, Amount(12, 64, seed=0))


@pytest.fixture(scope="module")
def rounded(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned") / "rtn"
    compress(demo, folder, recipe=recipe_from_dict({"recipe": "rtn-w3g128", "scale_search": "mse"}))
    return folder


@pytest.fixture(scope="module")
def held_out(base: Decoder) -> Tensor:
    return sample_from(base, Amount(8, 64, seed=1))


def divergence(base: Decoder, folder: Path, ids: Tensor) -> float:
    step = ForwardBatch((ids.shape[1],) * len(ids), ids.shape[1])
    logits = (model.forward(ids.flatten(), step) for model in (base, hf.load(folder, torch.float32)))
    return float(compare(*logits, ids.flatten()).kl.mean())


@pytest.mark.slow
def test_autoround(
    demo: Path, base: Decoder, rounded: Path, calibration: Tensor, held_out: Tensor, tmp_path: Path
) -> None:
    recipe = recipe_from_dict({"recipe": "autoround-w3g128", "steps": 16, "batch": 128})
    found = compress(demo, tmp_path / "out", recipe=recipe, calibration=calibration.tolist())
    assert divergence(base, found.path, held_out) < LEARNED * divergence(base, rounded, held_out)


def test_tuning(
    demo: Path, base: Decoder, rounded: Path, calibration: Tensor, held_out: Tensor, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    options = Tune(epochs=3, rate=3e-3, batch=128)
    found = tune.run(Checkpoint.open(demo), rounded, tmp_path / "state", (calibration, None), options)
    tuned = tmp_path / "tuned"
    shutil.copytree(rounded, tuned)
    tensors = load_file(tuned / "model.safetensors") | found.tensors
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    assert divergence(base, tuned, held_out) < TUNED * divergence(base, rounded, held_out)
