"""What fits, from settings: before anything is loaded."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from attar import machine
from attar.checkpoints.sources import opening
from attar.cli.main import app
from attar.engine import startup
from attar.engine.fitting import cost_of, deployment, evictions, fit, kv_scheme
from attar.engine.loader import without_kernels
from attar.engine.startup import start_engine
from attar.formats.scheme import Scheme
from attar.kernels import dispatch
from attar.model.shapes import shape
from attar.plan.costs import BLOCK, Storage
from attar.plan.fit import ROOM, Fit, blocks_for
from attar.protocol.scheduler_config import PRESETS, SchedulerConfig
from attar.protocol.settings import Settings
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence
from tests.errors import user_error
from tests.model.random_model import LLAMA, write

CONFIG = shape("llama-3.2-1b")
STORAGE = Storage(Scheme.parse("w4g128").with_scale_dtype("bfloat16"), Scheme.parse("w8").with_scale_dtype("bfloat16"))
GB = 10**9
SETTINGS = Settings("model", "socket", memory=8 * GB)


def found(limits: SchedulerConfig | None = None, **changed: object) -> Fit:
    settings = msgspec.structs.replace(SETTINGS, **changed)
    return fit(settings, deployment(settings, CONFIG, STORAGE), limits or SchedulerConfig(), 2)


def test_without_a_context_requests_may_be_as_long_as_the_cache() -> None:
    made = found()
    assert made.context == made.tokens < CONFIG.context
    assert made.requests == 1
    assert 0 <= made.unused < made.memory / 100  # a shorter context makes the largest step a little smaller


@pytest.mark.parametrize("count", [2, 3, 8])
def test_engines_that_share_weights_divide_the_rest(count: int) -> None:
    alone, each = found(context=4096), found(context=4096, memory=20 * GB, sharers=count)
    assert each.weights == alone.weights
    assert each.memory - each.weights == (20 * GB - alone.weights) // count
    assert each.weights + count * (each.memory - each.weights) <= 20 * GB
    with user_error("memory_insufficient"):
        found(context=4096, memory=3 * GB, sharers=count)


def test_a_context_that_fits_several_times_is_kept() -> None:
    made = found(context=4096)
    assert made.context == 4096
    assert made.requests > 1


def test_the_cache_is_a_few_times_what_all_requests_take_together() -> None:
    made = found(SchedulerConfig(max_running=2, max_step_tokens=64), context=1024)
    assert made.tokens == ROOM * (2 * 1024 + BLOCK), "and the block that the second has to leave free"
    assert made.requests == ROOM * 2
    assert made.unused > GB


def admitted(made: Fit, limits: SchedulerConfig, prompt: int) -> tuple[int, int]:
    """Of many requests of the full context, with so many tokens of a prompt that no other has: how many the scheduler
    lets run at once in that cache, and how many of their tokens there is room for."""
    pool = BlockPool(made.blocks, made.block)
    one_step = replace(limits, max_step_tokens=200 * 512, max_waiting=made.requests + 3)
    scheduler = Scheduler(pool, PrefixCache(pool), one_step)
    for i in range(made.requests + 3):
        ids = range(i * prompt, (i + 1) * prompt)
        scheduler.add([Sequence(id=str(i), prompt_ids=ids, max_tokens=made.context - prompt)], 0.0)
    step = scheduler.plan(0.0)
    return len(step.admitted), step.tokens


@pytest.mark.parametrize("prompt", [511, 472])
@pytest.mark.parametrize("headroom", [0.0, 0.01, 0.02, 0.05, 0.2])
@pytest.mark.parametrize("tokens", [512, 1000, 16384, 16448, 17000, 40000])
def test_as_many_full_requests_as_are_told_run_at_once_and_no_more(tokens: int, headroom: float, prompt: int) -> None:
    """472 tokens and an answer of 40: 31 ran in 256 blocks, of which 32 had been told."""
    limits = SchedulerConfig(max_running=200, headroom=headroom)
    made = found(limits, context=512, max_cached_tokens=tokens)
    assert admitted(made, limits, prompt) == (made.requests, made.requests * prompt)
    if (tokens, headroom) == (16384, 0.02):
        assert made.requests == 31


@pytest.mark.parametrize(
    "limits", [SchedulerConfig(), *PRESETS.values(), SchedulerConfig(policy="static"), SchedulerConfig(policy="none")]
)
def test_in_much_memory_all_that_may_run_together_do(limits: SchedulerConfig) -> None:
    made = found(limits, context=512, memory=60 * GB)
    assert made.unused > GB
    assert made.blocks == ROOM * blocks_for(limits.together, made.blocks_each, limits.headroom)
    assert admitted(made, limits, 511) == (limits.together, limits.together * 511)


@pytest.mark.parametrize("preset, dropping", [(None, ()), ("latency", ()), (None, ("sink:4+508",))])
@pytest.mark.parametrize("left", [20 * GB, 5 * GB])
def test_a_plan_says_what_a_server_will(
    left: int, preset: str | None, dropping: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same container, with the same options."""
    monkeypatch.setattr(machine, "examine", lambda: machine.Machine({"left in control group (v2)": left}, 2))
    settings = Settings("model", "socket", context=2048, preset=preset, kv_eviction=dropping)
    server = fit(settings, deployment(settings, CONFIG, Storage()), settings.limits(), 2)
    asked = "plan --shape llama-3.2-1b --context 2048 --users 2 --kv float32 --bandwidth 20GB --json"
    asked += f" --preset {preset}" if preset else ""
    asked += "".join(f" --kv-eviction {each}" for each in dropping)
    plan = json.loads(CliRunner().invoke(app, asked.split()).stdout.splitlines()[-1])
    row = plan["rows"][0]
    assert plan["memory_source"] == "left in control group (v2)"
    assert row == row | {"memory": int(0.9 * left), "blocks": server.blocks, "requests": server.requests}
    assert server.requests > 1


