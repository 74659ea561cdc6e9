"""What a run asks once its output is written: the cost, on the device that blocks were compressed on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attar.checkpoints import sources
from attar.compression import run
from attar.compression.run import Run
from attar.kernels import ops


def measuring(device: str) -> Run:
    """What is asked of a run that has written its output."""
    made = Run.__new__(Run)
    made.order = SimpleNamespace(device=device, source=SimpleNamespace(folder=SimpleNamespace(path=Path("original"))))  # type: ignore[assignment]
    made.made, made.report = Path("output"), lambda stage, done, total: None
    return made


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.bfloat16), ("cpu", torch.float32)])
def test_the_cost_is_measured_where_blocks_were_compressed(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    monkeypatch.setattr(ops, "store", lambda device, dtype: f"a store of {device}")
    monkeypatch.setattr(sources, "load", lambda *how: loaded.append(how))
    monkeypatch.setattr(run, "measure", lambda *_, **__: SimpleNamespace(to_dict=lambda: {"kl_mean": 0.5}))
    assert measuring(device).measure([1, 2], SimpleNamespace(added_bos=None)) == {"kl_mean": 0.5}  # type: ignore[arg-type]
    store = None if device == "cpu" else "a store of cuda"
    assert loaded == [(Path(name), dtype, None, store) for name in ("output", "original")]


def test_a_card_without_room_for_both_models_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(ops, "store", lambda device, dtype: None)
    monkeypatch.setattr(sources, "load", full)
    with pytest.raises(ValueError, match=r"cuda has too little memory .* without --eval .*\(no room\)"):
        measuring("cuda").measure([1, 2], SimpleNamespace(added_bos=None))  # type: ignore[arg-type]
