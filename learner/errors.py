"""Errors of the learner."""

from headway.errors import HeadwayError


class TrainingDiverged(HeadwayError):
    """A loss or gradient norm is NaN or infinite; the weights must not be published."""


class RankFailed(HeadwayError):
    """A rank of the learner died or raised; the message names it.

    Args:
        message: The rank, and how it ended.
        exit_code: That of the error which the rank raised.
        died: True if the process is gone, whatever ended it.
        silent_seconds: Seconds for which the process had not answered.
        is_root_cause: False for a lost connection, which another rank's death may have caused.
    """

    def __init__(
        self,
        message: str,
        *,
        exit_code: int = 1,
        died: bool = False,
        silent_seconds: float = 0.0,
        is_root_cause: bool = True,
    ) -> None:
        super().__init__(message, exit_code=exit_code)
        self.died, self.silent_seconds = died, silent_seconds
        self.is_root_cause = is_root_cause
