"""Engines that other replicas take over blocks from, and those that say why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.engine import startup
from attar.engine.blocks.opening import keeps_to_itself
from attar.engine.startup import start_engine
from attar.protocol.settings import BLOCKS_SOCKET, Settings

GB = 10**9


@pytest.mark.parametrize("hands_over", [True, False])
def test_a_replica_tells_where_its_blocks_are(hands_over: bool, demo: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    made, ready = start_engine(
        Settings(
            str(demo), str(tmp_path / "engine"), memory=GB, max_cached_tokens=256, threads=1, hands_over=hands_over
        )
    )
    place = tmp_path / BLOCKS_SOCKET
    assert ready.blocks_at == (str(place) if hands_over else "")
    assert place.exists() is hands_over
    if made.moves is not None:
        made.moves.close()
    assert not place.exists()


@pytest.mark.parametrize(("bits", "sliding", "tower"), [("", False, False), ("b", True, False), ("b", False, True)])
def test_blocks_that_others_cannot_use_stay(bits: str, sliding: bool, tower: bool) -> None:
    assert keeps_to_itself(bits, sliding, tower)
    assert not keeps_to_itself("b", False, False)


def test_an_engine_that_hands_nothing_over_says_why(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "bits_of", lambda settings, model: "")
    place = str(tmp_path / "engine")
    made, ready = start_engine(Settings(str(demo), place, memory=GB, max_cached_tokens=256, threads=1, hands_over=True))
    assert ready.blocks_at == ""
    assert made.moves is None
    assert "replicas take over no cached blocks from each other" in capsys.readouterr().err
