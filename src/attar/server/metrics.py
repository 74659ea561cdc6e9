"""Prometheus metrics at /metrics: the engine's last reported state, and latencies of requests.

The engine's counters are passed through, not counted again. Latencies are measured where the user is: TTFT from a
request's arrival to its first token, inter-token latency between two tokens of a choice, both in this process. An
engine without a report yet has its blocks free and everything else at zero; without an engine there are no blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attar.protocol.messages import DISK_CACHE, PREFILL_PEER, Stats
from attar.server.engine_client.client import EngineClient

BEAT = 0.05  # seconds between two measurements of the loop's lag
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class HttpMetrics:
    """Metrics of HTTP and of this process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.requests = counter("attar_http_requests", "Requests by route and status", ["route", "status"])
        self.limited = counter("attar_requests_limited", "Requests that a key's own limit turned away", ["limit"])
        self.open = gauge("attar_http_requests_open", "Requests that are being answered")
        self.lag = Histogram(
            "attar_event_loop_lag_seconds", "Lateness of a timer in this process", buckets=_SECONDS, registry=registry
        )
        self.max_lag = gauge("attar_event_loop_lag_max_seconds", "The worst of it, ever")
        self._worst = 0.0

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    async def watch_loop(self) -> None:
        """Measure the event loop's lag for ever."""
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                due = time.monotonic() + BEAT
                await asyncio.sleep(BEAT)
                lag = max(0.0, time.monotonic() - due)
                self.lag.observe(lag)
                if lag > self._worst:
                    self._worst = lag
                    self.max_lag.set(lag)


class Metrics(HttpMetrics):
    """Metrics of a server, and those that `engine` collects; with `http`, of one model of a server that has several,
    whose metrics of HTTP those are."""

    def __init__(self, engine: Collector, http: HttpMetrics | None = None) -> None:
        super().__init__()
        if http is not None:
            self.registry, self.limited = CollectorRegistry(), http.limited
        registry = self.registry
        registry.register(engine)
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self.ended = counter(
            "attar_requests_ended",
            "Requests that the engine was asked, by their end: stop, length, or the code of a failure, which a stream "
            "that began with 200 tells in its last event",
            ["outcome"],
        )
        self.loosened = counter(
            "attar_tools_loosened",
            "Tools of requests whose arguments are only held to be JSON objects: no mask keeps their schema",
        )
        self.prompt_tokens = counter("attar_prompt_tokens", "Tokens of prompts that the engine has begun to answer")
        self.generated_tokens = counter("attar_generated_tokens", "Tokens given out")
        self.ttft = histogram("attar_time_to_first_token_seconds", "From arrival to the first token")
        self.inter_token = histogram("attar_inter_token_seconds", "Between a choice's tokens")
        self.end_to_end = histogram(
            "attar_request_seconds",
            "From arrival to the end of the answer, of requests that were answered to their end",
        )


class Labelled(Collector):
    """The metrics of several engines, each with its name as a label."""

    def __init__(self, sources: Mapping[str, CollectorRegistry | Collector], label: str = "model") -> None:
        self._sources, self._label = sources, label

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, source in self._sources.items():
            for found in source.collect():
                family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                family.samples += [each._replace(labels={self._label: name, **each.labels}) for each in found.samples]
        yield from families.values()


def held_choices(count: int) -> Metric:
    """Return the metric of choices that wait in this process."""
    return GaugeMetricFamily(
        "attar_requests_held", "Choices of open requests that wait for room in the queue", value=count
    )


def _of_peer(counts: Sequence[int]) -> Iterator[Metric]:
    """Yield the metrics of a prefill peer, of counts as `Stats.prefill_peer` has them."""
    helps = (
        "Blocks pulled from the prefill engine", "Bytes of blocks pulled from the prefill engine",
        "Blocks sent to decode engines", "Bytes of blocks sent to decode engines",
        "Answers or connections refused: model, settings, credentials or contents were not those expected",
        "Answers that broke off or never came", "Prompts for which the prefill engine had no blocks",
    )  # fmt: skip
    for name, help_, value in zip(PREFILL_PEER, helps, counts, strict=True):
        yield CounterMetricFamily(f"attar_prefill_peer_{name}", help_, value=value)


def _of_disk_cache(counts: Sequence[int]) -> Iterator[Metric]:
    """Yield the metrics of a disk cache, of counts as `Stats.disk_cache` has them."""
    told = dict(zip(DISK_CACHE, counts, strict=True))
    for name, help_ in (
        ("blocks", "Blocks of the KV cache on disk"),
        ("bytes", "Bytes of their files"),
    ):
        yield GaugeMetricFamily(f"attar_disk_cache_{name}", help_, value=told.pop(name))
    for name, help_ in (
        ("loaded_blocks", "Blocks read from disk"),
        ("loaded_bytes", "Bytes read from disk"),
        ("saved_blocks", "Blocks written to disk"),
        ("saved_bytes", "Bytes written to disk"),
        ("refused", "Files deleted because they were damaged or of another block"),
        ("failed", "Reads and writes that failed"),
        ("dropped", "Files deleted to make room"),
        ("skipped", "Prefixes of prompts not saved: too many waited, or a write had failed"),
        ("late", "Fetches from disk that ended after their requests had stopped waiting"),
    ):
        yield CounterMetricFamily(f"attar_disk_cache_{name}", help_, value=told.pop(name))
    assert not told, "counts without a metric"


