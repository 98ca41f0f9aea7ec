"""Errors of the command line and the wiring.

DeployError                  exit code 1
├── InputError               exit code 2: a recipe, option or folder the user gave is wrong
├── RunFailed                a process of the run died or raised
└── Interrupted              exit code 130: stopped by the user, after a checkpoint
"""

from pathlib import Path
from typing import ClassVar


class DeployError(Exception):
    """Root of every error that leaves this package."""

    exit_code: ClassVar[int] = 1


class InputError(DeployError, ValueError):
    """Something the user gave cannot be used; names it, what is allowed, and where."""

    exit_code: ClassVar[int] = 2


class RunFailed(DeployError):
    """A process of the run died or raised; names the process and the cause."""

    def add_logs(self, folder: Path) -> None:
        """Says where the output of the processes is, unless the user's input is to blame."""
        if self.exit_code == 1:
            self.args = (f"{self}\nthe output of every process is in {folder}",)


class Interrupted(DeployError):
    """The user stopped the run; the newest checkpoint is named."""

    exit_code: ClassVar[int] = 130


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
