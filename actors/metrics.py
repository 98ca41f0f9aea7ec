"""Metrics of one rollout actor, read from its tally at each scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.tally import Tally


class ActorMetrics(Collector):
    """What an actor has done so far; from 0 again in each of its lives."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        said = self._tally.statistics()
        yield CounterMetricFamily(
            "headway_tokens_generated",
            "Sampled in rollouts that came to their end.",
            value=said["tokens_generated"],
        )
        yield CounterMetricFamily(
            "headway_rollouts_generated", "That came to their end.", value=said["rollouts"]
        )
        groups = CounterMetricFamily(
            "headway_actor_groups", "Groups by what became of them.", labels=["result"]
        )
        for result, count in said["groups"].items():
            groups.add_metric([result], count)
        yield groups
        yield GaugeMetricFamily(
            "headway_running_rollouts", "That are being generated.", value=said["running_rollouts"]
        )
        idle = CounterMetricFamily(
            "headway_idle_seconds", "Without anything to do, by what is waited for.", labels=["on"]
        )
        for reason, seconds in said["idle_seconds"].items():
            idle.add_metric([reason], seconds)
        yield idle
        yield CounterMetricFamily(
            "headway_serving_seconds", "Since the first weights.", value=said["serving_seconds"]
        )
