"""Errors of the command line and of the driver of a run."""

from headway.errors import HeadwayError


class RunFailed(HeadwayError):
    """A run that failed; names the process that died or raised, and the cause."""


class RayletDied(RunFailed):
    """The raylet of the run's own cluster died, and with it every process but the session's."""


class Interrupted(HeadwayError):
    """An interrupt of the user; names the newest checkpoint."""

    exit_code = 130
