"""Metrics of several engines: those of each with a label, and what the group did."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attar.server.metrics import EngineMetrics, Labelled, held_choices
from attar.server.replicas.group import REPLAYS, ReplicaGroup
from attar.server.replicas.replica import STATES


class ReplicaMetrics(Collector):
    """The metrics of a group of engines."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        engines = {each.label: EngineMetrics(each.client, held=False) for each in group.replicas}
        self._engines = Labelled(engines, "replica")

    def collect(self) -> Iterator[Metric]:
        yield from self._engines.collect()
        yield held_choices(self._group.held)
        states = GaugeMetricFamily("attar_replica_state", "1 for the state of a replica", labels=["replica", "state"])
        open_ = GaugeMetricFamily("attar_replica_requests_open", "Requests of a replica", labels=["replica"])
        counters = {
            name: CounterMetricFamily(name, help_, labels=["replica"])
            for name, help_ in (
                ("attar_replica_deaths", "Engines of a replica that ended unasked"),
                ("attar_replica_restarts", "Restarts of a replica that were asked for"),
                ("attar_replica_requests", "Requests sent to a replica, continued ones included"),
                ("attar_replica_prompt_tokens", "Tokens of their prompts"),
                ("attar_replica_prompt_tokens_cached", "Of those, tokens that the router expected to be cached"),
            )
        }
        for each in self._group.replicas:
            name = [each.label]
            for state in STATES:
                states.add_metric([*name, state], float(each.state == state))
            open_.add_metric(name, len(each.client.open))
            told = (each.deaths, each.restarts, each.routed, each.asked, each.cached)
            for counter, value in zip(counters.values(), told, strict=True):
                counter.add_metric(name, value)
        replays = CounterMetricFamily(
            "attar_replays", "Requests whose engine had gone, by what became of them", labels=["outcome"]
        )
        for outcome in REPLAYS:
            replays.add_metric([outcome], self._group.replays[outcome])
        yield from (states, open_, *counters.values(), replays)
