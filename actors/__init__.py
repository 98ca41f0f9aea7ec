"""Rollouts: prompt sources, engines, environments, rewards, and the worker that joins them."""
