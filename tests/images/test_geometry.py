"""Sizes equal those of transformers at real settings, by arithmetic alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.errors import UserError
from attar.images.decoding import count_rows
from attar.images.geometry import MAX_ASPECT, layout
from attar.images.settings import PixelSettings, read_settings
from attar.protocol.image_limits import MAX_PIXELS, MAX_TILE_BYTES
from tests.images import oracle

pytest.importorskip("PIL.Image", reason="needs Pillow, of the extra [vision]")

PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
NEXT = PixelSettings("llava_next", 3, tile=336, pinpoints=PINPOINTS, patch=14)
SMOL = PixelSettings("idefics3", 1, edge=2048, tile=512)
IDEFICS = PixelSettings("idefics3", 1, edge=4 * 364, tile=364)
QWEN = PixelSettings("qwen2_vl", 3, patch=14, merge=2, min_pixels=56 * 56, max_pixels=12_845_056)
sides = st.integers(1, 4000)


@given(sides, sides, st.sampled_from([SMOL, IDEFICS, replace(IDEFICS, edge=364), replace(SMOL, edge=1000)]))
def test_tiles_of_idefics3_are_those_of_transformers(height: int, width: int, settings: PixelSettings) -> None:
    from transformers.image_utils import SizeDict
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    if max(height, width) > MAX_ASPECT * min(height, width):
        with pytest.raises(UserError) as caught:
            layout(settings, height, width)
        assert caught.value.code == "image_too_large"
        return

    class Sizes(Idefics3ImageProcessorPil):  # type: ignore[misc, no-untyped-call]
        """The oracle with its resizing of pixels left out."""

    found: list[tuple[int, int]] = []
    made = Sizes(size={"longest_edge": settings.edge}, max_image_size={"longest_edge": settings.tile})

    def resized(image: Any, size: Any, **_: Any) -> Any:
        if size.longest_edge:
            from transformers.models.idefics3 import image_processing_pil_idefics3 as module

            size_ = module.get_resize_output_image_size(image, resolution_max_side=size.longest_edge)
        else:
            size_ = (size.height, size.width)
        found.append(size_)
        return np.broadcast_to(np.uint8(0), (3, *size_))

    made.resize = resized  # type: ignore[method-assign]
    image = resized(np.broadcast_to(np.uint8(0), (3, height, width)), SizeDict(longest_edge=settings.edge))
    frames, rows, columns = made.split_images(
        made.resize_for_vision_encoder(image, settings.tile), {"longest_edge": settings.tile}
    )
    plan = layout(settings, height, width)
    assert plan.sizes == tuple(found)
    assert (plan.shape[0], plan.grid) == (len(frames), (rows, columns))
    assert 3 * plan.shape[0] * settings.tile**2 <= MAX_TILE_BYTES


@given(sides, sides)
def test_rows_of_llava_next_are_those_of_transformers(height: int, width: int) -> None:
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

    if max(height, width) > MAX_ASPECT * min(height, width):
        return
    known = LlavaNextProcessor.__new__(LlavaNextProcessor)
    known.patch_size, known.num_additional_image_tokens = 14, 1
    known.image_processor = type("Processor", (), {"image_grid_pinpoints": [list(each) for each in PINPOINTS]})()
    plan = layout(NEXT, height, width)
    from attar.images.settings import ImageSettings

    settings = ImageSettings(NEXT, 5, 5, None, 576)
    wanted = known._get_number_of_features(height, width, 336, 336) - 1  # by default without the class token's row
    assert count_rows(settings, plan.shape[0], plan.grid, (height, width)) == wanted
    assert plan.sizes[0][0] <= plan.sizes[1][0]
    assert plan.sizes[0][1] <= plan.sizes[1][1]


@given(sides, sides, st.sampled_from([QWEN, replace(QWEN, max_pixels=28 * 28 * 1280)]))
def test_sizes_of_qwen2_vl_are_those_of_transformers(height: int, width: int, settings: PixelSettings) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    try:
        wanted = smart_resize(height, width, 28, settings.min_pixels, settings.max_pixels)
    except ValueError:
        with pytest.raises(UserError):
            layout(settings, height, width)
        return
    plan = layout(settings, height, width)
    assert plan.sizes == (wanted,)
    assert plan.grid == (wanted[0] // 14, wanted[1] // 14)


@pytest.mark.parametrize("case", oracle.CASES)
@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_resized_images_are_bounded(case: str, height: int, width: int) -> None:
    """An image within its limit is resized to at most 200 times the square of a side of the settings."""
    if height * width > MAX_PIXELS or max(height, width) > MAX_ASPECT * min(height, width):
        return
    plan = layout(SETTINGS[case], height, width)
    assert all(high * wide <= MAX_ASPECT * 2 * 96**2 for high, wide in plan.sizes)


def _settings(case: str) -> PixelSettings:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        found = read_settings(oracle.write(case, Path(folder)))
    assert found is not None
    return found.pixels


SETTINGS = {case: _settings(case) for case in oracle.CASES}


@pytest.mark.parametrize("case", oracle.CASES)
def test_settings_survive_json(case: str) -> None:
    assert PixelSettings.of(json.loads(SETTINGS[case].json())) == SETTINGS[case]


BAD = [
    ("llava", {"size": {"shortest_edge": 10**6}}, "config_invalid"),
    ("llava", {"size": {"shortest_edge": 0}}, "config_invalid"),
    ("llava", {"size": [1]}, "config_invalid"),
    ("llava", {"crop_size": {"height": 64, "width": 64}}, "feature_unsupported"),
    ("llava", {"do_resize": False}, "feature_unsupported"),
    ("llava", {"resample": 0}, "feature_unsupported"),
    ("llava", {"resample": "cubic"}, "config_invalid"),
    ("llava_next", {"image_grid_pinpoints": [[33, 64]]}, "config_invalid"),
    ("llava_next", {"image_grid_pinpoints": "[]"}, "config_invalid"),
    ("llava_next", {"image_grid_pinpoints": [[32, 64]] * 65}, "config_invalid"),
    ("qwen2_vl", {"max_pixels": 10**9}, "config_invalid"),
    ("qwen2_vl", {"min_pixels": 8193}, "config_invalid"),
    ("gemma3", {"do_pan_and_scan": True}, "feature_unsupported"),
    ("idefics3", {"max_image_size": {"longest_edge": True}}, "config_invalid"),
    ("idefics3", {"size": {"longest_edge": float("nan")}}, "config_invalid"),
]  # fmt: skip


@pytest.mark.parametrize("case, changes, code", BAD)
def test_settings_out_of_bounds_are_refused(case: str, changes: dict[str, Any], code: str, tmp_path: Path) -> None:
    folder = oracle.write(case, tmp_path)
    given = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(given | changes))
    with pytest.raises(UserError) as caught:
        read_settings(folder)
    assert caught.value.code == code


def test_settings_may_lie_in_the_processors_file(tmp_path: Path) -> None:
    """In transformers 5 one file has the settings of the image processor and those of the processor."""
    apart = read_settings(oracle.write("idefics3", tmp_path))
    (tmp_path / "preprocessor_config.json").unlink()
    oracle.put(tmp_path / "processor_config.json", {"image_processor": oracle.CASES["idefics3"][1], "image_seq_len": 9})
    together = read_settings(tmp_path)
    assert apart is not None
    assert together == replace(apart, tile_rows=9)
