"""Configurations of NVIDIA's Triton Inference Server: what each field becomes, and that it then does the same here.

Rows B6, K13 and R4 of the list of methods; R2 is in `test_triton_template.py`.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attar.engine.fitting import on_gpu
from attar.engine.memory_profile import MemoryProfile
from attar.integrations.triton_server import config as triton_config
from attar.integrations.triton_server import pbtxt
from attar.integrations.triton_server.config import Imported, read
from attar.integrations.triton_server.pbtxt import Message
from attar.plan.costs import BLOCK
from attar.plan.fit import CacheLimits
from attar.protocol.messages import Failed
from attar.protocol.scheduler_config import SchedulerConfig
from attar.protocol.settings import Settings
from attar.scheduling.admission import Refused
from attar.scheduling.block_pool import BlockPool
from attar.scheduling.prefix_cache import PrefixCache
from attar.scheduling.scheduler import Scheduler
from attar.scheduling.sequence import Sequence
from attar.server.errors import APIError
from tests.errors import user_error

TOKENS_A_BLOCK, BLOCK_BYTES = BLOCK, 1000
GB = 10**9


def config(top: str = "", **parameters: str) -> str:
    """A configuration with these fields and parameters, and of 5 sequences unless they say how many."""
    if "max_batch_size" not in top:
        top = f"max_batch_size: 5\n{top}"
    written = "".join(
        pbtxt.write(Message((("parameters", Message((("key", key), ("value", string(value))))),)))
        for key, value in parameters.items()
    )
    return f'name: "tensorrt_llm"\nbackend: "tensorrtllm"\n{top}\n{written}'


def string(value: str) -> Message:
    return Message((("string_value", value),))


def batching(delay: int | None = None, queue: int | None = None) -> str:
    inside = "" if delay is None else f"max_queue_delay_microseconds: {delay} "
    inside += "" if queue is None else f"default_queue_policy: {{ max_queue_size: {queue} }}"
    return f"dynamic_batching {{ {inside} }}"


def limits_of(found: Imported) -> SchedulerConfig:
    settings = {name: value for name, value in found.settings().items() if name != "device"}
    return Settings(model="", socket="", **settings).limits()


WHOLE = config(
    """
    # as a template of TensorRT-LLM's comes out filled in
    max_batch_size: 64
    model_transaction_policy { decoupled: True }
    dynamic_batching {
      preferred_batch_size: [ 64 ]
      max_queue_delay_microseconds: 5000
      default_queue_policy: { max_queue_size: 12 }
    }
    input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true },
            { name: "end_id" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } optional: true } ]
    output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]
    instance_group [ { count: 1 kind : KIND_CPU } ]
    """,
    gpt_model_type="inflight_fused_batching",
    gpt_model_path="/engines/llama",
    max_tokens_in_paged_kv_cache="2560",
    kv_cache_free_gpu_mem_fraction="0.5",
    cross_kv_cache_fraction="",
    batch_scheduler_policy="guaranteed_no_evict",
    enable_chunked_context="true",
    enable_kv_cache_reuse="False",
    max_num_tokens="8192",
    max_beam_width="1",
    decoding_mode="top_k_top_p",
    gpu_device_ids="${gpu_device_ids}",
    medusa_choices="${medusa_choices}",
    exclude_input_in_output="true",
    kv_cache_host_memory_bytes="0",
)


def test_every_field_has_its_option() -> None:
    """Row B6: max_batch_size, max_queue_size, decoupled mode, max_num_tokens, and the rest."""
    found = read(WHOLE)
    assert found.options == {
        "max-running": 64,
        "max-step-tokens": 8192,
        "max-waiting": 12,
        "policy": "continuous",
        "max-preemptions": 0,
        "max-tokens-in-cache": 2560,
        "kv-fraction": 0.5,
    }
    assert not found.warnings
    said = "\n".join(found.notes)
    for name in ("decoupled", "preferred_batch_size", "enable_chunked_context", "enable_kv_cache_reuse", "5000"):
        assert name in said
    limits = limits_of(found)
    assert (limits.max_running, limits.max_waiting, limits.max_step_tokens) == (64, 12, 8192)
    assert (limits.policy, limits.max_preemptions) == ("continuous", 0)
    program, command, model, *options = shlex.split(found.command())
    assert (program, command, model) == ("attar", "serve", "MODEL")
    own = ("max-running", "max-tokens-in-cache", "kv-fraction")
    assert list(zip(options[::2], options[1::2], strict=True)) == [
        (f"--{name}", str(value)) if name in own else ("--scheduler", f"{name}={value}")
        for name, value in found.options.items()
    ]


@pytest.mark.parametrize(
    "top, parameters, options",
    [
        ("max_batch_size: 0", {}, {"max-running": 1}),
        ("max_batch_size: 8", {"max_num_sequences": "3"}, {"max-running": 3}),
        ("max_batch_size: 2048", {}, {"max-running": 2048, "max-step-tokens": 2048}),
        (batching(queue=0), {}, {}),
        (batching(delay=0), {"gpt_model_type": "V1"}, {"policy": "static"}),
        (batching(delay=1500), {"gpt_model_type": "v1"}, {"policy": "dynamic", "max-delay": 0.0015}),
        (batching(delay=1500), {"gpt_model_type": "inflight_batching"}, {"policy": "continuous"}),
        ("", {"batching_strategy": "V1"}, {"policy": "static"}),
        ("", {"batch_scheduler_policy": "max_utilization"}, {"max-preemptions": SchedulerConfig().max_preemptions}),
        ("", {"gpu_device_ids": "1"}, {"device": "cuda:1"}),
        ("model_transaction_policy { decoupled: false }", {}, {}),
        ("", {"kv_cache_free_gpu_mem_fraction": ".25"}, {"kv-fraction": 0.25}),
    ],
)
def test_fields_one_by_one(top: str, parameters: dict[str, str], options: dict[str, Any]) -> None:
    """Row B6."""
    usual = {"max-running": 5, "max-preemptions": 0, "kv-fraction": 0.9}
    assert read(config(top, **parameters)).options == usual | options


def test_without_a_size_of_batches_there_is_a_warning() -> None:
    """To Triton it is then 0."""
    found = read('backend: "tensorrtllm"')
    assert "max-running" not in found.options
    [warning] = found.warnings
    assert warning.startswith("max_batch_size: not given")
    size = 'parameters { key: "max_num_sequences" value { string_value: "4" } }'
    assert not read(f'backend: "tensorrtllm" {size}').warnings


# What the knobs do


def sequence(name: str) -> Sequence:
    return Sequence(id=name, prompt_ids=[1, 2, 3], max_tokens=4)


def scheduler(limits: SchedulerConfig) -> Scheduler:
    pool = BlockPool(64, 16)
    return Scheduler(pool, PrefixCache(pool), limits)


def started(limits: SchedulerConfig, arrivals: dict[str, float]) -> tuple[float, list[str]]:
    """When the first step has anybody, and whom, on a virtual clock that is looked at every millisecond."""
    made, now = scheduler(limits), 0.0
    waiting = sorted(arrivals.items(), key=lambda each: each[1])
    while True:
        while waiting and waiting[0][1] <= now:
            made.add([sequence(waiting.pop(0)[0])], now)
        plan = made.plan(now)
        if plan.admitted:
            return now, [each.id for each in plan.admitted]
        made.commit(plan, {}, now)
        now = round(now + 0.001, 6)
        assert now < 1


def test_a_delay_lets_requests_start_together() -> None:
    """Row B6: two requests within the delay share their first step; without one, or later, they do not."""
    arrivals = {"a": 0.0, "b": 0.004, "c": 0.02}
    for delay, together in ((5000, ["a", "b"]), (3000, ["a"]), (25000, ["a", "b", "c"])):
        found = read(config(f"max_batch_size: 8 {batching(delay)}", gpt_model_type="V1"))
        when, first = started(limits_of(found), arrivals)
        assert first == together
        assert when == pytest.approx(delay / 1e6, abs=0.0011)
    full = read(config(f"max_batch_size: 2 {batching(25000)}", gpt_model_type="V1"))
    assert started(limits_of(full), arrivals) == (0.004, ["a", "b"]), "a full batch waits for nobody"
    at_once = read(config(f"max_batch_size: 8 {batching(0)}", gpt_model_type="inflight_fused_batching"))
    assert started(limits_of(at_once), arrivals) == (0.0, ["a"])


def test_a_full_queue_refuses_with_429() -> None:
    """Row B6: the request that finds max_queue_size others waiting is rejected."""
    made = scheduler(limits_of(read(config(batching(queue=3)))))
    for name in "abc":
        made.add([sequence(name)], 0.0)
    with pytest.raises(Refused) as caught:
        made.add([sequence("d")], 0.0)
    refusal = APIError.of(Failed("d", caught.value.code, str(caught.value)))
    assert (refusal.kind.status, refusal.code) == (429, "overloaded")
    assert int(refusal.headers()["Retry-After"]) >= 1


def test_nobody_is_paused_where_that_was_asked_for() -> None:
    """guaranteed_no_evict: whoever has begun has its blocks to the end, so another waits instead."""
    limits = limits_of(read(config("max_batch_size: 4", batch_scheduler_policy="guaranteed_no_evict")))
    pool = BlockPool(4, 16)
    made = Scheduler(pool, PrefixCache(pool), limits)
    for name in "ab":
        made.add([Sequence(id=name, prompt_ids=[ord(name)] * 10, max_tokens=40)], 0.0)
    assert [each.id for each in made.plan(0.0).admitted] == ["a"]
    pool = BlockPool(4, 16)
    usual = Scheduler(pool, PrefixCache(pool), SchedulerConfig(max_running=4, headroom=0))
    for name in "ab":
        usual.add([Sequence(id=name, prompt_ids=[ord(name)] * 10, max_tokens=40)], 0.0)
    assert [each.id for each in usual.plan(0.0).admitted] == ["a", "b"]


# Memory


def test_the_defaults_of_the_cache() -> None:
    """Row K13: no limit of tokens, 0.9 of what is free, and half for cross attention where there is any."""
    expected = {
        "max_tokens_in_paged_kv_cache": None,
        "kv_cache_free_gpu_mem_fraction": 0.9,
        "cross_kv_cache_fraction": 0.5,
    }
    empty = dict.fromkeys(expected, "")
    holes = {name: f"${{{name}}}" for name in expected}
    for parameters in ({}, empty, holes):
        found = read(config(**parameters))
        assert found.kv == expected
        assert found.options == {"max-running": 5, "max-preemptions": 0, "kv-fraction": 0.9}
    said = read(config(cross_kv_cache_fraction="0.3"))
    assert said.kv["cross_kv_cache_fraction"] == 0.3
    assert "cross_kv_cache_fraction: of models with an encoder" in "\n".join(said.notes)


@given(
    free=st.integers(0, 10**12),
    tokens=st.none() | st.integers(1, 10**9),
    fraction=st.none() | st.floats(0.01, 1.0).map(lambda value: round(value, 4)),
)
def test_the_smaller_of_both_holds(free: int, tokens: int | None, fraction: float | None) -> None:
    """Row K13: KV allocation = min(max_tokens_in_paged_kv_cache, kv_cache_free_gpu_mem_fraction of what is free), in
    whole blocks: the tokens' rounded up, as they are asked for, and the memory's down, as there is no more."""
    parameters = {} if tokens is None else {"max_tokens_in_paged_kv_cache": str(tokens)}
    parameters |= {} if fraction is None else {"kv_cache_free_gpu_mem_fraction": str(fraction)}
    settings = read(config(**parameters)).settings()
    cache = CacheLimits(settings.get("max_cached_tokens"), settings["kv_fraction"])
    found = cache.blocks(free, BLOCK_BYTES, TOKENS_A_BLOCK)
    of_memory = int(free * (0.9 if fraction is None else fraction)) // BLOCK_BYTES
    of_tokens = of_memory if tokens is None else -(-tokens // TOKENS_A_BLOCK)
    assert found == min(of_memory, of_tokens)
    assert found * BLOCK_BYTES <= free


@pytest.mark.parametrize("tokens, fraction", [(None, 0.5), (None, 0.9), (10_000, 0.5), (10**6, 0.25)])
def test_the_same_holds_on_a_card(tokens: int | None, fraction: float) -> None:
    """Row K13, after what was measured there."""
    settings = Settings(model="", socket="", device="cuda", max_cached_tokens=tokens, kv_fraction=fraction)
    measured = MemoryProfile(available=10 * GB, weights=2 * GB, step=GB, graphs=0, driver=0)
    found = on_gpu(settings, measured, 4 << 20, 4096, SchedulerConfig())
    left = 10 * GB - 3 * GB - (4 << 20)  # one block is nobody's
    assert found.blocks == CacheLimits(tokens, fraction).blocks(left, 4 << 20, BLOCK)
    assert found.memory == 10 * GB
    assert found.blocks * found.block_bytes <= fraction * left
    assert found.kept_by == ("--max-tokens-in-cache" if tokens == 10_000 else "--kv-fraction")


# Warnings and refusals


@pytest.mark.parametrize("value", ["", "true", "False", "${enable_trt_overlap}"])
def test_a_field_that_was_removed_is_warned_of(value: str) -> None:
    """Row R4."""
    [warning] = read(config(enable_trt_overlap=value)).warnings
    assert warning.startswith("enable_trt_overlap: was removed")


@pytest.mark.parametrize(
    "top, parameters, says",
    [
        ("max_bach_size: 3", {}, "max_bach_size: no field"),
        ("x { y: [1, 2] }", {}, "x: no field"),
        ("dynamic_batching { preserve_orderin: true }", {}, "dynamic_batching.preserve_orderin: no field"),
        (
            "dynamic_batching { default_queue_policy { max_queue_sizes: 3 } }",
            {},
            "dynamic_batching.default_queue_policy.max_queue_sizes: no field",
        ),
        ("instance_group [ { gpu: [ 0 ] }, { gpu: [ 1 ], count: 0 } ]", {}, "instance_group.gpu: no field"),
        ("instance_group { kind: KIND_GPU gpus: [ 1 ] }", {}, "instance_group: gpus: "),
        ('parameters { key: "gpt_model_path" value { string: "x" } }', {}, "parameters.value.string: no field"),
        ("response_cache { enabled: true }", {}, "response_cache.enabled: no field"),
        ("model_transaction_policy { decouple: true }", {}, "model_transaction_policy.decouple: no field"),
        ("", {"max_beam_widht": "1"}, "'max_beam_widht' is not known here"),
        ("", {"\x1b[31m": "1"}, "'\\x1b[31m' is not known here"),
        ("instance_group [ { count: 2 }, { } ]", {}, "instance_group: 3 instances"),
        ("response_cache { enable: true }", {}, "response_cache: whole answers are not kept"),
        ("dynamic_batching { default_queue_policy { default_timeout_microseconds: 9 } }", {}, "default_timeout"),
        ("", {"gpu_device_ids": "0,1"}, "gpu_device_ids: 0,1: how 2 GPUs"),
        ("", {"kv_cache_host_memory_bytes": "45000000"}, "kv_cache_host_memory_bytes: "),
        ("", {"max_attention_window_size": "2560"}, "max_attention_window_size: "),
        ("", {"lora_cache_optimal_adapter_size": "8"}, "lora_cache_optimal_adapter_size: "),
        ("", {"exclude_input_in_output": "false"}, "exclude_input_in_output: "),
        ("", {"gpu_weights_percent": "0.5"}, "gpu_weights_percent: "),
    ],
)
def test_what_is_lost_is_named(top: str, parameters: dict[str, str], says: str) -> None:
    [warning] = read(config(top, **parameters)).warnings
    assert says in warning
    assert "\x1b" not in warning


@pytest.mark.parametrize(
    "top, parameters, says",
    [
        ("ensemble_scheduling { step [ ] }", {}, "ensemble_scheduling: this is no model"),
        ("sequence_batching { }", {}, "sequence_batching: this is no model"),
        ('platform: "ensemble"', {}, "platform: 'ensemble' is not"),
        ("", {"max_beam_width": "4"}, "max_beam_width: 4 asks for beam search"),
        ("", {"decoding_mode": "beam_search"}, "decoding_mode: beam_search is not built"),
        ("", {"encoder_model_path": "/engines/t5"}, "encoder_model_path: models with an encoder"),
        ("", {"encoder_engine_dir": "/engines/t5"}, "encoder_model_path: models with an encoder"),
        ("", {"num_nodes": "2"}, "num_nodes: 2"),
        ("", {"gpt_model_type": "V2"}, "gpt_model_type: 'V2' is neither"),
        ("", {"batch_scheduler_policy": "best"}, "batch_scheduler_policy: 'best' is neither"),
        ("max_batch_size: -1", {}, "max_batch_size: expected a number from 0"),
        ("max_batch_size: 99999999999", {}, "max_batch_size: expected a number from 0"),
        ("max_batch_size: 1 max_batch_size: 2", {}, "max_batch_size is given 2 times"),
        ("max_batch_size: ${triton_max_batch_size}", {}, "max_batch_size is still ${triton_max_batch_size}"),
        ("model_transaction_policy { decoupled: yes }", {}, "decoupled: expected true or false"),
        ("dynamic_batching: 3", {}, "dynamic_batching: expected { }"),
        ("parameters { }", {}, "parameters: one has no key"),
        ('parameters { key: "x" value: "y" }', {}, "value: expected { }"),
        ('parameters { key: "max_beam_width" }', {"max_beam_width": "1"}, "'max_beam_width' is given twice"),
        ("", {"kv_cache_free_gpu_mem_fraction": "1.5"}, "expected a number from 0 to 1, not '1.5'"),
        ("", {"kv_cache_free_gpu_mem_fraction": "0"}, "leaves no room"),
        ("", {"kv_cache_free_gpu_mem_fraction": "nan"}, "expected a number from 0 to 1"),
        ("", {"kv_cache_free_gpu_mem_fraction": "."}, "expected a number from 0 to 1"),
        ("", {"kv_cache_free_gpu_mem_fraction": "9" * 5000}, "expected a number from 0 to 1"),
        ("", {"max_tokens_in_paged_kv_cache": "0"}, "expected a number above 0"),
        ("", {"max_tokens_in_paged_kv_cache": "1e3"}, "expected a number above 0"),
        ("", {"max_tokens_in_paged_kv_cache": "9" * 5000}, "expected a number above 0"),
        ("", {"max_tokens_in_paged_kv_cache": "٣"}, "expected a number above 0"),
        ("", {"enable_chunked_context": "maybe"}, "enable_chunked_context: expected true or false"),
        ("", {"gpu_device_ids": "0,x"}, "gpu_device_ids: '0,x' is no list"),
        ("a {", {}, "line "),
    ],
)
def test_what_would_answer_otherwise_or_cannot_be_is_refused(top: str, parameters: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(config(top, **parameters))
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


def test_of_another_backend_nothing_is_read() -> None:
    with user_error("file_wrong_kind"):
        read('backend: "onnxruntime"')
    for backend in ("python", "${triton_backend}"):
        assert read(f'backend: "{backend}" max_batch_size: 3').options["max-running"] == 3


def test_a_file_is_named_in_what_is_wrong_with_it(tmp_path: Path) -> None:
    file = tmp_path / "config.pbtxt"
    file.write_text("max_batch_size: x")
    with user_error("file_malformed"):
        triton_config.load(file)
    with pytest.raises(OSError):
        triton_config.load(tmp_path / "none")
