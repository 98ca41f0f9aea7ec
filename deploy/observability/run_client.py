"""Follows a run from outside: finds its metrics, asks its processes, reads its events.

Works on a run's folder, and on the address that `headway run` prints, from any machine that
reaches it. Nothing is asked of the run but what Prometheus asks. What the figures mean is
`deploy.observability.top_model`.
"""

import json
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path

from rich.console import Console
from rich.live import Live

from deploy.errors import InputError
from deploy.observability.exporter import FILE
from deploy.observability.prometheus_text import Moment, Samples, parse
from deploy.observability.top_model import Event, View, view
from deploy.observability.top_view import EVENTS, screen
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Row

ANSWER_SECONDS = 3.0
"""Deadline of one process."""
ASKED_AT_ONCE = 16
RATE_SECONDS = 10.0
"""Rates are over so long."""
TAIL_BYTES = 65_536
"""Of a file of rows, where its newest events are looked for."""
MISSED_LOOKS = 3
"""In a row, after which a live view ends."""
MAX_BYTES = 4_000_000
"""Of one answer; a run's are some thousand."""
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Asks without a proxy, as Prometheus does."""


class RunClient:
    """Looks at a run again and again.

    Args:
        run: A run's folder, its name in `runs_dir`, or host:port of its metrics.
        runs_dir: Folder of run folders.

    Raises:
        InputError: There is no such run, or it is not going on with metrics.
    """

    def __init__(self, run: str, runs_dir: Path) -> None:
        self._directory: RunDirectory | None = None
        host, colon, port = run.removeprefix("http://").partition("/")[0].rpartition(":")
        if colon and port.isdigit():
            self._address = f"{host}:{port}"
        else:
            self._directory = RunDirectory.open(run, runs_dir)
            self._address = _address_of(self._directory)
        self._moments: deque[Moment] = deque()
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE)

    def look(self) -> View:
        """Asks every process now.

        Raises:
            InputError: The run's own address does not answer: it has ended, or cannot be reached.
        """
        moments, now = self._moments, self._moment()
        moments.append(now)
        while len(moments) > 2 and now.at - moments[1].at >= RATE_SECONDS:
            moments.popleft()
        before = moments[0] if len(moments) > 1 else None
        return view(now, before, events(self._directory) if self._directory else ())

    def _moment(self) -> Moment:
        try:
            targets = json.loads(_get(f"{self._address}/targets"))
            named = [(t["labels"]["process"], t["labels"]["run"], t["targets"][0]) for t in targets]
        except OSError as error:
            raise InputError(
                f"nothing answers at http://{self._address}/targets, the metrics of the run "
                f"({error}): it has ended, or this machine does not reach it; a run on another "
                'machine shows its metrics with deploy.metrics_host = "0.0.0.0"'
            ) from None
        except HTTPException as error:
            raise InputError(
                f"what answers at http://{self._address}/targets does not speak HTTP: {error!r}"
            ) from None
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"http://{self._address}/targets is not the address of a run: {error!r}"
            ) from None
        if not named:
            raise InputError(f"the run at http://{self._address}/targets has ended")
        said = self._pool.map(_samples, [address for _, _, address in named])
        return Moment(
            time.time(),
            named[0][1],
            dict(zip((name for name, _, _ in named), said, strict=True)),
        )


def show(run: str, runs_dir: Path, *, interval: float, once: bool, console: Console) -> None:
    """`headway top`: frames until the run has ended or the user has seen enough.

    A look that fails leaves the last frame standing; MISSED_LOOKS in a row are the end of the run.

    Args:
        run: See `RunClient`.
        runs_dir: See `RunClient`.
        interval: Seconds between two looks.
        once: Print a single frame, with rates over one interval, and end.
        console: Where to.

    Raises:
        InputError: As `RunClient` and `RunClient.look`.
    """
    watch = RunClient(run, runs_dir)
    frame = watch.look()
    if once:
        time.sleep(interval)
        console.print(screen(watch.look()))
        return
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            missed = 0
            while True:
                live.update(screen(frame), refresh=True)
                time.sleep(interval)
                try:
                    frame, missed = watch.look(), 0
                except InputError:
                    missed += 1
                    if missed == MISSED_LOOKS:
                        raise
    except KeyboardInterrupt:
        return
    except InputError as error:
        console.print(screen(frame))
        console.print(str(error), markup=False)


def events(directory: RunDirectory) -> list[Event]:
    """The newest things that happened in a run, as far as its folder tells, oldest first."""
    return sorted(_events(directory), key=lambda event: event.at)[-EVENTS:]


def _events(directory: RunDirectory) -> Iterator[Event]:
    for row in _newest(directory.path / "restarts.jsonl"):
        yield Event(row["at"], f"{row['actor']} was made again: {row['reason']}")
    for row in _newest(directory.path / "waits.jsonl"):
        yield Event(row["at"], row["text"])
    for row in _newest(directory.path / "swaps.jsonl"):
        if row["error"] is not None:
            text = f"{row['engine_id']} did not take version {row['version']}: {row['error']}"
            yield Event(row["published_at"], text)
    for folder in directory.checkpoints.glob("v*"):
        yield Event(folder.stat().st_mtime, f"checkpoint of version {int(folder.name[1:])}")


def _newest(file: Path) -> list[Row]:
    """The whole lines among the last TAIL_BYTES of a file of rows."""
    if not file.exists():
        return []
    with file.open("rb") as opened:
        start = max(0, file.stat().st_size - TAIL_BYTES)
        opened.seek(start)
        lines = opened.read().splitlines(keepends=True)
    return [json.loads(line) for line in lines[bool(start) :] if line.endswith(b"\n")]


def _address_of(directory: RunDirectory) -> str:
    file = directory.path / FILE
    try:
        [driver] = [
            target["targets"][0]
            for target in json.loads(file.read_text())
            if target["labels"]["process"] == "driver"
        ]
    except FileNotFoundError:
        raise InputError(
            f"{directory.path} shows no metrics now: its status is {directory.status()}; a run "
            "that goes on has them unless deploy.metrics = false, and one that has ended is in "
            f"`headway report {directory.path.name}`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is damaged: {error!r}") from None
    return str(driver)


def _get(address: str) -> str:
    with DIRECT.open(f"http://{address}", timeout=ANSWER_SECONDS) as answer:
        return str(answer.read(MAX_BYTES).decode())


def _samples(address: str) -> Samples | None:
    try:
        return parse(_get(f"{address}/metrics"), source=address)
    except (OSError, HTTPException, UnicodeDecodeError, InputError):
        return None
