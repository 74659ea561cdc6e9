"""Every family as its checkpoints are usually stored, in 16 bits: norms and embeddings are then of another dtype than
what the walk computes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.model.cache import ForwardBatch
from tests.compression.rotation.test_rotation import CASES, model_of

LOST = 0.1  # of logits' norm, by 8-bit weights: where something is wrong it is about 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_what_is_stored_in_sixteen_bits_is_compressed(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model_of(*CASES[case]).to(dtype).save_pretrained(tmp_path / "model")
    ids = torch.randint(3, 96, (6, 24), generator=torch.Generator().manual_seed(2))
    compress(tmp_path / "model", tmp_path / "out", recipe="gptq-w8", calibration=ids)
    ours, theirs = (
        hf.load(tmp_path / name, torch.float32).forward(ids[0], ForwardBatch((24,), 24), None)
        for name in ("out", "model")
    )
    assert (ours - theirs).norm() <= LOST * theirs.norm()
