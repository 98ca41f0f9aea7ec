"""Trackers: the figures of a run for TensorBoard or Weights & Biases, both optional extras.

A tracker that fails is reported and left out from then on; it never ends a run.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from deploy.config.run_config import RunConfig
from deploy.errors import InputError

AXIS = "policy_version"
"""Name of the version among W&B's figures."""


@dataclass(frozen=True, slots=True)
class Tracker:
    """A destination of figures."""

    log: Callable[[int, Mapping[str, float]], None]
    """Logs the figures of one version by name."""
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

    return Tracker(log, writer.close)


def weights_and_biases(config: RunConfig, folder: Path) -> Tracker:
    """Write a run of W&B below `wandb/` in the run's folder; offline unless WANDB_MODE is set.

    W&B ignores what is logged at an earlier step than before, and held-out scores come late:
    therefore the version is logged as a figure that serves as the axis. A resumed run keeps its id.
    """
    import wandb

    id_file = folder / "wandb-id.txt"
    if not id_file.exists():
        id_file.write_text(uuid4().hex)
    run: Any = wandb.init(
        project="headway",
        name=config.name,
        id=id_file.read_text(),
        resume="allow",
        dir=str(folder),
        config=config.model_dump(mode="json"),
        mode=os.environ.get("WANDB_MODE", "offline"),
    )
    run.define_metric(AXIS)
    run.define_metric("*", step_metric=AXIS)
    return Tracker(lambda version, figures: run.log({**figures, AXIS: version}), run.finish)


Factory = Callable[[RunConfig, Path], Tracker]
"""Makes a tracker of the recipe and the run's folder."""
KINDS: dict[str, Factory] = {"tensorboard": tensorboard, "wandb": weights_and_biases}


def check(kinds: Sequence[str]) -> None:
    """Raise InputError if the package of a tracker is not installed."""
    for kind in kinds:
        if find_spec(kind) is None:
            raise InputError(
                f'deploy.trackers names "{kind}", which is not installed; pip install '
                f'"headway-rl[{kind}]"'
            )


class Trackers:
    """The trackers that a recipe names in `factories`; `say` shows a message to the user."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        say: Callable[[str], None],
        factories: Mapping[str, Factory] = KINDS,
    ) -> None:
        self._say = say
        self._trackers: dict[str, Tracker] = {}
        for kind in config.deploy.trackers:
            try:
                self._trackers[kind] = factories[kind](config, folder)
            except Exception as error:  # noqa: BLE001  (another project's code)
                self._leave_out(kind, error)

    def batch(self, row: Mapping[str, Any]) -> None:
        """Log the figures of a trained batch at the version that it produced."""
        self._log(row["version"] + 1, {f"batch/{key}": n for key, n in numbers(row).items()})

    def scores(self, version: int, scores: Mapping[str, float | None]) -> None:
        """Log the held-out scores of a version, by kind."""
        known = {f"heldout/{kind}": score for kind, score in scores.items() if score is not None}
        self._log(version, known)

    def close(self) -> None:
        """Close every tracker."""
        self._call_all(lambda tracker: tracker.close())
        self._trackers.clear()

    def _log(self, version: int, figures: Mapping[str, float]) -> None:
        if figures:
            self._call_all(lambda tracker: tracker.log(version, figures))

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for kind, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  (another project's code)
                self._leave_out(kind, error)

    def _leave_out(self, kind: str, error: Exception) -> None:
        self._trackers.pop(kind, None)
        self._say(f"tracker {kind} failed and is left out from now on: {error!r}")


def numbers(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record, without version and moments; nested ones by `outer/inner`.

    Example:
        >>> numbers({"version": 3, "loss": 0.5, "fractions": {"capped": 0.1}, "max_lag": None})
        {'loss': 0.5, 'fractions/capped': 0.1}
    """
    figures: dict[str, float] = {}
    for key, value in row.items():
        if key == "version" or key.endswith("_at"):
            continue
        if isinstance(value, Mapping):
            figures |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            figures[f"{prefix}{key}"] = float(value)
    return figures
