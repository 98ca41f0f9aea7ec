"""The tokens of a rollout while it is sampled; those of the environment are out of the loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Transcript:
    """The tokens of a rollout so far; all lists have one length."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    behavior_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    """Salt of an attempt's first request, and so of all: their cached state is its own past."""

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

    def sample(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Append tokens that the policy sampled."""
        self.token_ids += token_ids
        self.loss_mask += [True] * len(token_ids)
        self.behavior_logprobs += logprobs
        self.versions += versions

    def cut(self, length: int) -> None:
        """Drop all tokens after the first `length`."""
        for column in (self.token_ids, self.loss_mask, self.behavior_logprobs, self.versions):
            del column[length:]
