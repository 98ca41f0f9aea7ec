"""Trackers: the figures of a run, and some rollouts, for TensorBoard, Weights & Biases or MLflow.

Each is an optional extra, called in a thread of its own: a server that does not answer holds up
no step. A tracker that fails is reported and left out from then on; it never ends a run.
"""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib.util import find_spec
from pathlib import Path
from queue import Full, Queue
from textwrap import indent
from threading import Thread
from typing import Any
from uuid import uuid4

from deploy.config.changes import differing
from deploy.config.run_config import RunConfig
from deploy.observability.samples import Sample, heading, text_of
from headway import clock
from headway.atomic_file import atomic_file
from headway.errors import InputError

AXIS = "policy_version"
"""Name of the version among W&B's figures."""
NOT_MLFLOW = re.compile(r"[^\w\-./ :]")
"""Characters that MLflow does not take in the name of a figure, such as that in `pass@4`."""
PARAMETERS = 100
"""Most parameters that MLflow takes at once."""
PARAMETER_CHARACTERS = 500
"""Longest value of a parameter that every store of MLflow takes."""
MOST_WAITING = 1000
"""Calls that may wait for a tracker; one with more is left out."""


@dataclass(frozen=True, slots=True)
class Tracker:
    """A destination of figures."""

    log: Callable[[int, Mapping[str, float]], None]
    """Logs the figures of one version by name."""
    text: Callable[[int, str], None]
    """Logs plain text of one version: rollouts, whose control characters are escaped."""
    close: Callable[[], None]
    """Writes everything that is still buffered."""


def tensorboard(_: RunConfig, folder: Path) -> Tracker:
    """Write event files in `tensorboard/` of the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(version: int, figures: Mapping[str, float]) -> None:
        for key, value in figures.items():
            writer.add_scalar(key, value, version)
        writer.flush()

    def text(version: int, content: str) -> None:
        # TensorBoard shows Markdown, in which indented lines are shown as they are.
        writer.add_text("samples", indent(content, "    ", lambda line: True), version)

    return Tracker(log, text, writer.close)


def _run_id(file: Path, make: Callable[[], str]) -> str:
    """Return the id of a run, which its first session has made and stored in a file."""
    if not file.exists():
        with atomic_file(file, durable=True) as opened:
            opened.write(make().encode())
    return file.read_text()


def weights_and_biases(config: RunConfig, folder: Path) -> Tracker:
    """Write a run of W&B below `wandb/` in the run's folder; offline unless WANDB_MODE is set.

    W&B ignores what is logged at an earlier step than before, and held-out scores come late:
    therefore the version is logged as a figure that serves as the axis.
    """
    import wandb

    run: Any = wandb.init(
        project="headway",
        name=config.name,
        id=_run_id(folder / "wandb-id.txt", lambda: uuid4().hex),
        resume="allow",
        dir=str(folder),
        config=config.model_dump(mode="json"),
        mode=os.environ.get("WANDB_MODE", "offline"),
    )
    run.define_metric(AXIS)
    run.define_metric("*", step_metric=AXIS)

    def text(version: int, content: str) -> None:
        run.log({"samples": wandb.Html(f"<pre>{escape(content)}</pre>"), AXIS: version})

    return Tracker(lambda version, figures: run.log({**figures, AXIS: version}), text, run.finish)


def mlflow(config: RunConfig, folder: Path) -> Tracker:
    """Write a run of MLflow at MLFLOW_TRACKING_URI, or below `mlflow/` in the run's folder.

    Its parameters, which MLflow lets nobody change, are the settings that it was started with.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    address = os.environ.get("MLFLOW_TRACKING_URI")
    if address is None:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow 3 wants a database otherwise
        address = (folder / "mlflow").as_uri()
    client: Any = MlflowClient(address)

    def make() -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "headway")
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        run = str(client.create_run(experiment, run_name=config.name).info.run_id)
        recipe = differing([config.model_dump(mode="json"), {}])
        params = [Param(key, value[:PARAMETER_CHARACTERS]) for key, (value, _) in recipe.items()]
        for begin in range(0, len(params), PARAMETERS):
            client.log_batch(run, params=params[begin : begin + PARAMETERS])
        return run

    run = _run_id(folder / "mlflow-id.txt", make)
    client.update_run(run, status="RUNNING")

    def log(version: int, figures: Mapping[str, float]) -> None:
        now = int(1000 * clock.now())
        metrics = [Metric(NOT_MLFLOW.sub("_", key), n, now, version) for key, n in figures.items()]
        client.log_batch(run, metrics=metrics)

    return Tracker(
        log,
        lambda version, content: client.log_text(run, content, f"samples/v{version:06d}.txt"),
        lambda: client.set_terminated(run),
    )


