"""The reward `reward_model`: the score that the reward models of the run give the whole text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.environments.protocol import Message
from actors.environments.single_turn import CONVERSATION, opening
from actors.errors import RewardFailed
from actors.rewards.find_reward import Metadata
from queues.records import Prompt


class TextScorer(Protocol):
    """Scores completions, in this process or another."""

    async def score(
        self, prompt: str | Sequence[Message], completion: str
    ) -> float | Mapping[str, float]:
        """Return a finite number, the same for the same text; larger is better; or one by kind.

        Process reward models give `StepParts`.

        The prompt is messages, or a text of the user's. Raises PromptRefused if the text has an
        unknown character or is too long, RewardFailed if the models raised, and RewardModelLost if
        their process is gone, or does not answer.
        """


@dataclass(frozen=True, slots=True)
class LearnedReward:
    """A reward that asks reward models."""

    client: TextScorer | None
    """None where rewards are only checked and never called."""

    async def __call__(
        self, prompt: str, completion: str, answer: str | None, metadata: Metadata
    ) -> float | Mapping[str, float]:
        """Score a prompt with its completion; errors as in `TextScorer.score`."""
        if self.client is None:
            raise RewardFailed("no reward model was started for this actor")
        if CONVERSATION not in metadata:
            return await self.client.score(prompt, completion)
        messages = opening(Prompt(prompt_id="", text=prompt, metadata=metadata))
        return await self.client.score(messages, completion)
