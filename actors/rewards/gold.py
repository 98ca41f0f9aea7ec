"""The gold reward: scores a share of the prompts, trains nothing, and shows whether rewards lie."""

import logging
from dataclasses import dataclass

import xxhash

from actors.errors import Excused, RewardFailed
from actors.rewards.rewards import Rewards
from queues.policy.prompt_retirement import split
from queues.records import GOLD, FinishReason, Prompt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GoldReward:
    """Rewards that score the prompts whose hash is among the lowest `share` of all hashes."""

    rewards: Rewards
    share: float

    def covers(self, prompt_id: str) -> bool:
        """Return True for a prompt with a gold reward: in every epoch, run and process alike."""
        name, _ = split(prompt_id, strict=False)
        return xxhash.xxh3_64_intdigest(name.encode()) < self.share * 2**64

    async def parts(
        self, prompt: Prompt, completion: str, finish_reason: FinishReason
    ) -> dict[str, float]:
        """Return the score as a part of the reward that the total leaves out.

        Empty for a prompt without a gold reward; and where it failed, which fails no rollout.
        """
        if not self.covers(prompt.prompt_id):
            return {}
        try:
            return {GOLD: (await self.rewards.score(prompt, completion, finish_reason)).total}
        except (RewardFailed, Excused) as error:
            log.warning("no gold reward: %s", error)
            return {}
