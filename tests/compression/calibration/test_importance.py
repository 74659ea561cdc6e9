"""Importances, against what transformers' linears read; written, read again, and refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from attar.checkpoints.sources import hf, imatrix
from attar.compression.calibration import importance
from tests.errors import user_error

Ids = list[list[int]]

TO_TRANSFORMERS = 2e-2  # relative: it computes in bfloat16 products what we compute in float32


@pytest.mark.parametrize("name", ["m.gguf", "m.dat"])
def test_they_are_the_mean_squares_of_what_linears_read(
    name: str, tiny: Path, calibration: Ids, tmp_path: Path
) -> None:
    done = importance.make(tiny, tmp_path / name, calibration=calibration)
    assert (done.tokens, done.matrices) == (8 * 32, 3 * 7 + 1)
    ours = importance.known(tmp_path / name, hf.Checkpoint.open(tiny))
    model, theirs = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), {}
    for module, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear):

            def hook(_: object, inputs: tuple[torch.Tensor], module: str = module) -> None:
                theirs[module] = inputs[0].square().mean((0, 1))

            linear.register_forward_pre_hook(hook)
    with torch.no_grad():
        model(torch.tensor(calibration))
    assert ours.keys() == theirs.keys()
    for module, mean in theirs.items():
        torch.testing.assert_close(ours[module], mean, rtol=TO_TRANSFORMERS, atol=0, msg=module)
    assert list(tmp_path.iterdir()) == [tmp_path / name], "nothing is left behind"
    with user_error("output_exists"):
        importance.make(tiny, tmp_path / name, calibration=calibration)


def test_files_of_another_model_are_refused(tiny: Path, calibration: Ids, tmp_path: Path) -> None:
    importance.make(tiny, tmp_path / "m.gguf", calibration=calibration)
    found = imatrix.read(tmp_path / "m.gguf")
    checkpoint = hf.Checkpoint.open(tiny)
    less = {name: mean for name, mean in found.means.items() if "blk.1." not in name}
    imatrix.write(tmp_path / "less.gguf", imatrix.Imatrix(less, found.counts, 1, 1))
    with user_error("imatrix_mismatch"):
        importance.known(tmp_path / "less.gguf", checkpoint)
    wide = {name: torch.ones(64) for name in found.means}
    imatrix.write(tmp_path / "wide.gguf", imatrix.Imatrix(wide, found.counts, 1, 1))
    with user_error("imatrix_mismatch"):
        importance.known(tmp_path / "wide.gguf", checkpoint)
    with user_error("file_not_found"):
        importance.known(tmp_path / "none.gguf", checkpoint)
    without_head = {name: mean for name, mean in found.means.items() if name != "output.weight"}
    imatrix.write(tmp_path / "headless.gguf", imatrix.Imatrix(without_head, found.counts, 1, 1))
    assert "lm_head" not in importance.known(tmp_path / "headless.gguf", checkpoint), "llama.cpp leaves it out too"
