"""Reward models: folders, batching and scores."""
