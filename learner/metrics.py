"""Prometheus metrics of the learner: figures of trained batches, and its current phase."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from headway import clock
from headway.clean_text import printable
from headway.metrics import labelled
from learner.diagnostics.batch_report import BatchReport, TrainedBatch

LAGS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Upper ends of the buckets of lags."""
MOST_SERIES = 256
"""Most series of one metric by engine, teacher or part of the reward."""
COUNTS = {
    "tokens_trained": "Sampled tokens that were trained, neither masked out nor dropped.",
    "rollouts_trained": "Rollouts with a token that was trained.",
    "optimizer_steps": "Steps of the policy's optimizer.",
    "tied_groups": "Groups in trained batches whose rollouts all earned the same task reward.",
    "unscored": "Rollouts in trained batches whose reward was not finite.",
    "truncated_rollouts": (
        "Rollouts in trained batches that were cut off at their limit of tokens or turns."
    ),
    "multi_version_rollouts": "Rollouts in trained batches that crossed a weight update.",
    "versions_skipped": "Versions never sent to engines, since a newer one overtook them.",
}
"""Fields of `BatchReport` that are summed over batches, and their help texts."""
FIGURES = {
    "loss": "Loss of the newest batch, with penalties.",
    "grad_norm": "Gradient norm of the newest batch, before clipping.",
    "learning_rate": "Learning rate of the newest optimizer step.",
    "reward_mean": "Mean reward of all rollouts of the newest batch.",
    "reward_std": "Standard deviation of the rewards of the newest batch.",
    "response_length_mean": "Sampled tokens of a rollout, mean of all of the newest batch.",
    "entropy_mean": "Entropy of the policy in nats a token, mean of the newest trained tokens.",
    "ess": "Effective sample size of the newest batch over its number of trained tokens.",
    "lag_mean": "Versions between sampling and training of a token, mean of the newest batch.",
    "max_lag": "Versions between sampling and training of a token, largest of the newest batch.",
    "pack_efficiency": "Tokens over the capacity of the microbatches of the newest batch.",
    "rank_imbalance": "Workload of the busiest rank over the mean of the ranks.",
    "reference_kl": "KL divergence from the reference policy in nats a trained token.",
    "lost_to_rounding": "Share of an adapter's changes lost in merging to bfloat16.",
    "value_loss": "Loss of the critic on the newest batch.",
    "explained_variance": "Share of the variance of the returns that the critic explains.",
}
"""Figures of the newest batch, and their help texts; those without a number are left out."""


class LearnerMetrics(Collector):
    """Metrics of the batches that `observe` was called with."""

    def __init__(self) -> None:
        self._report: BatchReport | None = None
        self._sums: Counter[str] = Counter()
        self._lags: Counter[int] = Counter()
        self._group_lags: Counter[int] = Counter()
        self._seconds = {"wait": 0.0, "step": 0.0, "publish": 0.0}
        self._batches = 0
        self._finished_at = clock.now()
        self._lock = threading.Lock()
        """Scrapes come from another thread, and see a batch whole or not at all."""

    def observe(self, batch: TrainedBatch) -> None:
        """Add a trained batch."""
        report, times = batch.report, batch.times
        with self._lock:
            self._batches += 1
            self._sums.update({name: getattr(report, name) or 0 for name in COUNTS})
            self._lags.update(report.lag_histogram)
            self._group_lags.update(report.group_lag_histogram)
            self._seconds["wait"] += times.wait_seconds
            self._seconds["step"] += times.step_seconds
            self._seconds["publish"] += times.publish_seconds
            self._finished_at, self._report = clock.now(), report

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            return iter([*self._collect()])

    def _collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "headway_batches_trained", "Batches trained in this session.", self._batches
        )
        for name, text in COUNTS.items():
            yield CounterMetricFamily(f"headway_{name}", text, self._sums[name])
        seconds = CounterMetricFamily(
            "headway_learner_seconds",
            "Seconds of the learner by phase; it is idle while it waits for a batch.",
            labels=["phase"],
        )
        yield labelled(seconds, self._seconds)
        yield GaugeMetricFamily(
            "headway_last_batch_timestamp_seconds",
            "When the newest batch was trained; before the first, when metrics began.",
            clock.wall(self._finished_at),
        )
        yield _histogram("headway_token_lag", "Lag in versions of each trained token.", self._lags)
        yield _histogram(
            "headway_group_lag",
            "Lag in versions of the oldest trained token of each group.",
            self._group_lags,
        )
        yield from _figures(self._report)


def _figures(report: BatchReport | None) -> Iterator[Metric]:
    """Yield the figures of the newest batch; families with labels also before the first."""
    row = report.to_dict() if report is not None else {}
    for name, text in FIGURES.items():
        if row.get(name) is not None:
            yield GaugeMetricFamily(f"headway_{name}", text, row[name])
    origins = report.origins if report is not None else {}
    for kind, text in (
        ("mismatch", "Mean |log-ratio| of learner and sampler, by origin of the rollouts."),
        ("kl", "KL(sampler ‖ learner) in nats a token, by origin of the rollouts."),
        ("tokens", "Trained tokens of the newest batch, by origin of the rollouts."),
    ):
        family = GaugeMetricFamily(f"headway_origin_{kind}", text, labels=["origin"])
        named = {origin: getattr(figures, kind) for origin, figures in origins.items()}
        yield labelled(family, {key: value for key, value in named.items() if value is not None})
    mismatches = GaugeMetricFamily(
        "headway_mismatch_fresh",
        "Mean |log-ratio| of learner and sampler over fresh tokens of the newest batch, by engine.",
        labels=["engine"],
    )
    fractions = GaugeMetricFamily(
        "headway_token_fraction",
        "Fraction of the newest trained tokens that were clipped, capped, rejected, not finite.",
        labels=["kind"],
    )
    parts = GaugeMetricFamily(
        "headway_reward_part",
        "Mean of each part of the reward in the newest batch, unweighted.",
        labels=["part"],
    )
    teachers = GaugeMetricFamily(
        "headway_teacher_divergence",
        "Divergence from each teacher in nats a trained token of the newest batch.",
        labels=["teacher"],
    )
    golds = GaugeMetricFamily(
        "headway_gold",
        "Figures of the newest batch's groups with a gold reward: reward and gold are means.",
        labels=["figure"],
    )
    gold = report.gold if report is not None else None
    engines = (report.engines if report is not None else None) or {}
    for family, values in (
        (mismatches, {name: figures.mismatch_fresh for name, figures in engines.items()}),
        (fractions, report.fractions if report is not None else {}),
        (golds, gold.means if gold is not None else {}),
        (parts, (report.reward_parts if report is not None else None) or {}),
        (teachers, (report.teacher_divergence if report is not None else None) or {}),
    ):
        for label, value in sorted(values.items())[:MOST_SERIES]:
            if value is not None:
                family.add_metric([printable(label)], value)
        yield family


def _histogram(name: str, text: str, lags: Mapping[int, int]) -> Metric:
    """Return a histogram of lags, with cumulative buckets."""
    buckets = [(str(top), sum(n for lag, n in lags.items() if lag <= top)) for top in LAGS]
    total = sum(lags.values())
    family = HistogramMetricFamily(name, text)
    family.add_metric(
        [],
        buckets=[*((f"{top}.0", count) for top, count in buckets), ("+Inf", total)],
        sum_value=sum(lag * count for lag, count in lags.items()),
    )
    return family
