"""Sections `[model]`, `[learner]`, `[sft]` and `[reward_model]` of a recipe."""
