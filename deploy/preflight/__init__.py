"""Checks made before a run writes anything."""
