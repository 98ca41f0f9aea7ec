"""The loop of a rollout actor, and what it reports."""
