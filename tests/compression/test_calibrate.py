"""What calibration is taken from, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.compression import calibrate
from attar.compression.calibrate import SELF, Amount


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
