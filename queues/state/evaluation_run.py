"""Running held-out evaluations, which are outside admission and the training accounts."""

from dataclasses import dataclass, field

from headway import clock
from queues.records import Evaluation, Summary


@dataclass(slots=True, kw_only=True)
class EvaluationRun:
    """One evaluation; made when it is queued, and again from the ledger."""

    name: str
    count: int
    temperature: float
    min_version: int
    scored: int = 0
    failed: int = 0
    rewards: float = 0.0
    """Sum over the scored prompts."""
    best: dict[str, float] = field(default_factory=dict)
    """Largest reward of each scored prompt, by id."""
    incomplete: set[str] = field(default_factory=set)
    """Ids of the prompts of which a sample failed."""
    tokens: int = 0
    lowest_version: int | None = None
    highest_version: int | None = None
    started_at: float | None = None
    """Epoch seconds of the first lease."""
    finished_at: float | None = None
    """Epoch seconds of the latest result."""

    @property
    def finished(self) -> bool:
        """True once every sample is scored or failed."""
        return self.scored + self.failed == self.count

    def start(self) -> None:
        """Record a lease."""
        if self.started_at is None:
            self.started_at = clock.now()

    def score(self, result: Summary) -> None:
        """Record the result of one sample."""
        self.scored += 1
        self.finished_at = clock.now()
        self.rewards += result.reward
        best = self.best.get(result.prompt_id, result.reward)
        self.best[result.prompt_id] = max(best, result.reward)
        self.tokens += result.tokens
        oldest = (self.lowest_version, result.oldest_version)
        newest = (self.highest_version, result.newest_version)
        self.lowest_version = min((v for v in oldest if v is not None), default=None)
        self.highest_version = max((v for v in newest if v is not None), default=None)

    def fail(self, prompt_id: str) -> None:
        """Record a sample that used up its attempts, or whose version will never come."""
        self.failed += 1
        self.incomplete.add(prompt_id)
        self.finished_at = clock.now()

    def outcome(self) -> Evaluation:
        """Return the result of a finished evaluation."""
        finished_at = self.finished_at or 0.0
        best = [most for name, most in self.best.items() if name not in self.incomplete]
        return Evaluation(
            name=self.name,
            count=self.count,
            failed=self.failed,
            score=self.rewards / self.scored if self.scored else None,
            best=sum(best) / len(best) if best else None,
            incomplete=len(self.incomplete),
            lowest_version=self.lowest_version,
            highest_version=self.highest_version,
            tokens=self.tokens,
            seconds=max(0.0, finished_at - (self.started_at or finished_at)),  # of two sessions
        )
