"""Errors of the command line and of the driver of a run."""

from headway.errors import HeadwayError


class RunFailed(HeadwayError):
    """A run that failed; names the process that died or raised, and the cause."""


class RayDied(RunFailed):
    """The run's own cluster did not start, or lost a process that all others need; names it."""


class Interrupted(HeadwayError):
    """An interrupt of the user; names the newest checkpoint."""

    exit_code = 130
