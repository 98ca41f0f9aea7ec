"""Imports and calls functions that users name in a recipe."""
