"""Metrics of the broker.

A scrape asks the broker for its status, so nothing is counted on the way of a group.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from queues.broker.status import BrokerStatus


class BrokerMetrics(Collector):
    """What a broker shows of itself.

    Args:
        status: The broker's status at this moment, asked from any thread.
    """

    def __init__(self, status: Callable[[], BrokerStatus]) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not ask the broker."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        status = self._status()
        yield gauge("headway_version", "Batches trained.", status.version)
        yield gauge("headway_steps", "Batches that the run trains.", status.steps)
        groups = GaugeMetricFamily(
            "headway_groups", "Train groups by the state that they are in.", labels=["state"]
        )
        for state, count in status.depth.items():
            groups.add_metric([state], count)
        yield groups
        ended = CounterMetricFamily(
            "headway_groups_ended",
            "Train groups that were dropped or failed, by reason.",
            labels=["state", "reason"],
        )
        for (state, reason), count in status.ended.items():
            ended.add_metric([state, reason], count)
        yield ended
        yield CounterMetricFamily(
            "headway_results_accepted", "Results, evaluations included.", value=status.accepted
        )
        given_back = CounterMetricFamily(
            "headway_leases_given_back", "Leases without a result, by reason.", labels=["reason"]
        )
        for reason, count in status.given_back.items():
            given_back.add_metric([reason], count)
        yield given_back
        refused = CounterMetricFamily(
            "headway_results_refused",
            "Results of groups that have one (duplicate), or of lost leases (fenced).",
            labels=["reason"],
        )
        for reason, count in status.refused.items():
            refused.add_metric([reason], count)
        yield refused
        yield CounterMetricFamily(
            "headway_batches_diverged",
            "Batches that were trained again and gave other weights than before.",
            value=status.diverged,
        )
        yield gauge("headway_live_groups", "Leased, ready or taken.", status.live)
        yield gauge("headway_window_groups", "How many may be live.", status.window)
        yield gauge(
            "headway_staleness_window",
            "Versions after its start until which a new group is due.",
            status.staleness_window,
        )
        yield gauge(
            "headway_overdue_groups", "Live groups whose deadline has passed.", status.overdue
        )
        yield gauge("headway_paused", "1 while the broker's disk is full.", bool(status.paused))
        yield gauge(
            "headway_ready_oldest_seconds",
            "How long the oldest ready group has waited.",
            status.oldest_ready_seconds,
        )
        yield gauge(
            "headway_queued_oldest_seconds",
            "How long ago the oldest group in line for a lease was issued.",
            status.oldest_queued_seconds,
        )
        yield gauge(
            "headway_learner_waits_for_groups",
            "Leased groups that are due, so that the learner waits for them.",
            len(status.waits_for),
        )
        engines = GaugeMetricFamily(
            "headway_engine_version", "The policy version that an engine serves.", labels=["engine"]
        )
        for engine, version in status.engines.items():
            engines.add_metric([engine], version)
        yield engines


def gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)