class EngineMetrics(Collector):
    """The metrics that one engine reports; `held` are choices that wait in this process, by default its client's."""

    def __init__(self, engine: EngineClient, held: bool = True) -> None:
        self._engine, self._held = engine, held

    def collect(self) -> Iterator[Metric]:
        ready = self._engine.ready
        up = ready is not None and self._engine.heartbeat.trouble is None
        yield GaugeMetricFamily("attar_engine_up", "1 while the engine is ready", value=float(up))
        stats = self._engine.stats or Stats(0, 0, 0 if ready is None else ready.blocks, 0, 0, 0, 0, 0, 0, 0, 0.0)
        for name, help_, count in (
            ("attar_requests_running", "Choices in the running batch: a request has n for each prompt", stats.running),
            ("attar_requests_waiting", "Choices in the engine's queue", stats.waiting),
        ):
            yield GaugeMetricFamily(name, help_, value=count)
        if self._held:
            yield held_choices(self._engine.held)
        blocks = GaugeMetricFamily("attar_kv_blocks", "Blocks of the KV cache by state", labels=["state"])
        blocks.add_metric(["free"], stats.blocks_free)
        blocks.add_metric(["active"], stats.blocks_active)
        blocks.add_metric(["cached"], stats.blocks_cached)
        yield blocks
        if stats.sliding_blocks is not None:
            help_ = "Blocks of layers with a sliding window by state, where those have blocks of their own"
            sliding = GaugeMetricFamily("attar_kv_sliding_blocks", help_, labels=["state"])
            for state, count in zip(("free", "active", "cached"), stats.sliding_blocks, strict=True):
                sliding.add_metric([state], count)
            yield sliding
        for name, help_, value in (
            ("attar_prefix_tokens_asked", "Prompt tokens that the prefix cache was asked for", stats.prompt_tokens),
            ("attar_prefix_tokens_hit", "Of those, reused", stats.reused_tokens),
            ("attar_engine_tokens", "Tokens generated, whether or not anyone still read them", stats.generated_tokens),
            ("attar_preemptions", "Choices put back to make room for others", stats.preemptions),
            ("attar_steps", "Steps of the engine", stats.steps),
            ("attar_step_seconds", "Time in steps of the engine", stats.step_seconds),
            ("attar_draft_tokens", "Drafts of speculative decoding that were verified", stats.drafted_tokens),
            ("attar_draft_tokens_accepted", "Of those, the right ones", stats.accepted_tokens),
            ("attar_forced_tokens_accepted", "Of those, the ones that a constraint forced", stats.forced_tokens),
            ("attar_forced_tokens_overruled", "Forced tokens trusted in place of drawn ones", stats.overruled_tokens),
            ("attar_draft_steps", "Steps of decoding choices with a drafter", stats.draft_steps),
            ("attar_draft_seconds", "Time making drafts", stats.draft_seconds),
            ("attar_draft_errors", "Failures of the drafter, and drafts that are no tokens", stats.draft_errors),
            ("attar_evicted_tokens", "Tokens whose keys were dropped by KV eviction", stats.evicted_tokens),
            ("attar_sparse_keys_seen", "Keys that rows of outputs saw, with sparse attention", stats.keys_seen),
            ("attar_sparse_keys_read", "Of those, read in each layer that is not dense", stats.keys_read),
            ("attar_prefill_keys_seen", "Keys that rows of prompts saw, with sparse prefill", stats.prompt_keys_seen),
            ("attar_prefill_keys_read", "Of those, read in each layer without a window", stats.prompt_keys_read),
            ("attar_steps_ahead", "Steps launched before the last one's tokens were known", stats.steps_ahead),
        ):
            yield CounterMetricFamily(name, help_, value=value)
        if stats.disk_cache is not None:
            yield from _of_disk_cache(stats.disk_cache)
        if stats.prefill_peer is not None:
            yield from _of_peer(stats.prefill_peer)
        for name, help_, counts in (
            ("attar_draft_tokens_by_position", "Drafts verified, a step's first at 1", stats.drafted_by_position),
            ("attar_draft_tokens_accepted_by_position", "Of those, the right ones", stats.accepted_by_position),
        ):
            family = CounterMetricFamily(name, help_, labels=["position"])
            for position, count in enumerate(counts, 1):
                family.add_metric([str(position)], count)
            yield family
