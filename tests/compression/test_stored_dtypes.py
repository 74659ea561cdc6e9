"""Every family as its checkpoints are usually stored, in 16 bits: norms and embeddings are then of another dtype than
what the walk computes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attar.checkpoints.folder import Folder
from attar.checkpoints.sources import hf
from attar.compression.runs.pipeline import compress
from attar.model.cache import ForwardBatch
from tests.compression.rotation.test_rotation import CASES, model_of

KINDS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
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


@pytest.mark.parametrize("case", CASES)
def test_what_is_stored_in_several_dtypes_keeps_them(case: str, tmp_path: Path) -> None:
    """Norms, biases, routers and embeddings stay as they are stored, bit for bit, whatever stands beside them."""
    source, made = tmp_path / "model", tmp_path / "out"
    model_of(*CASES[case]).save_pretrained(source)
    names = sorted(load_file(source / "model.safetensors").items())
    stored = {name: tensor.to(KINDS[i % 4]).contiguous() for i, (name, tensor) in enumerate(names)}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    compress(source, made, recipe="rtn-w8")
    before, after = Folder(source), Folder(made)
    kept = [name for name in before.names() if after.has(name) and after.info(name).dtype != "int8"]
    assert len(kept) > 4
    assert all(before.info(name) == after.info(name) for name in kept)
    assert all(torch.equal(before.read(name), after.read(name)) for name in kept)
    ids = torch.randint(3, 96, (24,), generator=torch.Generator().manual_seed(2))
    ours, theirs = (
        hf.load(folder, torch.float32).forward(ids, ForwardBatch((24,), 24), None) for folder in (made, source)
    )
    assert (ours - theirs).norm() <= LOST * theirs.norm()


def test_norms_that_a_transform_changes_keep_their_dtype(tmp_path: Path) -> None:
    source, made = tmp_path / "model", tmp_path / "out"
    model_of(*next(iter(CASES.values()))).to(torch.bfloat16).save_pretrained(source)
    stored = {n: t.double() if "norm" in n else t for n, t in load_file(source / "model.safetensors").items()}
    save_file(stored, source / "model.safetensors", metadata={"format": "pt"})
    ids = torch.randint(3, 96, (6, 24), generator=torch.Generator().manual_seed(2))
    compress(source, made, recipe="smoothquant+rtn-w8a8", calibration=ids)
    before, after = Folder(source), Folder(made)
    norms = [name for name in before.names() if "norm" in name]
    assert all(before.info(name) == after.info(name) for name in norms)
    assert not all(torch.equal(before.read(name), after.read(name)) for name in norms)
