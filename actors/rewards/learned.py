"""The reward `reward_model`: what the reward models of the run say of the whole text."""

from collections.abc import Mapping
from typing import Any, Protocol

from actors.errors import RewardFailed


class Judge(Protocol):
    """What scores a completion, in this process or another."""

    async def score(self, prompt: str, completion: str) -> float:
        """A finite number, the same for the same text; larger is better.

        Raises:
            PromptRefused: The text cannot be read: an unknown character, or too long.
            RewardFailed: The models raised.
            RewardModelLost: They are gone, or do not answer.
        """
        ...


class LearnedReward:
    """A reward that asks a judge; the prompt's answer is not looked at.

    Args:
        judge: None where rewards are only checked and never called.
    """

    def __init__(self, judge: Judge | None) -> None:
        self._judge = judge

    async def __call__(
        self, prompt: str, completion: str, answer: str | None, metadata: Mapping[str, Any]
    ) -> float:
        """The judge's score of the prompt with its completion.

        Raises:
            PromptRefused: The judge cannot read the text.
            RewardFailed: There is no judge, or it raised.
            RewardModelLost: It is gone, or does not answer.
        """
        if self._judge is None:
            raise RewardFailed("no reward model was started for this actor")
        return await self._judge.score(prompt, completion)
