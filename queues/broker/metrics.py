"""Prometheus metrics of the broker.

A scrape asks the broker for its status, so nothing is counted on the way of a group.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from queues.broker.status import BrokerStatus

GAUGES: dict[str, tuple[str, Callable[[BrokerStatus], float]]] = {
    "headway_version": ("Batches trained.", lambda x: x.version),
    "headway_steps": ("Batches that the run trains.", lambda x: x.steps),
    "headway_live_groups": ("Train groups leased, ready or taken.", lambda x: x.live),
    "headway_window_groups": ("Largest number of live train groups.", lambda x: x.window),
    "headway_staleness_window": (
        "Versions after its start until which a new group is due.",
        lambda x: x.staleness_window,
    ),
    "headway_overdue_groups": ("Live groups whose deadline has passed.", lambda x: x.overdue),
    "headway_paused": ("1 while the broker's disk is full.", lambda x: x.paused is not None),
    "headway_ready_oldest_seconds": (
        "Longest time that a ready group has waited.",
        lambda x: x.oldest_ready_seconds,
    ),
    "headway_queued_oldest_seconds": (
        "Age of the oldest group that waits for a lease.",
        lambda x: x.oldest_queued_seconds,
    ),
    "headway_learner_waits_for_groups": (
        "Leased groups that are due, so that the learner waits for them.",
        lambda x: len(x.waits_for),
    ),
}
"""Name, help text and value of every metric without labels."""
COUNTERS: dict[str, tuple[str, Callable[[BrokerStatus], float]]] = {
    "headway_results_accepted": ("Results, evaluations included.", lambda x: x.accepted),
    "headway_batches_diverged": (
        "Batches that were trained again and gave other weights than before.",
        lambda x: x.diverged,
    ),
}
LABELLED: list[tuple[Any, str, str, list[str], Callable[[BrokerStatus], Mapping[Any, float]]]] = [
    (GaugeMetricFamily, "headway_groups", "Train groups by state.", ["state"], lambda x: x.depth),
    (
        GaugeMetricFamily,
        "headway_engine_version",
        "Policy version that an engine serves.",
        ["engine"],
        lambda x: x.engines,
    ),
    (
        CounterMetricFamily,
        "headway_groups_ended",
        "Train groups that were dropped or failed, by reason.",
        ["state", "reason"],
        lambda x: x.ended,
    ),
    (
        CounterMetricFamily,
        "headway_leases_given_back",
        "Leases without a result.",
        ["reason"],
        lambda x: x.given_back,
    ),
    (
        CounterMetricFamily,
        "headway_results_refused",
        "Results of groups that have one (duplicate), or of lost leases (fenced).",
        ["reason"],
        lambda x: x.refused,
    ),
]
"""Kind, name, help text, labels and values of every metric with labels."""


class BrokerMetrics(Collector):
    """Collector of the broker's metrics; `status` is called from any thread."""

    def __init__(self, status: Callable[[], BrokerStatus]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not ask the broker."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        status = self._status()
        for name, (text, value) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=value(status))
        for name, (text, value) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=value(status))
        for family, name, text, labels, values in LABELLED:
            metric = family(name, text, labels=labels)
            for key, number in values(status).items():
                metric.add_metric([key] if isinstance(key, str) else key, number)
            yield metric
