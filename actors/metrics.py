"""Metrics of one rollout actor: its tally, and what is shown of its engine's own."""

from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.rollout.actor_statistics import ActorStatistics

ENGINE = ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_preemptions")
"""What is shown of vLLM's own metrics: of some hundred series what ours do not say."""


class EngineMetrics(Collector):
    """Those of vLLM in this process, without its labels, which say nothing of a run."""

    def describe(self) -> list[Metric]:
        """Nothing: there are none before the engine has started."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        for found in REGISTRY.collect():
            if found.name in ENGINE:
                shown = Metric(found.name, found.documentation, found.type)
                for sample in found.samples:
                    if not sample.name.endswith("_created"):
                        shown.add_sample(sample.name, {}, sample.value)
                yield shown


class ActorMetrics(Collector):
    """What an actor has done so far; from 0 again in each of its lives."""

    def __init__(self, tally: ActorStatistics) -> None:
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
