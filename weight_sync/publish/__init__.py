"""The learner's side of staged weight updates."""
