"""How fast the parts of a run are: what a simulation needs to know of engines, learner and updates.

Plain numbers, given by hand or measured (`deploy.planner.calibration`). Leaves out failures and
held-out evaluations.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from deploy.errors import InputError

SAMPLED_GROUPS = 512
"""Groups whose lengths are drawn where only their distribution is given."""


class _Seconds:
    """All fields are finite and at least 0."""

    def __post_init__(self) -> None:
        """Refuse what is no time."""
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not (0 <= value < math.inf):
                raise InputError(f"{field.name} = {value} must be a finite number, at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates(_Seconds):
    """One engine. With n rollouts running, each has one more token after `step + n · rollout`."""

    step_seconds: float
    """Of a token for all running rollouts, however few they are."""
    rollout_step_seconds: float = 0.0
    """More for each running rollout."""
    turnover_seconds: float = 0.0
    """The engine's own work for one rollout beside its tokens, half at its begin and half at its
    end; the others wait meanwhile."""
    put_seconds: float = 0.0
    """From the end of a group's last rollout to the answer that it is accepted."""

    @classmethod
    def of_throughput(cls, *, one: float, full: float, slots: int) -> Self:
        """Of an engine that was timed with one rollout, and with as many as it takes.

        Args:
            one: Tokens/s of one rollout alone.
            full: Tokens/s of all together.
            slots: How many those are.

        Raises:
            InputError: Together they are slower than one, or faster than `slots` times one.
        """
        if not (0 < one <= full <= one * slots * (1 + 1e-9)):
            raise InputError(
                f"an engine that gives {one:g} tokens/s to one rollout cannot give {full:g} to "
                f"{slots} at once: it must be at least {one:g} and at most {one * slots:g}"
            )
        if slots == 1:
            return cls(step_seconds=1 / one)
        each = max(0.0, (slots / full - 1 / one) / (slots - 1))
        return cls(step_seconds=1 / one - each, rollout_step_seconds=each)

    def token_seconds(self, running: int) -> float:
        """Until each of so many rollouts has one more token."""
        return self.step_seconds + running * self.rollout_step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRates(_Seconds):
    """The learner: a batch of n tokens takes `batch + n · token` seconds, give or take."""

    batch_seconds: float = 0.0
    token_seconds: float = 0.0
    variation: float = 0.0
    """Standard deviation over mean of what the tokens do not explain."""
    take_seconds: float = 0.0
    """From asking for a batch that is ready to the begin of its step."""
    publish_seconds: float = 0.0
    """From the end of a step to the next one's asking: publishing and acknowledging."""

    def on(self, times: float) -> Self:
        """With so many times the devices: the time of tokens shrinks, that of a batch does not."""
        return replace(self, token_seconds=self.token_seconds / times)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates(_Seconds):
    """A weight update of one engine."""

    staging_seconds: float = 0.0
    """From the publication until the engine asks to swap; it goes on generating."""
    pause_seconds: float = 0.0
    """The swap; its rollouts stand still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Everything about the parts of a run that its throughput depends on."""

    engine: EngineRates
    learner: LearnerRates
    update: UpdateRates = UpdateRates()
    lengths: Sequence[Sequence[int]]
    """Sampled tokens of each rollout of some groups; a simulation goes through them in turn."""
    tied_share: float = 0.0
    """Groups whose rollouts all earn the same; dropped where a recipe filters them."""

    def __post_init__(self) -> None:
        """Refuse a run without a token, or without a group to train."""
        if not 0 <= self.tied_share < 1:
            raise InputError(f"tied_share = {self.tied_share} must be at least 0 and below 1")
        if not self.engine.token_seconds(1):
            raise InputError("step_seconds and rollout_step_seconds of an engine are both 0")
        if not self.lengths or not all(self.lengths):
            raise InputError("no rollout's length is known, so there is nothing to simulate")
        if any(length < 1 for group in self.lengths for length in group):
            raise InputError("a rollout without a token; lengths must be at least 1")

    @property
    def tokens_mean(self) -> float:
        """Sampled tokens of a rollout."""
        flat = [length for group in self.lengths for length in group]
        return sum(flat) / len(flat)

    def at_most(self, tokens: int) -> Self:
        """With no rollout longer than this."""
        cut = tuple(tuple(min(each, tokens) for each in group) for group in self.lengths)
        return replace(self, lengths=cut)

    def shuffled(self, seed: int) -> Self:
        """With the groups in another order, so that what a policy's training changed is mixed."""
        groups = list(self.lengths)
        random.Random(seed).shuffle(groups)
        return replace(self, lengths=tuple(groups))

    def to_dict(self) -> dict[str, Any]:
        """For people to read: the lengths as their mean and variation."""
        flat = [length for group in self.lengths for length in group]
        mean = self.tokens_mean
        spread = math.sqrt(sum((each - mean) ** 2 for each in flat) / len(flat))
        parts = {part: getattr(self, part) for part in ("engine", "learner", "update")}
        return {
            **{
                part: {field.name: getattr(value, field.name) for field in fields(value)}
                for part, value in parts.items()
            },
            "tied_share": self.tied_share,
            "lengths": {"rollouts": len(flat), "mean": mean, "variation": spread / mean},
        }


def lognormal_lengths(
    mean: float, variation: float, *, group_size: int, seed: int, groups: int = SAMPLED_GROUPS
) -> tuple[tuple[int, ...], ...]:
    """Lengths of rollouts with a long tail, as those of reasoning have.

    Args:
        mean: Tokens.
        variation: Standard deviation over mean; 0 makes all equal.
        group_size: Rollouts of a group.
        seed: Of the draw.
        groups: How many to draw.

    Raises:
        InputError: There is no such distribution.
    """
    if not (1 <= mean < math.inf and 0 <= variation < math.inf):
        raise InputError(
            f"lengths of {mean:g} tokens with a variation of {variation:g}: the mean must be at "
            "least 1 and the variation at least 0"
        )
    sigma = math.sqrt(math.log1p(variation**2))
    middle = math.log(mean) - sigma**2 / 2
    chance = random.Random(seed)
    return tuple(
        tuple(max(1, round(chance.lognormvariate(middle, sigma))) for _ in range(group_size))
        for _ in range(groups)
    )
