"""The loop of a rollout actor, its episodes and its statistics."""
