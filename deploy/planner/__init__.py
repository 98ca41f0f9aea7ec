"""Predicted throughput and lag of a recipe."""
