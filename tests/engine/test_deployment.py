"""Plans of settings: users, and the memory that each process or GPU has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attar import machine
from attar.checkpoints.sources.opening import stored
from attar.compression.request.request import CompressionRequest
from attar.compression.runs.pipeline import compress_request
from attar.engine import deployment, fitting
from attar.evaluation.planning import questions
from attar.images.settings import ImageSettings
from attar.kv.sparse import SparseAttention
from attar.plan import costs, gpus, report
from attar.plan.comparison import Hardware, Subject
from attar.plan.fit import Demand
from attar.protocol.image_limits import MAX_PIXELS
from attar.protocol.settings import IMAGE_CACHE, Settings
from tests.engine.images import models
from tests.errors import user_error
from tests.model.vision import tiny

GB = 10**9


def with_limits(running: int | None = None, tokens: int | None = None, preset: str | None = None) -> Settings:
    return Settings("", "", preset=preset, max_running=running, max_step_tokens=tokens)


@pytest.mark.parametrize(
    "settings, users, raised",
    [
        (with_limits(), 32, (None, None)),
        (with_limits(), 33, (33, None)),
        (with_limits(), 600, (600, 600)),
        (with_limits(preset="latency"), 17, (17, None)),
        (with_limits(running=4), 600, (4, None)),
        (with_limits(tokens=700), 600, (600, 700)),
    ],
)
def test_users_raise_what_was_left_open(settings: Settings, users: int, raised: tuple[int | None, int | None]) -> None:
    found = deployment.for_users(settings, users)
    assert (found.max_running, found.max_step_tokens) == raised
    assert (found == settings) is (raised == (settings.max_running, settings.max_step_tokens))


def test_users_are_no_more_than_the_tokens_that_a_step_was_given() -> None:
    with user_error("option_conflict"):
        deployment.for_users(with_limits(tokens=512), 600)


@pytest.mark.parametrize("fraction, share", [(None, machine.SHARE), (0.5, 1.0)])
def test_cpu_processes_share_a_memory_and_gpus_have_their_own(fraction: float | None, share: float) -> None:
    subject, demand = Subject.shape("llama-3.1-8b", None), Demand(1024)
    settings = Settings("", "", kv="int8", tp=2, kv_fraction=fraction)
    here = deployment.plan(settings, subject, demand, Hardware(80 * GB, "free", GB))
    assert (here.memory, here.source) == (int(80 * GB * share) // 2, "free, each of 2 processes")
    there = deployment.plan(settings, subject, demand, Hardware.of_gpu(gpus.gpu_spec("h100"), None))
    assert (there.memory, there.source) == (int(80 * GB * share), "h100, each of 2 processes")
    given = deployment.plan(
        Settings("", "", kv="int8", tp=2, memory=24 * GB), subject, demand, Hardware(80 * GB, "free", GB)
    )
    assert (given.memory, given.source) == (24 * GB, "--memory, each of 2 processes")


def test_a_bandwidth_that_is_given_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attar.kernels.native.limits.measure", lambda: pytest.fail("measured"))
    assert deployment.machine_at_hand(7 * GB).bandwidth == 7 * GB
    gpu = Hardware.of_gpu(gpus.gpu_spec("h100"), 300 * GB).gpu
    assert gpu is not None
    assert gpu.bandwidth == 300e9


def test_a_stream_holds_its_window() -> None:
    subject, demand, hardware = Subject.shape("llama-3.2-1b", None), Demand(16384, 4), Hardware(80 * GB, "free", GB)
    whole, sink, once = (
        deployment.plan(Settings("", "", kv_eviction=policy), subject, demand, hardware)
        for policy in ((), ("sink:4+2044",), ("snapkv:2048", "sink:4+2044"))
    )
    for row in sink.rows:
        (other,) = (one for one in whole.rows if (one.weights, one.kv) == (row.weights, row.kv))
        assert (other.fit.blocks_each, row.fit.blocks_each) == (16384 // 64, 2048 // 64 + 1)
        assert row.speed is not None
        assert other.speed is not None
        assert row.speed.read < other.speed.read
    assert "klt2" not in {row.kv.name for row in sink.rows}
    assert once.rows[0].fit.held == 16384 + 2048
    assert "2,112" in report.to_text(sink)
    assert "16,384" in report.to_text(once)
    assert report.to_dict(once)["kv_eviction"] == "snapkv:2048"
    short = deployment.plan(Settings("", "", kv_eviction=("sink:4+2044",)), subject, Demand(2048), hardware)
    assert short.rows[0].fit.held == 2048
    for wrong in ({"kv": "klt2"}, {"tp": 2}, {"sparse_attention": "topk:512"}):
        with user_error("option_conflict"):
            deployment.plan(Settings("", "", kv_eviction=("snapkv:2048",), **wrong), subject, demand, hardware)


def test_one_bit_keys_take_their_memory() -> None:
    subject, demand, hardware = Subject.shape("llama-3.2-1b", None), Demand(16384), Hardware(80 * GB, "free", GB)
    whole, few = (
        deployment.plan(Settings("", "", sparse_attention=text), subject, demand, hardware)
        for text in (None, "topk:1/16")
    )
    schemes = {row.kv for row in few.rows}
    assert schemes < {row.kv for row in whole.rows}, "those that one-bit keys lie beside"
    each = subject.config.layers * SparseAttention.bytes(subject.config.kv_heads, subject.config.head_dim, 64)
    assert each == costs.sign_bytes(subject.config)
    for row in few.rows:
        (other,) = (one for one in whole.rows if (one.weights, one.kv) == (row.weights, row.kv))
        assert row.fit.block_bytes == other.fit.block_bytes + each
    for wrong in ({"kv": "int4"}, {"tp": 2}):
        with user_error("option_conflict"):
            deployment.plan(Settings("", "", sparse_attention="topk:512", **wrong), subject, demand, hardware)


@pytest.mark.parametrize(
    ("given", "sees"),
    [({}, True), ({"tp": 2}, False), ({"image_cache": 0}, False), ({"kv_eviction": ("sink:4+124",)}, True)],
)
def test_a_plan_counts_the_vision_tower_as_a_start_does(given: dict[str, Any], sees: bool) -> None:
    """Bytes of the tower by transformers' own parameters, and room for features of images."""
    made = tiny.model("smolvlm")
    tower = sum(each.nbytes for part in (made.model.vision_model, made.model.connector) for each in part.parameters())
    subject = questions.subject(str(tiny.folder("smolvlm")))
    assert subject.tower is not None
    settings = Settings("m", "m", memory=4 << 30, threads=1, context=256, **given)
    found = deployment.plan(settings, subject, Demand(256), Hardware(8 << 30, "here", 1e9))
    images = tower + IMAGE_CACHE if sees else 0
    assert found.images == images
    assert found.memory == settings.memory - images
    assert ("of the vision tower" in found.source) == sees
    assert report.to_dict(found)["images"] == images
    assert ("projector and features of images" in report.to_text(found)) == sees
    if sees and not given:
        config, storage = stored(tiny.folder("smolvlm"))
        held = fitting.deployment(settings, config, storage)
        started = fitting.fit(settings, held, settings.limits(), 1, 0, images)
        same = next(row.fit for row in found.rows if row.kv.name == held.kv.name)
        assert (same.memory, same.blocks, same.context) == (started.memory, started.blocks, started.context)


