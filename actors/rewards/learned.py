"""The reward `reward_model`: the score that the reward models of the run give the whole text."""

from dataclasses import dataclass
from typing import Protocol

from actors.errors import RewardFailed
from actors.rewards.registry import Metadata


class TextScorer(Protocol):
    """Scores completions, in this process or another."""

    async def score(self, prompt: str, completion: str) -> float:
        """Return a finite number, the same for the same text; larger is better.

        Raises:
            PromptRefused: The text has an unknown character or is too long.
            RewardFailed: The models raised.
            RewardModelLost: Their process is gone, or does not answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class LearnedReward:
    """A reward that asks reward models."""

    client: TextScorer | None
    """None where rewards are only checked and never called."""

    async def __call__(
        self, prompt: str, completion: str, answer: str | None, metadata: Metadata
    ) -> float:
        """Score a prompt with its completion; errors as in `TextScorer.score`."""
        if self.client is None:
            raise RewardFailed("no reward model was started for this actor")
        return await self.client.score(prompt, completion)
