"""Metrics that the driver of a run serves: weight updates, restarts, held-out scores, its disk."""

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deploy.observability.waits import Wait
from deploy.storage.run_record import Record
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
        self._updates: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        """Collect for one scrape; concurrent scrapes take turns, so that an update counts once."""
        with self._one_scrape:
            return iter([*self._collect()])

    def _collect(self) -> Iterator[Metric]:
        record = self._record
        yield InfoMetricFamily(
            "headway_run",
            "Name and staleness bound of the run, as labels; always 1.",
            value={"name": record.name, "max_staleness": str(record.max_staleness)},
        )
        yield GaugeMetricFamily(
            "headway_max_staleness", "Largest lag allowed, in versions.", record.max_staleness
        )
        yield from self._weight_updates()
        for name, text, figures in (
            ("restarts", "Processes that were restarted.", record.restarts),
            (
                "lost_seconds",
                "Seconds from the deaths of a process until another had taken its place.",
                record.away,
            ),
        ):
            family = CounterMetricFamily(
                f"headway_{name}", text, labels=["restarted", "restarted_role"]
            )
            for process in dict.fromkeys([*self._processes(), *figures]):
                family.add_metric([process, role_of(process) or process], figures.get(process, 0))
            yield family
        drifts = GaugeMetricFamily(
            "headway_engine_drift",
            "1 for an engine whose mismatch with the learner stands out among the engines, else 0.",
            labels=["engine"],
        )
        for engine, named in list(record.drifting.items()):
            drifts.add_metric([engine], named)
        yield drifts
        scores = GaugeMetricFamily(
            "headway_heldout_score", "The newest held-out score.", labels=["kind"]
        )
        failed = GaugeMetricFamily(
            "headway_heldout_failed",
            "Rollouts, of pass@k problems, that failed and are not in the newest held-out score.",
            labels=["kind"],
        )
        for kind, score in record.newest_scores().items():
            failed.add_metric([kind], score.failed)
            if score.value is not None:
                scores.add_metric([kind], score.value)
        yield scores
        yield failed
        yield from self._waits()
        yield from self._disk()

    def _disk(self) -> Iterator[Metric]:
        """Yield the free space; nothing while the disk does not answer in time."""
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask_disk, name="free-space", daemon=True)
            self._asking.start()
        self._asking.join(self._disk_seconds)
        if not self._asking.is_alive() and self._free is not None:
            yield GaugeMetricFamily(
                "headway_disk_free_bytes", "Free bytes on the disk of the run's folder.", self._free
            )

    def _ask_disk(self) -> None:
        self._free = shutil.disk_usage(self._folder).free

    def _waits(self) -> Iterator[Metric]:
        late = self._overdue()
        yield GaugeMetricFamily(
            "headway_overdue_waits", "Waits longer than deploy.watchdog_seconds.", len(late)
        )
        seconds = GaugeMetricFamily(
            "headway_overdue_wait_seconds",
            "Seconds that a process has waited for another without progress.",
            labels=["who", "on"],
        )
        for wait in late:
            seconds.add_metric([wait.who, wait.on], wait.seconds)
        yield seconds

    def _weight_updates(self) -> Iterator[Metric]:
        for update in self._record.swaps[self._seen :]:
            self._seen += 1
            self._add(update)
        seconds = CounterMetricFamily(
            "headway_weight_update_seconds",
            "Seconds of successful weight updates, by phase.",
            labels=["engine", "phase"],
        )
        for (engine, phase), value in self._seconds.items():
            seconds.add_metric([engine, phase], value)
        yield seconds
        for name, text, counts in (
            ("updates", "Weight updates that succeeded.", self._updates),
            ("update_failures", "Weight updates that failed.", self._failures),
            ("update_bytes", "Bytes of weights that were loaded.", self._bytes),
        ):
            family = CounterMetricFamily(f"headway_weight_{name}", text, labels=["engine"])
            for engine in sorted(self._updates.keys() | self._failures.keys()):
                family.add_metric([engine], counts[engine])
            yield family

    def _add(self, update: WeightUpdateReport) -> None:
        engine = update.engine_id
        staged, started, serving = update.staged_at, update.swap_started_at, update.serving_seconds
        if staged is None or started is None or serving is None:
            self._failures[engine] += 1
            return
        self._updates[engine] += 1
        self._bytes[engine] += update.bytes
        seconds = {
            "stage": staged - update.published_at,  # received and verified during generation
            "prepare": update.prepare_seconds,  # loaded during generation
            "permit": started - staged - update.prepare_seconds,  # waiting for other engines
            "pause": update.stalled_seconds,  # generation stands still
            "serve": serving,  # all of it, from `publish` to generation with the new weights
        }
        self._seconds.update({(engine, phase): max(0.0, value) for phase, value in seconds.items()})
