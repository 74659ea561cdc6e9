"""Notes for a run that resumes: there whole or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from attar.compression import state


def test_a_note_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    state.put(path, {"blocks": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        state.put(path, {"blocks": 2, "error": math.nan})
    assert json.loads(path.read_text()) == {"blocks": 1}
    state.put(path, {"blocks": 2})
    assert json.loads(path.read_text()) == {"blocks": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["note.json"]
