"""`headway top`: finds the metrics of a live run, asks its processes, reads its events."""

import asyncio
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import httpx
from rich.console import Console, RenderableType
from rich.live import Live

from actors.bounded_http import Answer, BadAnswer, ask
from deploy.observability.exporter import FILE
from deploy.observability.top_model import Event, Interval, Moment, Samples, parse
from deploy.observability.top_view import EVENTS, screen
from deploy.storage import scaling
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_lock import RunMissing
from deploy.storage.run_record import RECOVERIES, RESTARTS, Row
from headway import clock
from headway.errors import InputError
from headway.metrics import TOKEN_VARIABLE
from headway.roles import Role

ANSWER_SECONDS = 3.0
"""Deadline of one process."""
ASKED_AT_ONCE = 16
MOST_BYTES = 4 << 20
"""Longest answer."""
MOST_PROCESSES = 4096
ADDRESS = re.compile(r"[\w.:\[\]-]{1,300}:\d{1,5}")
RATE_SECONDS = 10.0
"""Interval that rates are averaged over."""
TAIL_BYTES = 65_536
"""Size of the end of a JSON-lines file that is searched for its newest events."""
EDGE_SECONDS = 30.0
"""Longest wait for the folder of a run that starts, and for the end of one without metrics."""
POLL_SECONDS = 0.5
MISSED_LOOKS = 3
"""Failed looks in a row after which a live view ends."""


class RunEnded(InputError):
    """A run that has ended and shows no metrics any more."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        super().__init__(
            f"{directory.path} shows no metrics now: its status is {directory.status()}; a run "
            "that goes on has them, and one that has ended is in "
            f"`headway report {directory.path.name}`"
        )


class NotYetStarted(InputError):
    """A run whose processes show no metrics yet."""


class RunClient:
    """Client of a run, named by its folder, its name in `runs_dir`, or host:port of its metrics.

    Raises NotYetStarted while the run starts, RunEnded if it has ended, and InputError if there is
    no such run, or it goes on without metrics.
    """

    def __init__(self, run: str, runs_dir: Path) -> None:
        self.directory: RunDirectory | None = None
        """The run's folder; None if only its address is known."""
        host, colon, port = run.removeprefix("http://").partition("/")[0].rpartition(":")
        if colon and port.isdigit():
            self._address = f"{host}:{port}"
        else:
            self.directory = RunDirectory.open(run, runs_dir)
            self._address = _address_of(self.directory)
        self._moments: deque[Moment] = deque()
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def look(self) -> Interval:
        """Ask every process now; return the time since an earlier look, if there was one.

        Raises InputError if the run's own address does not answer.
        """
        moments, now = self._moments, asyncio.run(self._moment())
        moments.append(now)
        while len(moments) > 2 and now.at - moments[1].at >= RATE_SECONDS:
            moments.popleft()
        return Interval(now, moments[0] if len(moments) > 1 else None)

    def check_ended(self) -> None:
        """Raise RunEnded as soon as the run's command ends, if that is within EDGE_SECONDS."""
        deadline = time.monotonic() + EDGE_SECONDS
        while self.directory is not None and time.monotonic() < deadline:
            if self.directory.lock.rests():
                raise RunEnded(self.directory)
            time.sleep(POLL_SECONDS)

    async def _moment(self) -> Moment:
        url = f"http://{self._address}/targets"
        # Without a proxy, as Prometheus asks.
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            try:
                answer = await self._ask(client, url)
            except BadAnswer as error:
                raise InputError(
                    f"nothing answers at {url}, the metrics of the run ({error}): it has ended, or "
                    "this machine does not reach it; a run on another machine shows its metrics "
                    'with deploy.metrics_host = "0.0.0.0"'
                ) from None
            run, addresses = _targets(url, answer)
            at_once = asyncio.Semaphore(ASKED_AT_ONCE)

            async def samples(address: str) -> Samples | None:
                async with at_once:
                    try:
                        shown = await self._ask(client, f"http://{address}/metrics")
                        return parse(shown.text, source=address) if shown.status == 200 else None
                    except (BadAnswer, InputError):
                        return None

            seen = await asyncio.gather(*map(samples, addresses.values()))
        return Moment(clock.now(), run, dict(zip(addresses, seen, strict=True)))

    async def _ask(self, client: httpx.AsyncClient, url: str) -> Answer:
        return await ask(
            client, url, seconds=ANSWER_SECONDS, most_bytes=MOST_BYTES, headers=self._headers
        )


