"""The tables at the ends of a model, some rows at a time."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from attar.checkpoints.sources import hf
from attar.compression.calibration import hidden_states
from attar.compression.calibration.hidden_states import HiddenStates
from attar.compression.solvers.rounding import rtn
from attar.formats.scheme import Scheme


def test_rows_of_the_embedding_as_they_are_stored(tiny: Path, tmp_path: Path) -> None:
    """Codes and scales are a row's own, so rows that are needed are rounded as in the whole table."""
    checkpoint, ids, scheme = hf.Checkpoint.open(tiny), torch.tensor([[7, 250, 7], [0, 3, 9]]), Scheme.parse("w4g32")
    table = checkpoint.tensor("model.embed_tokens.weight")
    for stored, wanted in (
        (None, table.float()),
        (lambda rows: None, table.float()),
        (lambda rows: rtn.solve(rows, scheme), rtn.solve(table, scheme).dequantize()),
    ):
        with closing(HiddenStates(tmp_path / "states.f32", (2, 3, 128), 0)) as states:
            hidden_states.embed(checkpoint, ids, states, stored)  # type: ignore[arg-type]
            assert torch.equal(states.read(range(2)), wanted[ids.flatten()])


def test_rows_of_the_output_matrix(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "HEAD_ROWS", 100)
    checkpoint = hf.Checkpoint.open(tiny)
    ids, heads = zip(*hidden_states.head_rows(checkpoint), strict=True)
    assert [len(each) for each in ids] == [100, 100, 56]
    assert torch.equal(torch.cat(ids), torch.arange(256))
    weights = [head.weight for head in heads]
    assert all(isinstance(weight, torch.Tensor) for weight in weights)
    assert torch.equal(torch.cat(weights), checkpoint.tensor("lm_head.weight"))  # type: ignore[arg-type]
