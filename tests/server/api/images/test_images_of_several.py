"""Large bodies where several models are served: for the one that takes images."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from attar.images.settings import read_settings
from attar.server.http.limits import MAX_BODY
from attar.server.models.served import ModelSpec
from attar.server.options import ServerOptions
from attar.text.tokenizer import Tokenizer
from tests.images import oracle
from tests.server.fake_engine import FakeEngine
from tests.server.models import test_pool as pool

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")
from tests.server.api.images.test_images_served import image, picture_file


def test_a_large_body_is_for_the_model_that_takes_images(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_settings(oracle.write("gemma3", tmp_path))
    special = min(tokenizer.special_ids)
    assert found is not None
    seeing = replace(found, image_token=special, place_token=special, end_token=None)

    def spec(settings: Any, size: int, own: Tokenizer) -> ModelSpec:
        return ModelSpec(settings, size, own, images=seeing if settings.name == "a" else None)

    def engine(path: Path, own: Tokenizer, name: str) -> FakeEngine:
        return FakeEngine(path, own, name=name, images=name == "a")

    monkeypatch.setattr(pool, "ModelSpec", spec)
    monkeypatch.setattr(pool, "FakeEngine", engine)
    several = pool.Several(tmp_path, tokenizer, ServerOptions(port=0))
    try:
        body = partial(_body, image(picture_file(1300)))
        assert len(body("a")) > MAX_BODY
        # Whether the embedded model's template has a place for it is not the question here.
        assert several.post("/v1/chat/completions", body("a")).status in (200, 400)
        assert several.post("/v1/chat/completions", body("b")).code == "body_too_large"
    finally:
        assert several.stop()


def _body(shown: dict[str, Any], model: str) -> bytes:
    return json.dumps({"model": model, "messages": [{"role": "user", "content": [shown]}], "max_tokens": 1}).encode()
