"""The tokens of a rollout while it is sampled; those of the environment are out of the loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.engines.protocol import Generation
from queues.records import Rollout


@dataclass(slots=True)
class Transcript:
    """The tokens of a rollout so far; all lists have one length."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    """Salt of the first request, and so of all: their cached state is this rollout's own past."""

    @classmethod
    def of(cls, saved: Rollout) -> "Transcript":
        """Return the transcript of an interrupted rollout."""
        return cls(
            token_ids=[*saved.token_ids],
            loss_mask=[*saved.loss_mask],
            behavior_logprobs=[*saved.behavior_logprobs],
            versions=[*saved.versions],
        )

    @property
    def sampled(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(self.loss_mask)

    def inject(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample."""
        count = len(token_ids)
        self.token_ids += token_ids
        self.loss_mask += [False] * count
        self.behavior_logprobs += [0.0] * count
        self.versions += [-1] * count

    def sample(self, generation: Generation) -> None:
        """Append tokens that the policy sampled."""
        self.token_ids += generation.token_ids
        self.loss_mask += [True] * len(generation.token_ids)
        self.behavior_logprobs += generation.logprobs
        self.versions += generation.versions
        self.cache_salt = generation.cache_salt

    def cut(self, length: int) -> None:
        """Drop all tokens after the first `length`."""
        for column in (self.token_ids, self.loss_mask, self.behavior_logprobs, self.versions):
            del column[length:]
