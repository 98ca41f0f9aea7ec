"""Supervised training: warm starts and reward models."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress after one optimizer step."""

    step: int
    steps: int
    loss: float
    """Mean over the learned tokens, in nats, or over the pairs of the step."""
    tokens: int
    """Tokens trained so far, prompts included."""
    seconds: float
    accuracy: float | None = None
    """Share of pairs whose better text had the higher score before the step."""
