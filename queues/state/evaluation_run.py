"""Running held-out evaluations, which are outside admission and the training accounts."""

from dataclasses import dataclass


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

    @property
    def finished(self) -> bool:
        """True once every sample is scored or failed."""
        return self.ended == self.count
