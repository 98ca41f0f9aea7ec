"""Metrics of one rollout actor: its statistics, and some of vLLM's own metrics."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.rollout.actor_statistics import ActorStatistics
from headway.metrics import labelled

ENGINE = ("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:num_preemptions")
"""The metrics of vLLM that are shown: those without an equivalent here."""


class EngineMetrics(Collector):
    """Metrics of vLLM in this process, without its labels, which are the same in every run."""

    def collect(self) -> Iterator[Metric]:
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
        values = self._statistics.statistics()
        text = "Tokens sampled, evaluations included; none of rollouts that failed."
        yield CounterMetricFamily("headway_tokens_generated", text, values["tokens_generated"])
        text = "Rollouts that ended with a result."
        yield CounterMetricFamily("headway_rollouts_generated", text, values["rollouts"])
        text = "Seconds since the first weights."
        yield CounterMetricFamily("headway_serving_seconds", text, values["serving_seconds"])
        text = "Rollouts being generated now."
        yield GaugeMetricFamily("headway_running_rollouts", text, values["running_rollouts"])
        for name, key, label, text in (
            ("actor_groups", "groups", "result", "Groups by their result."),
            ("idle_seconds", "idle_seconds", "on", "Seconds without a rollout, by the reason."),
        ):
            family = CounterMetricFamily(f"headway_{name}", text, labels=[label])
            yield labelled(family, values[key])
        yield from self._of_agents(values["agents"])

    def _of_agents(self, values: Mapping[str, Any]) -> Iterator[Metric]:
        """Yield the time of environments and the counters of agents' sessions."""
        text = "Sessions of agents that are open now."
        yield GaugeMetricFamily("headway_agent_sessions", text, values["sessions"])
        seconds = dict(values["seconds"])
        for name, text, count in (
            ("agent_turns", "Answers of the policy to agents.", values["turns"]),
            ("agent_segments", "Turns that began a further segment.", values["segments"]),
            (
                "environment_seconds",
                "Seconds that in-process environments took to answer, tools included.",
                seconds.pop("environment"),
            ),
        ):
            yield CounterMetricFamily(f"headway_{name}", text, count)
        for name, label, text, counts in (
            ("tokens_left_out", "reason", "Sampled tokens that do not train.", values["left_out"]),
            ("seconds", "waiting_for", "Seconds of sessions, by who was waited for.", seconds),
        ):
            family = CounterMetricFamily(f"headway_agent_{name}", text, labels=[label])
            yield labelled(family, counts)
