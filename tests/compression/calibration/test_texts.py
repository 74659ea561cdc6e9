"""What calibration is taken from, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from attar.compression.calibration import texts
from attar.compression.calibration.amount import (
    SELF,
    Amount,
    Calibration,
    count_sequences,
    drawn_name,
    is_drawn,
    is_text,
)
from attar.model.decoder import Decoder
from tests.errors import user_error


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
def test_what_it_is_taken_from(calibration: Calibration, text: bool, drawn: bool, count: int) -> None:
    assert is_text(calibration) == text
    assert is_drawn(calibration) == drawn
    assert count_sequences(calibration, Amount()) == count
    assert not is_text(None)
    assert not is_drawn(None)


def test_drawn_text_of_another_model_or_amount_has_another_name() -> None:
    names = {drawn_name("ab" * 32, amount) for amount in (Amount(), Amount(64), Amount(seed=1))}
    assert len(names | {drawn_name("cd" * 32, Amount())}) == 4


def test_only_a_text_needs_a_tokenizer(demo: Path, tiny: Path) -> None:
    assert texts.tokenizer_for("some.txt", demo) is not None
    for calibration in (SELF, [[1, 2]]):
        assert texts.tokenizer_for(calibration, tiny) is None, "which has none"


def test_no_text_is_drawn_where_the_first_token_is_none_of_the_model_s(tiny_decoder: Callable[..., Decoder]) -> None:
    """As in small models of GPT-2's shape, whose configuration keeps its default of 50,256."""
    decoder = tiny_decoder()
    decoder.config = replace(decoder.config, bos_ids=(decoder.config.vocab_size,))
    with user_error("config_invalid"):
        texts.sample_from(decoder, Amount(2, 4, 0))
