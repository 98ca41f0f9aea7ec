"""Benchmarks of rollout actors and rewards."""