@pytest.mark.parametrize("scheme", ["w8", "w8a8"])
def test_a_plan_counts_a_quantized_tower_as_it_is_stored(scheme: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress_request(CompressionRequest(tiny.folder("smolvlm"), out, recipe="rtn-w4g32", vision=scheme))
    whole, found = (questions.subject(str(path)).tower for path in (tiny.folder("smolvlm"), out))
    assert whole is not None
    assert found is not None
    assert found == deployment.checkpoint(str(out)).tower
    assert found.bytes(False) == whole.choices(False)[scheme] < 0.6 * whole.bytes(False)


def test_a_plan_of_a_gpu_or_of_text_counts_no_tower(demo: Path) -> None:
    subject = questions.subject(str(tiny.folder("smolvlm")))
    gpu = Hardware.of_gpu(gpus.gpu_spec("h100"), None)
    assert deployment.plan(Settings("m", "m"), subject, Demand(256), gpu).images == 0
    text = questions.subject(str(demo))
    assert text.tower is None
    assert deployment.image_bytes(Settings("m", "m"), text) == 0


def test_a_plan_in_less_memory_than_the_tower_is_refused() -> None:
    subject = questions.subject(str(tiny.folder("smolvlm")))
    with user_error("memory_insufficient", "the vision tower needs"):
        deployment.plan(Settings("m", "m", memory=1 << 20), subject, Demand(256), Hardware(8 << 30, "here", 1e9))


def test_more_features_than_a_server_keeps_are_refused(tmp_path: Path) -> None:
    models.save("gemma3", tmp_path)
    subject = questions.subject(str(tmp_path))
    assert subject.tower is not None
    load = deployment.image_load(Settings("m", "m"), subject, 2, (100, 50))
    needed = load.feature_bytes(subject.tower.config)
    assert deployment.image_load(Settings("m", "m", image_cache=needed), subject, 2, (100, 50)) == load
    with user_error("plan_does_not_fit", "`attar serve --image-cache`"):
        deployment.image_load(Settings("m", "m", image_cache=needed - 1), subject, 2, (100, 50))
    with user_error("option_conflict"):
        deployment.image_load(Settings("m", "m", image_cache=0), subject, 2, (100, 50))


def test_images_that_a_server_refuses_are_refused(tmp_path: Path) -> None:
    """The limits are those of a request to a server: pixels before and after resizing, rows, and the context."""
    models.save("qwen2_vl", tmp_path / "qwen")
    subject, settings = questions.subject(str(tmp_path / "qwen")), Settings("m", "m")
    assert isinstance(subject.images, ImageSettings)
    wide = replace(subject.images, pixels=replace(subject.images.pixels, max_pixels=MAX_PIXELS))
    large = replace(subject, images=wide, config=replace(subject.config, context=1 << 20))
    assert deployment.image_load(settings, large, 1, (1400, 1600)).tokens < 1 << 20
    for asked, count, size, word in (
        (large, 8, (1400, 1600), "48 MiB"), (large, 1, (4000, 4000), "rows"), (subject, 8, (2000, 3000), "48,000,000"),
    ):  # fmt: skip
        with user_error("image_too_large", word):
            deployment.image_load(settings, asked, count, size)
    load = deployment.image_load(settings, subject, 1, (100, 100))
    least = replace(subject, config=replace(subject.config, context=load.tokens + 2))
    assert deployment.image_load(settings, least, 1, (100, 100)) == load
    less = replace(subject, config=replace(subject.config, context=load.tokens + 1))
    with user_error("context_exceeded", f"{load.tokens} tokens", f"context of {load.tokens + 1} "):
        deployment.image_load(settings, less, 1, (100, 100))


def test_a_context_that_is_left_open_holds_the_images(tmp_path: Path) -> None:
    """Text alone gets what fits; a cache of fewer tokens than the images have is too small for a request."""
    models.save("qwen2_vl", tmp_path)
    subject = questions.subject(str(tmp_path))
    load = deployment.image_load(Settings("m", "m"), subject, 4, (100, 100))
    assert load.least <= subject.config.context
    here, asked = Hardware(8 << 30, "here", 1e9), Settings("m", "m", kv="float32", threads=1, max_cached_tokens=64)
    text, seen = (deployment.plan(asked, subject, Demand(), here, each).rows[0] for each in (None, load))
    assert text.fits
    assert text.fit.context == 64 < load.least
    assert not seen.fits
    assert seen.fit.context == load.least


def test_rows_that_see_each_other_fit_into_one_step(tmp_path: Path) -> None:
    """A step has rows for the other sequences and for drafts too."""
    models.save("gemma3", tmp_path)
    subject = questions.subject(str(tmp_path))
    assert isinstance(subject.images, ImageSettings)
    load = deployment.image_load(Settings("m", "m"), subject, 1, (64, 64))
    for tokens, fits in ((load.rows + 7, True), (load.rows + 6, False)):  # seven forced tokens beside one sequence
        settings = Settings("m", "m", max_running=1, max_step_tokens=tokens)
        if fits:
            assert deployment.image_load(settings, subject, 1, (64, 64)) == load
        else:
            with user_error("option_conflict", "max-step-tokens", f"which has {load.rows - 1} "):
                deployment.image_load(settings, subject, 1, (64, 64))


def test_a_config_json_tells_the_tower(tmp_path: Path) -> None:
    given = (tiny.folder("smolvlm") / "config.json").read_text()
    (tmp_path / "config.json").write_text(given)
    bare = questions.subject(str(tmp_path))
    whole = questions.subject(str(tiny.folder("smolvlm")))
    assert bare.tower is not None
    assert whole.tower is not None
    assert bare.tower.config == whole.tower.config
    value = json.loads(given)
    value["vision_config"]["num_attention_heads"] = 7  # not a tower that is read: it is served as a language model
    (tmp_path / "config.json").write_text(json.dumps(value))
    unread = questions.subject(str(tmp_path))
    assert unread.tower is None
    with user_error("feature_unsupported", "7 heads"):
        deployment.image_load(Settings("m", "m"), unread, 1, (64, 64))
