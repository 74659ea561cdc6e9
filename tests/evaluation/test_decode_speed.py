"""Speed reports: their keys, the arithmetic that ties them together, and settings that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from attar.evaluation import decode_speed
from attar.formats.packed import PackedTensor
from attar.kernels import dispatch
from attar.model.shapes import shape
from tests.errors import user_error

KEYS = {
    "prefill_tok_s", "decode_tok_s", "read_gb_s", "read_fraction", "int8_gops", "compute_fraction", "python_fraction",
    "peak_rss_mb", "load_s", "first_token_s", "bytes_per_token",
}  # fmt: skip

LOAD = decode_speed.Load(prompt=16, gen=4, batch=2)

pytestmark = pytest.mark.skipif(dispatch.store() is None, reason="the native kernels are off or do not load")


@pytest.mark.parametrize("scheme, head", [("w4g128", "int8"), ("w4g128", "int4"), ("w8a8", "bf16"), ("bf16", "bf16")])
def test_a_report_of_random_weights(scheme: str, head: str) -> None:
    report = decode_speed.run(lambda store: decode_speed.build("tiny", scheme, head, store), LOAD)
    assert set(report) >= KEYS
    assert report["recorded"]
    assert report["reference_linears"] == {}
    assert 0 < report["python_fraction"] < 1
    assert report["load_s"] <= report["first_token_s"]
    assert report["decode_tok_s"] * report["step_ms"] == pytest.approx(1e3 * LOAD.batch), "one statistic for both"
    assert report["read_fraction"] * report["read_gb_s"] == pytest.approx(
        report["bytes_per_token"] / report["step_ms"] / 1e6
    )
    assert decode_speed.to_text(report).startswith("prefill")
    for cache, said in ((report["bytes_per_token"] / 1e6 + 1, True), (0, False)):
        assert ("cache of" in decode_speed.to_text(report | {"cache_mb": cache})) is said


def test_bytes_a_token_are_those_of_the_schemes() -> None:
    def bytes_of(scheme: str, head: str) -> int:
        store = dispatch.store()
        assert store is not None
        decoder = decode_speed.build("tiny", scheme, head, store)
        linears = [decoder.head, *(each for block in decoder.blocks for each in block.linears())]
        return sum(each.weight.read_bytes for each in linears)  # type: ignore[union-attr]

    table = 2048 * 256
    inside = 2 * (256 * (256 + 128 + 128) + 256 * 256 + 3 * 512 * 256)
    scales = 2 * inside // 128
    assert bytes_of("bf16", "bf16") == 2 * (table + inside)
    assert bytes_of("w4g128", "bf16") == 2 * table + inside // 2 + scales
    assert bytes_of("w4g128", "int8") == table + 2 * 2048 + inside // 2 + scales


def test_what_does_not_exist_is_named_with_what_does() -> None:
    with user_error("name_unknown"):
        decode_speed.run(lambda store: decode_speed.build("llama-3.2-1B", "w4g128", "int8", store), LOAD)
    with user_error("name_unknown"):
        decode_speed.run(lambda store: decode_speed.build("tiny", "w4g128", "int5", store), LOAD)
    unknown = decode_speed.Setup(activations="int7")
    with user_error("name_unknown"):
        decode_speed.run(lambda store: decode_speed.build("tiny", "w4g128", "int8", store), LOAD, unknown)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "nf4", "qserve-g128"])
def test_forms_that_are_searched_for_are_drawn_in_ordinary_memory(scheme: str) -> None:
    """For a card that is not there: nothing of it is asked for before the store moves them."""
    config = shape("tiny")
    made = decode_speed.RandomWeights(config, scheme, "bf16", "cuda").linear("model.layers.0.mlp.down_proj")
    assert isinstance(made.weight, PackedTensor)
    assert made.weight.shape == (config.hidden, config.intermediate)
    assert {part.device.type for part in made.weight.parts.values()} == {"cpu"}


def test_the_largest_cache_counts(tmp_path: Path) -> None:
    assert decode_speed._cache(tmp_path) == 0
    for index, size in enumerate(("48K", "2048K", "32768K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert decode_speed._cache(tmp_path) == 32 << 20
