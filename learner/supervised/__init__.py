"""Supervised training: warm starts and reward models."""
