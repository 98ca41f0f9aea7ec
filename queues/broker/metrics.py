"""Prometheus metrics of the broker.

A scrape asks the broker for its status, so nothing is counted on the way of a group.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from headway.metrics import labelled
from queues.broker.status import BrokerStatus


class BrokerMetrics(Collector):
    """Collector of the broker's metrics; `status` is called from any thread."""

    def __init__(self, status: Callable[[], BrokerStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield Gauge("headway_version", "Batches trained.", status.version)
        yield Gauge("headway_steps", "Batches that the run trains.", status.steps)
        yield Gauge("headway_live_groups", "Train groups leased, ready or taken.", status.live)
        yield Gauge("headway_window_groups", "Largest number of live train groups.", status.window)
        text = "Versions after its start until which a new group is due."
        yield Gauge("headway_staleness_window", text, status.staleness_window)
        text = "Moves of that number since the broker began, by reason."
        moves = Counter("headway_staleness_window_moves", text, labels=["reason"])
        yield labelled(moves, status.window_moves)
        text = "Live groups whose deadline has passed."
        yield Gauge("headway_overdue_groups", text, status.overdue)
        text = "1 while the broker waits for its disk or its backup."
        yield Gauge("headway_paused", text, status.paused is not None)
        text = "Longest time that a ready group has waited."
        yield Gauge("headway_ready_oldest_seconds", text, status.oldest_ready_seconds)
        text = "Age of the oldest group that waits for a lease."
        yield Gauge("headway_queued_oldest_seconds", text, status.oldest_queued_seconds)
        text = "Leased groups that are due, so that the learner waits for them."
        yield Gauge("headway_learner_waits_for_groups", text, len(status.waits_for))
        yield Counter("headway_results_accepted", "Results, evaluations included.", status.accepted)
        text = "Batches that were trained again and gave other weights than before."
        yield Counter("headway_batches_diverged", text, status.diverged)
        text = "Train groups by state."
        yield labelled(Gauge("headway_groups", text, labels=["state"]), status.depth)
        text = "Policy version that an engine serves."
        yield labelled(Gauge("headway_engine_version", text, labels=["engine"]), status.engines)
        text = "Train groups that were dropped or failed, by reason."
        ended = Counter("headway_groups_ended", text, labels=["state", "reason"])
        yield labelled(ended, status.ended)
        text = "Leases without a result."
        given_back = Counter("headway_leases_given_back", text, labels=["reason"])
        yield labelled(given_back, status.given_back)
        text = "Results of groups that have one (duplicate), or of lost leases (fenced)."
        yield labelled(Counter("headway_results_refused", text, labels=["reason"]), status.refused)
