"""Sends the figures of a run to TensorBoard or Weights & Biases; both are optional extras.

One small seam: `Tracker.log` gets numbers by name at a version. A tracker that fails is left out
from then on and said once: it is never a reason for a run to end. Leaves out what the figures mean
(`deploy.report.summary`); everything is in the run's folder as well.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from deploy.errors import InputError

SKIPPED = ("version",)
"""Of a batch's row: what is the axis. Moments, `…_at`, are left out too."""

AXIS = "policy_version"
"""Name of the version among W&B's figures."""
ID_FILE = "wandb-id.txt"
"""In the run's folder."""


class Tracker(Protocol):
    """Where figures go."""

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """Takes the figures of one version."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the run's folder."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        del name, config
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        for key, value in figures.items():
            self._writer.add_scalar(key, value, version)
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()


class WeightsAndBiases:
    """A run of W&B, below `wandb/` of the run's folder; offline unless WANDB_MODE says so.

    W&B ignores what is logged at an earlier step than before, and held-out scores come late: the
    version is a figure that serves as the axis. A resumed run goes on under its id.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project="headway",
            name=name,
            id=_kept_id(folder / ID_FILE),
            resume="allow",
            dir=str(folder),
            config=dict(config),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        """See `Tracker.log`."""
        self._run.log({**figures, AXIS: version})

    def close(self) -> None:
        """See `Tracker.close`."""
        self._run.finish()


def _kept_id(file: Path) -> str:
    """The id that was kept in a file, else a new one, kept from now on."""
    if not file.exists():
        file.write_text(uuid4().hex)
    return file.read_text()


KINDS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def check(kinds: Sequence[str]) -> None:
    """Whether what trackers need is installed.

    Raises:
        InputError: It is not; says how to install it.
    """
    for kind in kinds:
        if find_spec(kind) is None:
            raise InputError(
                f'deploy.trackers names "{kind}", which is not installed; pip install '
                f'"headway-rl[{kind}]"'
            )


class Trackers:
    """The trackers of a run.

    Args:
        kinds: Names of KINDS.
        folder: Of the run.
        name: Of the run.
        config: The resolved recipe, as JSON values.
        say: Tells the user.
        made: Makes a tracker by its kind.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        folder: Path,
        name: str,
        config: Mapping[str, Any],
        say: Callable[[str], None],
        made: Mapping[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = KINDS,
    ) -> None:
        self._say = say
        self._trackers: dict[str, Tracker] = {}
        for kind in kinds:
            try:
                self._trackers[kind] = made[kind](folder, name, config)
            except Exception as error:  # noqa: BLE001  (of another project's code)
                self._leave_out(kind, error)

    def batch(self, row: Mapping[str, Any]) -> None:
        """Figures of a trained batch, at the version that it made."""
        self._log(row["version"] + 1, {f"batch/{key}": n for key, n in numbers(row).items()})

    def scores(self, version: int, scores: Mapping[str, float | None]) -> None:
        """Held-out scores of a version, by kind."""
        found = {f"heldout/{kind}": score for kind, score in scores.items() if score is not None}
        self._log(version, found)

    def close(self) -> None:
        """Writes what is left."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _log(self, version: int, figures: Mapping[str, float]) -> None:
        if figures:
            self._each(lambda tracker: tracker.log(version, figures))

    def _each(self, what: Callable[[Tracker], None]) -> None:
        for kind, tracker in list(self._trackers.items()):
            try:
                what(tracker)
            except Exception as error:  # noqa: BLE001  (of another project's code)
                self._leave_out(kind, error)

    def _leave_out(self, kind: str, error: Exception) -> None:
        self._trackers.pop(kind, None)
        self._say(f"tracker {kind} failed and is left out from now on: {error!r}")


def numbers(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row, those of tables by `table/key`.

    Example:
        >>> numbers({"version": 3, "loss": 0.5, "fractions": {"capped": 0.1}, "max_lag": None})
        {'loss': 0.5, 'fractions/capped': 0.1}
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        if key in SKIPPED or key.endswith("_at"):
            continue
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = float(value)
    return found
