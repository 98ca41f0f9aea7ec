"""Metrics of the learner: the statistics of the batches that it trained, and what it does now."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Upper ends of the buckets of lags."""
COUNTS = {
    "tokens_trained": "Sampled tokens in trained batches.",
    "rollouts_trained": "Rollouts in trained batches.",
    "optimizer_steps": "Steps of the policy's optimizer.",
    "tied_groups": "Groups in trained batches whose rewards were all equal.",
    "unscored": "Rollouts in trained batches without a finite reward.",
    "truncated_rollouts": "Rollouts in trained batches that were cut off at their length limit.",
    "multi_version_rollouts": "Rollouts in trained batches that crossed an update.",
    "versions_skipped": "Versions that were never sent, since a newer one overtook them.",
}
"""Statistics that are summed over batches, and what they are."""
FIGURES = {
    "loss": "Of the newest batch.",
    "grad_norm": "Before clipping.",
    "reward_mean": "Of the newest batch.",
    "reward_std": "Of the newest batch.",
    "response_length_mean": "Sampled tokens of a rollout.",
    "entropy_mean": "Nats a token.",
    "ess": "Effective sample size over the number of tokens.",
    "lag_mean": "Versions.",
    "max_lag": "Versions.",
    "pack_efficiency": "Tokens over room of the rows of a batch.",
    "rank_imbalance": "Workload of the busiest rank over the mean; at each row with ZeRO 2 and 3.",
    "reference_kl": "Nats a token, to the reference policy.",
    "value_loss": "Of the critic.",
    "explained_variance": "Of the critic.",
}
"""Statistics of the newest batch, and what they are; those without a number are left out."""
ORIGINS = ("fresh", "crossed", "stale")
"""Of rollouts, as `learner.diagnostics.off_policy` tells them apart."""
PHASES = ("wait", "step", "publish")
"""What the learner spends its time with; while it waits for a batch it is idle."""


class LearnerMetrics(Collector):
    """What `observe` was told, and since when the learner has been doing what it does."""

    def __init__(self) -> None:
        self._row: Mapping[str, Any] = {}
        self._sums: Counter[str] = Counter()
        self._lags: Counter[int] = Counter()
        self._group_lags: Counter[int] = Counter()
        self._seconds: Counter[str] = Counter()
        self._batches = 0
        self._finished_at = time.time()
        self._whole = threading.Lock()
        """Scrapes come from another thread, and see a batch whole or not at all."""

    def observe(self, row: Mapping[str, Any]) -> None:
        """Takes in the statistics of a trained batch, as they are acknowledged."""
        with self._whole:
            self._add(row)

    def _add(self, row: Mapping[str, Any]) -> None:
        self._batches += 1
        self._sums.update({name: row.get(name) or 0 for name in COUNTS})
        for lags, counted in (
            (self._lags, row["lag_histogram"]),
            (self._group_lags, row["group_lag_histogram"]),
        ):
            lags.update({int(lag): count for lag, count in counted.items()})
        self._seconds["wait"] += row["wait_finished_at"] - row["wait_started_at"]
        self._seconds["step"] += row["step_finished_at"] - row["step_started_at"]
        self._seconds["publish"] += row["published_at"] - row["step_finished_at"]
        self._finished_at, self._row = time.time(), row

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        with self._whole:
            return iter([*self._collect()])

    def _collect(self) -> Iterator[Metric]:
        row = self._row
        yield CounterMetricFamily("headway_batches_trained", "In this session.", self._batches)
        for name, text in COUNTS.items():
            yield CounterMetricFamily(f"headway_{name}", text, self._sums[name])
        seconds = CounterMetricFamily(
            "headway_learner_seconds", "Of the learner, by phase.", labels=["phase"]
        )
        for phase in PHASES:
            seconds.add_metric([phase], self._seconds[phase])
        yield seconds
        yield GaugeMetricFamily(
            "headway_last_batch_timestamp_seconds",
            "When the newest batch was trained; before the first, when metrics began.",
            self._finished_at,
        )
        yield _histogram("headway_token_lag", "Versions, of each trained token.", self._lags)
        yield _histogram(
            "headway_group_lag",
            "Versions, of the oldest token of each trained group.",
            self._group_lags,
        )
        for name, text in FIGURES.items():
            if row.get(name) is not None:
                yield GaugeMetricFamily(f"headway_{name}", text, row[name])
        for kind, text in (
            ("mismatch", "Mean |log-ratio| of learner and sampler"),
            ("kl", "KL(sampler ‖ learner), nats a token"),
            ("tokens", "Tokens of the newest batch"),
        ):
            family = GaugeMetricFamily(f"headway_origin_{kind}", f"{text}.", labels=["origin"])
            for origin in ORIGINS:
                if row.get(f"{kind}_{origin}") is not None:
                    family.add_metric([origin], row[f"{kind}_{origin}"])
            yield family
        fractions = GaugeMetricFamily(
            "headway_token_fraction",
            "Of the newest batch's tokens: clipped, capped, rejected, not finite.",
            labels=["kind"],
        )
        for kind, value in row.get("fractions", {}).items():
            if value is not None:
                fractions.add_metric([kind], value)
        yield fractions


def _histogram(name: str, text: str, lags: Mapping[int, int]) -> Metric:
    """Lags, cumulatively by bucket."""
    buckets = [(str(top), sum(n for lag, n in lags.items() if lag <= top)) for top in LAGS]
    total = sum(lags.values())
    family = HistogramMetricFamily(name, text)
    family.add_metric(
        [],
        buckets=[*((f"{top}.0", count) for top, count in buckets), ("+Inf", total)],
        sum_value=sum(lag * count for lag, count in lags.items()),
    )
    return family
