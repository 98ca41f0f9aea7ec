"""Errors of the command line and the wiring.

DeployError                  exit code 1
├── InputError               exit code 2: a recipe, option or folder the user gave is wrong
├── RunFailed                a process of the run died or raised
│   └── RayletDied           Ray on this machine ended; another session of the run can go on
└── Interrupted              exit code 130: stopped by the user, after a checkpoint
"""

from pathlib import Path
from typing import ClassVar


class DeployError(Exception):
    """Root of every error that this package raises on purpose."""

    exit_code: ClassVar[int] = 1


class InputError(DeployError, ValueError):
    """Input of the user that cannot be used; names it, what is allowed, and where."""

    exit_code: ClassVar[int] = 2


class RunFailed(DeployError):
    """A run that failed; names the process that died or raised, and the cause."""

    def add_logs(self, folder: Path, *, collected: bool) -> None:
        """Add to the message where the processes' output is, unless the input was bad.

        It is `collected` into the folder unless the run joined a cluster.
        """
        where = f"the output of every process is in {folder}"
        if not collected:
            where = (
                f"the log of the driver is in {folder}, other output with Ray: `ray logs cluster`"
            )
        if self.exit_code == 1:
            self.args = (f"{self}\n{where}",)


class RayletDied(RunFailed):
    """The raylet of the run's own cluster died, and with it every process but the session's."""


class Interrupted(DeployError):
    """An interrupt of the user; names the newest checkpoint."""

    exit_code: ClassVar[int] = 130


def exit_code_of(error: BaseException) -> int | None:
    """Return the exit code of one of Headway's own errors, of any package; None for another."""
    code: int | None = getattr(error, "exit_code", None)
    return code


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
