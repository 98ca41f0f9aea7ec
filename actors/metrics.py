"""Metrics of one rollout actor: its statistics, and some of vLLM's own metrics."""

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.rollout.actor_statistics import ActorStatistics

ENGINE = ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_preemptions")
"""The metrics of vLLM that are shown: those without an equivalent here."""


class EngineMetrics(Collector):
    """Metrics of vLLM in this process, without its labels, which are the same in every run."""

    def describe(self) -> list[Metric]:
        """Return nothing: the metrics appear when the engine has started."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        for metric in REGISTRY.collect():
            if metric.name in ENGINE:
                copy = Metric(metric.name, metric.documentation, metric.type)
                for sample in metric.samples:
                    if not sample.name.endswith("_created"):
                        copy.add_sample(sample.name, {}, sample.value)
                yield copy


class ActorMetrics(Collector):
    """Counters of an actor, from 0 after each restart."""

    def __init__(self, statistics: ActorStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one scrape."""
        values = self._statistics.statistics()
        yield CounterMetricFamily(
            "headway_tokens_generated",
            "Tokens sampled in rollouts that ended.",
            value=values["tokens_generated"],
        )
        yield CounterMetricFamily(
            "headway_rollouts_generated", "Rollouts that ended.", value=values["rollouts"]
        )
        groups = CounterMetricFamily(
            "headway_actor_groups", "Groups by their result.", labels=["result"]
        )
        for result, count in values["groups"].items():
            groups.add_metric([result], count)
        yield groups
        yield GaugeMetricFamily(
            "headway_running_rollouts",
            "Rollouts being generated now.",
            value=values["running_rollouts"],
        )
        idle = CounterMetricFamily(
            "headway_idle_seconds",
            "Seconds without a rollout, by the reason of the wait.",
            labels=["on"],
        )
        for reason, seconds in values["idle_seconds"].items():
            idle.add_metric([reason], seconds)
        yield idle
        yield CounterMetricFamily(
            "headway_serving_seconds",
            "Seconds since the first weights.",
            value=values["serving_seconds"],
        )