def test_a_container_with_nothing_left_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "examine", lambda: machine.Machine({"left in control group (v2)": 0}, 2))
    with user_error("memory_insufficient"):
        found(memory=None)


def test_a_size_that_was_given_is_taken() -> None:
    assert found(context=1024, max_cached_tokens=5000).tokens == 5056  # whole blocks


def test_smaller_numbers_hold_more_tokens() -> None:
    tokens = [found(context=8192, kv=kv).tokens for kv in ("float32", "bfloat16", "int8", "klt4", "int4", "klt2")]
    assert tokens == sorted(tokens)


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"memory": GB}, "memory_insufficient"),
        ({"context": 10**6}, "context_exceeded"),
        ({"context": 131072}, "plan_does_not_fit"),
        ({"context": 4096, "max_cached_tokens": 10**7}, "memory_insufficient"),
        ({"kv": "int5"}, "kv_unknown"),
        ({"kv": "kivi2-published"}, "kv_unsupported"),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(changed: dict[str, object], sentence: str) -> None:
    with user_error(sentence):
        found(**changed)


def test_the_start_line_names_the_command_that_measures() -> None:
    both = Settings("./out", "", sparse_attention="topk:1/16", sparse_prefill="skip:0.01", kv="int8")
    named = "attar eval ./out --sparse-attention topk:1/16 --sparse-prefill skip:0.01 --kv int8 --text FILE"
    assert cost_of(both) == named
    dropping = Settings("./out", "", kv_eviction=("sink:4+2044", "snapkv:512"), kv="int8")
    of_second = "attar eval ./out --kv-eviction snapkv:512 --kv int8 --text FILE"
    assert cost_of(dropping, evictions(dropping)[1]) == of_second


def test_keys_and_values_lose_nothing_by_default() -> None:
    assert kv_scheme(SETTINGS).name == "float32"
    assert kv_scheme(msgspec.structs.replace(SETTINGS, dtype="bfloat16")).name == "bfloat16"
    assert kv_scheme(msgspec.structs.replace(SETTINGS, kv="int8")).name == "int8"


@pytest.mark.parametrize(
    "scheme, changed, sentences",
    [
        (None, {}, []),
        ("w4g32", {"kv": "int8"}, []),
        (None, {"dtype": "bfloat16"}, [r"no linear has a CPU kernel in bfloat16 \(takes float32 rows, not bfloat16\)"]),
        (
            "w4a4",
            {},
            [r"layers\.0\.self_attn\.q_proj and 20 more linears: integer activations other than .* int8"],
        ),
    ],
    ids=str,
)
def test_what_has_no_kernel_is_named_and_what_that_means(
    demo: Path,
    tmp_path: Path,
    scheme: str | None,
    changed: dict[str, object],
    sentences: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    if dispatch.store() is None:
        pytest.skip("the native kernels are off or do not load")
    path = write(tmp_path / "model", LLAMA, scheme)
    shutil.copy(demo / "tokenizer.json", path)
    start_engine(Settings(str(path), "socket", memory=GB, max_cached_tokens=256, threads=1, **changed))  # type: ignore[arg-type]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == len(sentences), said
    for sentence, found in zip(sentences, said, strict=True):
        assert re.search(f"{sentence}.*by the reference.*bits may depend on other requests in its batch", found)


def test_the_reference_is_named_where_it_is_forced(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = opening.load(tiny, torch.float32)
    monkeypatch.setattr(dispatch, "candidates", lambda *asked: [("native", "does not load"), ("ref", None)])
    (sentence,) = without_kernels(decoder)
    assert sentence.startswith("no linear has a CPU kernel in float32 (does not load): all run by the reference")


def test_a_longer_context_is_never_more_requests() -> None:
    counts = [found(context=context).requests for context in (512, 1024, 4096, 16384)]
    assert counts == sorted(counts, reverse=True)
    assert replace(found(context=512), blocks=0).requests == 0


@pytest.mark.parametrize("tells", [True, False])
def test_an_engine_whose_answers_none_continues_says_so(
    tells: bool, demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "bits_of", lambda settings, model: "")
    start_engine(Settings(str(demo), "socket", memory=GB, max_cached_tokens=256, threads=1, tells_cache=tells))
    assert (startup.NOT_CONTINUED in capsys.readouterr().err) is tells
