"""Recipes: one validated model per section, composed from TOML files, presets and `--set`."""
