"""Running held-out evaluations, which are outside admission and the training accounts."""

from collections import deque
from dataclasses import dataclass, field

from queues.state.groups import Group


@dataclass(slots=True, kw_only=True)
class EvaluationRun:
    """One evaluation; made when it is queued, and again from the ledger."""

    name: str
    count: int
    """Samples."""
    temperature: float
    min_version: int
    ended: int = 0
    """Samples that are scored or failed."""
    queued: deque[Group] = field(default_factory=deque)
    """Samples that wait for a lease."""

    @property
    def finished(self) -> bool:
        """True once every sample is scored or failed."""
        return self.ended == self.count
