"""What calibration is taken from, by name, and the tables at the ends of a model, some rows at a time."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from attar.checkpoints import hf
from attar.compression import calibrate
from attar.compression.calibrate import SELF, Amount, HiddenStates
from attar.compression.solvers import rtn
from attar.formats.scheme import Scheme


@pytest.mark.parametrize(
    ("calibration", "text", "drawn", "count"),
    [
        ("some.txt", True, False, 128),
        (Path("some.txt"), True, False, 128),
        (SELF, False, True, 128),
        (Path(SELF), False, True, 128),
        ([[1, 2], [3, 4]], False, False, 2),
    ],
)
def test_what_it_is_taken_from(calibration: calibrate.Calibration, text: bool, drawn: bool, count: int) -> None:
    assert calibrate.is_text(calibration) == text
    assert calibrate.is_drawn(calibration) == drawn
    assert calibrate.count(calibration, Amount()) == count
    assert not calibrate.is_text(None)
    assert not calibrate.is_drawn(None)


def test_drawn_text_of_another_model_or_amount_has_another_name() -> None:
    names = {calibrate.drawn_name("ab" * 32, amount) for amount in (Amount(), Amount(64), Amount(seed=1))}
    assert len(names | {calibrate.drawn_name("cd" * 32, Amount())}) == 4


def test_only_a_text_needs_a_tokenizer(demo: Path, tiny: Path) -> None:
    assert calibrate.tokenizer_for("some.txt", demo) is not None
    for calibration in (SELF, [[1, 2]]):
        assert calibrate.tokenizer_for(calibration, tiny) is None, "which has none"


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
            calibrate.embed(checkpoint, ids, states, stored)  # type: ignore[arg-type]
            assert torch.equal(states.read(range(2)), wanted[ids.flatten()])


def test_rows_of_the_output_matrix(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "HEAD_ROWS", 100)
    checkpoint = hf.Checkpoint.open(tiny)
    ids, heads = zip(*calibrate.head_rows(checkpoint), strict=True)
    assert [len(each) for each in ids] == [100, 100, 56]
    assert torch.equal(torch.cat(ids), torch.arange(256))
    weights = [head.weight for head in heads]
    assert all(isinstance(weight, torch.Tensor) for weight in weights)
    assert torch.equal(torch.cat(weights), checkpoint.tensor("lm_head.weight"))  # type: ignore[arg-type]
