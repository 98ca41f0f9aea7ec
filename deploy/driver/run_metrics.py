"""Metrics of a run that its driver knows: weight updates, restarts, held-out scores, its disk."""

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from deploy.observability.waits import Overdue
from deploy.storage.run_record import Record, Row

PHASES = ("stage", "prepare", "permit", "pause", "serve")
"""Of a weight update: verifying beside generation, loading beside it, waiting for other engines,
standing still; and `serve`, all of it from `publish` to generating with the new weights."""


DISK_SECONDS = 1.0
"""How long a scrape waits for the disk's answer."""


class RunMetrics(Collector):
    """What the record of a run says; read by the thread of a scrape while the driver appends to it.

    Args:
        record: Of the run.
        folder: Of the run, whose disk is watched.
        overdue: The waits that last too long.
    """

    def __init__(
        self, record: Record, folder: Path, overdue: Callable[[], Sequence[Overdue]]
    ) -> None:
        self._record, self._folder, self._overdue = record, folder, overdue
        self._one_scrape = threading.Lock()
        self._free: int | None = None
        self._asking: threading.Thread | None = None
        self._seen = 0
        self._seconds: Counter[tuple[str, str]] = Counter()
        self._updates: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def collect(self) -> Iterator[Metric]:
        """One scrape; several at once take turns, so that an update is counted once."""
        with self._one_scrape:
            return iter([*self._collect()])

    def _collect(self) -> Iterator[Metric]:
        record = self._record
        yield InfoMetricFamily(
            "headway_run",
            "The run.",
            value={"name": record.name, "max_staleness": str(record.max_staleness)},
        )
        yield GaugeMetricFamily(
            "headway_max_staleness", "Largest lag allowed, in versions.", record.max_staleness
        )
        yield from self._weight_updates()
        restarts = CounterMetricFamily(
            "headway_restarts", "Processes that were made again.", labels=["restarted"]
        )
        for process, count in list(record.restarts.items()):
            restarts.add_metric([process], count)
        yield restarts
        scores = GaugeMetricFamily(
            "headway_heldout_score", "The newest held-out score.", labels=["kind"]
        )
        for kind, rows in (("greedy", record.heldout), ("sampled", record.heldout_sampled)):
            if rows and rows[-1]["score"] is not None:
                scores.add_metric([kind], rows[-1]["score"])
            if rows and rows[-1].get("pass_at_k") is not None:
                scores.add_metric([f"pass@{rows[-1]['samples']}"], rows[-1]["pass_at_k"])
        yield scores
        yield from self._waits()
        yield from self._disk()

    def _disk(self) -> Iterator[Metric]:
        """Nothing while the disk does not answer: a scrape does not wait for one that hangs."""
        if self._asking is None or not self._asking.is_alive():
            self._asking = threading.Thread(target=self._ask_disk, name="room", daemon=True)
            self._asking.start()
        self._asking.join(DISK_SECONDS)
        if not self._asking.is_alive() and self._free is not None:
            yield GaugeMetricFamily(
                "headway_disk_free_bytes", "On the disk of the run's folder.", self._free
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
            "How long one waits on another without anything changing.",
            labels=["who", "on"],
        )
        for each in late:
            seconds.add_metric([each.wait.who, each.wait.on], each.seconds)
        yield seconds

    def _weight_updates(self) -> Iterator[Metric]:
        for row in self._record.swaps[self._seen :]:
            self._seen += 1
            self._add(row)
        seconds = CounterMetricFamily(
            "headway_weight_update_seconds",
            "Of weight updates that ended well, by phase.",
            labels=["engine", "phase"],
        )
        for (engine, phase), value in self._seconds.items():
            seconds.add_metric([engine, phase], value)
        yield seconds
        updates = CounterMetricFamily(
            "headway_weight_updates", "That ended well.", labels=["engine"]
        )
        failures = CounterMetricFamily(
            "headway_weight_update_failures", "Updates that failed.", labels=["engine"]
        )
        sent = CounterMetricFamily(
            "headway_weight_update_bytes", "Of weights that were loaded.", labels=["engine"]
        )
        for engine in sorted(self._updates.keys() | self._failures.keys()):
            updates.add_metric([engine], self._updates[engine])
            failures.add_metric([engine], self._failures[engine])
            sent.add_metric([engine], self._bytes[engine])
        yield updates
        yield failures
        yield sent

    def _add(self, row: Row) -> None:
        engine = row["engine_id"]
        if row["error"]:
            self._failures[engine] += 1
            return
        self._updates[engine] += 1
        self._bytes[engine] += row["bytes"]
        seconds = {
            "stage": row["staged_at"] - row["published_at"],
            "prepare": row.get("prepare_seconds", 0.0),
            "permit": row["swap_started_at"] - row["staged_at"] - row.get("prepare_seconds", 0.0),
            "pause": row["pause_seconds"] + row["load_seconds"] + row["resume_seconds"],
            "serve": row["swap_finished_at"] - row["published_at"],
        }
        self._seconds.update({(engine, phase): seconds[phase] for phase in PHASES})
