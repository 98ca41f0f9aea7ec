"""What scores rollouts: rewards by name or dotted path, added up."""

from actors.rewards.rewards import Rewards, Score, check_scorable, load_rewards

__all__ = ["Rewards", "Score", "check_scorable", "load_rewards"]
