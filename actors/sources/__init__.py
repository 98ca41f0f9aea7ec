"""Prompt sources, by name or dotted path."""
