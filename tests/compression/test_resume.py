"""Notes for a run that resumes: there whole or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from attar.compression import resume


def test_a_note_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    resume.write_note(path, {"blocks": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        resume.write_note(path, {"blocks": 2, "error": math.nan})
    assert json.loads(path.read_text()) == {"blocks": 1}
    resume.write_note(path, {"blocks": 2})
    assert json.loads(path.read_text()) == {"blocks": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["note.json"]


def test_what_differs_is_said_with_both_values_where_they_are_short() -> None:
    then = {"threads": 2, "calibration": "a" * 64, "recipe": {"recipe": "rtn-w4"}, "seed": 0, "drawn": 3}
    now = {"threads": 1, "calibration": "b" * 64, "recipe": {"recipe": "rtn-w8"}, "seed": 0}
    assert resume.differences(now, then) == "calibration, drawn, recipe, threads (1 now, 2 then)"
    assert resume.differences(now, now) == ""
