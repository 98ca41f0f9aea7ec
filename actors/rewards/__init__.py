"""Rewards by name or dotted path, added up into the score of a rollout."""
