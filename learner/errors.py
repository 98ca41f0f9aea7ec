"""Errors of the learner.

LearnerError                 exit code 1
├── InputError               exit code 2: a setting, model or demonstration the user gave is wrong
├── TrainingDiverged         the loss or the gradient is not finite; nothing is published
└── RankFailed               a process of the learner group died or raised; names it
"""

from typing import ClassVar


class LearnerError(Exception):
    """Root of every error that leaves this package."""

    exit_code: ClassVar[int] = 1


class InputError(LearnerError, ValueError):
    """A setting, model folder or demonstration that cannot be used; says what is allowed."""

    exit_code: ClassVar[int] = 2


class TrainingDiverged(LearnerError):
    """A loss or gradient norm is NaN or infinite; the weights must not be published."""


class RankFailed(LearnerError):
    """A rank died or raised; `exit_code` is that of the error it raised."""

    died: bool = False
    """True if the process is gone, whatever ended it."""
    silent_seconds: float = 0.0
    """Seconds for which the process had not answered."""
    is_root_cause: bool = True
    """False for a lost connection, which the death of another rank may have caused."""
