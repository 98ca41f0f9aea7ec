"""Metrics that the driver of a run serves: weight updates, restarts, held-out scores, its disk."""

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from deploy.observability.waits import Wait
from deploy.storage.run_record import Record
from headway.metrics import labelled
from headway.roles import role_of
from weight_sync.announcements import WeightUpdateReport


class RunMetrics(Collector):
    """Collects metrics from the record of a run, in a scrape's thread while the driver appends.

    Also those of the disk of the run's `folder`, whose answer a scrape waits for `disk_seconds`,
    and of the waits that `overdue` returns. `processes` names those whose restarts are counted from
    0 on: Prometheus sees no increase in a series that begins at 1.
    """

    def __init__(
        self,
        record: Record,
        folder: Path,
        overdue: Callable[[], Sequence[Wait]],
        *,
        processes: Callable[[], Iterable[str]] = tuple,
        disk_seconds: float = 1.0,
    ) -> None:
        self._record, self._folder, self._overdue = record, folder, overdue
        self._processes, self._disk_seconds = processes, disk_seconds
        self._one_scrape = threading.Lock()
        self._free: int | None = None
        self._asking: threading.Thread | None = None
        self._seen = 0
        self._seconds: Counter[tuple[str, str]] = Counter()
        self._counts: Counter[tuple[str, str]] = Counter()
        """Updates, failed updates and bytes of each engine."""

    def collect(self) -> Iterator[Metric]:
        """Collect for one scrape; concurrent scrapes take turns, so that an update counts once."""
        with self._one_scrape:
            return iter([*self._collect()])

    def _collect(self) -> Iterator[Metric]:
        record, bound = self._record, self._record.max_staleness
        text = "Name and staleness bound of the run, as labels; always 1."
        value = {"name": record.name, "max_staleness": str(bound)}
        yield InfoMetricFamily("headway_run", text, value=value)
        text = "Largest lag allowed, in versions."
        yield GaugeMetricFamily("headway_max_staleness", text, bound)
        yield from self._weight_updates()
        lost = "Seconds from the deaths of a process until another had taken its place."
        for metric, text, figures in (
            ("restarts", "Processes that were restarted.", record.restarts),
            ("lost_seconds", lost, record.away),
        ):
            labels = ["restarted", "restarted_role"]
            processes = dict.fromkeys([*self._processes(), *figures])
            yield labelled(
                CounterMetricFamily(f"headway_{metric}", text, labels=labels),
                {(name, role_of(name) or name): figures.get(name, 0) for name in processes},
            )
        text = (
            "1 for an engine that differs from the learner, by a probe or more than others, else 0."
        )
        drifts = GaugeMetricFamily("headway_engine_drift", text, labels=["engine"])
        yield labelled(drifts, dict(record.drifting))
        text = "Findings that the reward rises and the gold reward does not."
        yield CounterMetricFamily("headway_reward_hackings", text, record.hackings)
        for name, text in (
            ("difference", "Nats between an engine's and the learner's scores of a probe."),
            ("tolerance", "Nats between them that rounding explains."),
        ):
            family = GaugeMetricFamily(f"headway_probe_{name}", text, labels=["engine"])
            probes = record.probes.items()
            yield labelled(family, {engine: getattr(probe, name) for engine, probe in probes})
        text = "Probes of an engine that served other weights than its version has."
        failures = CounterMetricFamily("headway_probe_failures", text, labels=["engine"])
        yield labelled(failures, {engine: record.failed_probes[engine] for engine in record.probes})
        scores = record.newest_scores()
        values = {kind: score.value for kind, score in scores.items() if score.value is not None}
        text = "The newest held-out score."
        yield labelled(GaugeMetricFamily("headway_heldout_score", text, labels=["kind"]), values)
        text = "Rollouts, of pass@k problems, that failed and are not in the newest held-out score."
        failed = GaugeMetricFamily("headway_heldout_failed", text, labels=["kind"])
        yield labelled(failed, {kind: score.failed for kind, score in scores.items()})
        overdue = self._overdue()
        text = "Waits longer than deploy.watchdog_seconds."
        yield GaugeMetricFamily("headway_overdue_waits", text, len(overdue))
        text = "Seconds that a process has waited for another without progress."
        waits = GaugeMetricFamily("headway_overdue_wait_seconds", text, labels=["who", "on"])
        yield labelled(waits, {(wait.who, wait.on): wait.seconds for wait in overdue})
        yield from self._disk()

    def _disk(self) -> Iterator[Metric]:
        """Yield the free space; nothing while the disk does not answer in time."""
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask_disk, name="free-space", daemon=True)
            self._asking.start()
        self._asking.join(self._disk_seconds)
        if not self._asking.is_alive() and self._free is not None:
            text = "Free bytes on the disk of the run's folder."
            yield GaugeMetricFamily("headway_disk_free_bytes", text, self._free)

    def _ask_disk(self) -> None:
        self._free = shutil.disk_usage(self._folder).free

    def _weight_updates(self) -> Iterator[Metric]:
        for update in self._record.swaps[self._seen :]:
            self._seen += 1
            self._add(update)
        text, labels = "Seconds of successful weight updates, by phase.", ["engine", "phase"]
        seconds = CounterMetricFamily("headway_weight_update_seconds", text, labels=labels)
        yield labelled(seconds, self._seconds)
        engines = sorted({engine for _, engine in self._counts})
        for name, text in (
            ("updates", "Weight updates that succeeded."),
            ("update_failures", "Weight updates that failed."),
            ("update_bytes", "Bytes of weights that were loaded."),
        ):
            family = CounterMetricFamily(f"headway_weight_{name}", text, labels=["engine"])
            yield labelled(family, {engine: self._counts[name, engine] for engine in engines})

    def _add(self, update: WeightUpdateReport) -> None:
        engine = update.engine_id
        staged, started, serving = update.staged_at, update.swap_started_at, update.serving_seconds
        if staged is None or started is None or serving is None:
            self._counts["update_failures", engine] += 1
            return
        self._counts["updates", engine] += 1
        self._counts["update_bytes", engine] += update.bytes
        seconds = {
            "stage": staged - update.published_at,  # received and verified during generation
            "prepare": update.prepare_seconds,  # loaded during generation
            "permit": started - staged - update.prepare_seconds,  # waiting for other engines
            "pause": update.stalled_seconds,  # generation stands still
            "serve": serving,  # all of it, from `publish` to generation with the new weights
        }
        self._seconds.update({(engine, phase): max(0.0, value) for phase, value in seconds.items()})
