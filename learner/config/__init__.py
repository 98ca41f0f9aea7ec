"""Sections `[model]`, `[learner]`, `[sft]`, `[prefer]` and `[reward_model]` of a recipe."""
