"""A child process under limits: its deadline. `test_template.py` and `test_grammar_proof.py` have the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from attar.text import limited_child as module


def test_a_deadline_asks_what_the_processor_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, used = [100.0], [5.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))  # here alone
    monkeypatch.setattr(module, "_processor_seconds", lambda pid: used[0])
    busy, starved = module._Deadline(1, 1.0), module._Deadline(1, 1.0)
    clock[0], used[0] = 100.75, 5.75
    assert busy.left() == 0.25
    clock[0] = 101.0
    with pytest.raises(TimeoutError):
        busy.left()
    used[0] = 5.125
    assert starved.left() == 0.375, "of half a second an eighth was had"
    clock[0] = 100 + module.STARVED_SECONDS
    with pytest.raises(TimeoutError):
        starved.left()
    monkeypatch.setattr(module, "_processor_seconds", lambda pid: None)
    unknown = module._Deadline(1, 1.0)
    clock[0] += 1
    with pytest.raises(TimeoutError):
        unknown.left()
    patient = module._Deadline(1, 2 * module.STARVED_SECONDS)
    clock[0] += module.STARVED_SECONDS
    assert patient.left() == module.STARVED_SECONDS
