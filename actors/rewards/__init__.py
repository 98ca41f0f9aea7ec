"""Rewards by name or dotted path, added up into the score of a rollout."""

from actors.rewards.pool import RewardPool
from actors.rewards.rewards import Rewards, Score, check_scorable, load_rewards
from actors.rewards.shaping import shaping_parts

__all__ = [
    "RewardPool",
    "Rewards",
    "Score",
    "check_scorable",
    "load_rewards",
    "shaping_parts",
]
