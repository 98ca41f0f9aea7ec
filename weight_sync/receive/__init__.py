"""The engine's side of staged weight updates."""
