"""Placeholder until the package exports its names."""