Factory = Callable[[RunConfig, Path], Tracker]
"""Makes a tracker of the recipe and the run's folder."""
KINDS: dict[str, Factory] = {
    "tensorboard": tensorboard,
    "wandb": weights_and_biases,
    "mlflow": mlflow,
}


def check(kinds: Sequence[str]) -> None:
    """Raise InputError if the package of a tracker is not installed."""
    for kind in kinds:
        if find_spec(kind) is None:
            raise InputError(
                f'deploy.trackers names "{kind}", which is not installed; pip install '
                f'"headway-rl[{kind}]"'
            )


class _TrackerThread:
    """Makes one tracker and calls it, in order, in a thread of its own."""

    def __init__(self, make: Callable[[], Tracker], name: str, most_waiting: int) -> None:
        self.problem: str | None = None
        """Why the tracker takes no more calls."""
        self._calls: Queue[Callable[[Tracker], None] | None] = Queue(most_waiting)
        self._thread = Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def call(self, call: Callable[[Tracker], None] | None) -> None:
        """Have a call made; None closes the tracker."""
        try:
            self._calls.put_nowait(call)
        except Full:
            self.problem = self.problem or f"{self._calls.maxsize} calls wait for it"

    def join(self, seconds: float) -> None:
        """Wait until the tracker has taken all calls and is closed."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.problem = self.problem or "it does not end"

    def _run(self, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
            while (call := self._calls.get()) is not None:
                call(tracker)
            tracker.close()
        except BaseException as error:  # noqa: BLE001  (another project's code, which may exit)
            self.problem = repr(error)


class Trackers:
    """The trackers that a recipe names in `factories`; `say` shows a message to the user."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        say: Callable[[str], None],
        factories: Mapping[str, Factory] = KINDS,
        *,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._say = say
        self._threads = {
            kind: _TrackerThread(
                partial(factories[kind], config, folder), f"tracker {kind}", most_waiting
            )
            for kind in config.deploy.trackers
        }

    def batch(self, row: Mapping[str, Any]) -> None:
        """Log the figures of a trained batch at the version that it produced."""
        self._log(row["version"] + 1, {f"batch/{key}": n for key, n in numbers(row).items()})

    def samples(self, samples: Sequence[Sample]) -> None:
        """Log some rollouts of one batch as text, at the version that the batch produced."""
        if samples:
            version = samples[-1].version
            content = "\n\n".join(
                f"{heading(sample)}\n{text_of(sample)}"
                for sample in samples
                if sample.version == version
            )
            self._call_all(lambda tracker: tracker.text(version + 1, content))

    def scores(self, version: int, scores: Mapping[str, float | None]) -> None:
        """Log the held-out scores of a version, by kind."""
        known = {f"heldout/{kind}": score for kind, score in scores.items() if score is not None}
        self._log(version, known)

    def close(self, seconds: float) -> None:
        """Let every tracker take what waits for it, and close it; blocks for so long at most."""
        deadline = time.monotonic() + seconds
        self._call_all(None)
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._leave_out()
        self._threads.clear()

    def _log(self, version: int, figures: Mapping[str, float]) -> None:
        if figures:
            self._call_all(lambda tracker: tracker.log(version, figures))

    def _call_all(self, call: Callable[[Tracker], None] | None) -> None:
        for thread in self._threads.values():
            thread.call(call)
        self._leave_out()

    def _leave_out(self) -> None:
        """Report and forget the trackers that have failed."""
        for kind, thread in list(self._threads.items()):
            if thread.problem is not None:
                del self._threads[kind]
                self._say(f"tracker {kind} failed and is left out from now on: {thread.problem}")


def numbers(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record, without version and moments; nested ones by `outer/inner`."""
    figures: dict[str, float] = {}
    for key, value in row.items():
        if key == "version" or key.endswith("_at"):
            continue
        if isinstance(value, Mapping):
            figures |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            figures[f"{prefix}{key}"] = float(value)
    return figures