def _targets(url: str, answer: Answer) -> tuple[str, dict[str, str]]:
    """Return the name of a run, and the addresses of its processes by name."""
    if answer.status == 401:
        raise InputError(
            f"{url} wants the token of the run, in the environment variable {TOKEN_VARIABLE}"
        )
    try:
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        targets = json.loads(answer.text)[:MOST_PROCESSES]
        runs = [str(target["labels"]["run"]) for target in targets]
        addresses = {str(t["labels"]["process"]): str(t["targets"][0]) for t in targets}
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise InputError(f"{url} is not the address of a run: {error!r}") from None
    if not addresses:
        raise InputError(f"the run at {url} has ended")
    return runs[0], {name: at for name, at in addresses.items() if ADDRESS.fullmatch(at)}


def show(run: str, runs_dir: Path, *, interval: float, once: bool, console: Console) -> None:
    """Show frames (`headway top`) every `interval` seconds until the run ends or the user stops.

    With `once`, only one frame is printed, with rates over one interval. A run that starts is
    waited for. A look that fails leaves the last frame; MISSED_LOOKS failures in a row are the end
    of the run. Raises RunEnded if the run has ended, before or meanwhile, and InputError as
    `RunClient` and its `look`.
    """

    def look() -> RenderableType:
        interval = client.look()
        try:
            happened = events(client.directory) if client.directory else []
            return screen(interval, happened, width=console.width)
        except (ValueError, OverflowError, KeyError, TypeError) as error:
            raise InputError(f"{run} shows metrics that no run has: {error!r}") from None

    client = connect(run, runs_dir, console, 0.0 if once else EDGE_SECONDS)
    frame = look()
    if once:
        time.sleep(interval)
        console.print(look())
        return
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            missed = 0
            while True:
                live.update(frame, refresh=True)
                time.sleep(interval)
                try:
                    frame, missed = look(), 0
                except InputError:
                    missed += 1
                    if missed == MISSED_LOOKS:
                        raise
    except KeyboardInterrupt:
        return
    except InputError as error:
        console.print(frame)
        client.check_ended()
        console.print(str(error))


def connect(run: str, runs_dir: Path, console: Console, seconds: float) -> RunClient:
    """Return a client, once the run has started; its folder must appear within some seconds."""
    deadline, printed = time.monotonic() + seconds, False
    while True:
        try:
            return RunClient(run, runs_dir)
        except (NotYetStarted, RunMissing) as error:
            if isinstance(error, RunMissing) and time.monotonic() >= deadline:
                raise
            if not printed:
                console.print(f"{error}\nwaiting for it to start", soft_wrap=True)
            printed = True
        time.sleep(POLL_SECONDS)


def events(directory: RunDirectory) -> list[Event]:
    """Return the newest events in a run's folder, oldest first."""
    return sorted(_recorded(directory))[-EVENTS:]


def _recorded(directory: RunDirectory) -> Iterator[Event]:
    for row in _newest(directory.path / RESTARTS):
        yield row["at"], f"{row['actor']} was restarted: {row['reason']}"
    for row in _newest(directory.path / RECOVERIES):
        yield row["at"], f"{row['process']} is back after {row['seconds']:.1f} s"
    for row in _newest(directory.path / scaling.FILE):
        outcome = f"refused: {row['refused']}" if row["refused"] else "done"
        yield row["at"], f"actors asked for: {row['before']} → {row['asked']}, {outcome}"
    for row in _newest(directory.path / "waits.jsonl"):
        yield row["at"], row["text"]
    for row in _newest(directory.path / "swaps.jsonl"):
        if row["error"] is not None:
            what = f"{row['engine_id']} did not take version {row['version']}: {row['error']}"
            yield row["published_at"], what
    for folder in directory.checkpoints.glob("v*"):
        yield folder.stat().st_mtime, f"checkpoint of version {int(folder.name[1:])}"


def _newest(file: Path) -> list[Row]:
    """Read the complete records in the last TAIL_BYTES of a JSON-lines file."""
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
        targets = json.loads(file.read_text())
        [driver] = [t["targets"][0] for t in targets if t["labels"]["process"] == Role.DRIVER]
        return str(driver)
    except FileNotFoundError:
        if directory.lock.rests():
            if not directory.summary_file.exists():
                raise RunMissing(f"{directory.path} has trained nothing yet") from None
            raise RunEnded(directory) from None
        if not directory.config().deploy.metrics:
            raise InputError(f"{directory.path} goes on with deploy.metrics = false") from None
        raise NotYetStarted(f"{directory.path} shows no metrics yet") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is damaged: {error!r}") from None
