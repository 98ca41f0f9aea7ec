"""Rates of the parts of a run: engines, learner and weight updates; given, or measured."""

import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean, pstdev
from typing import Any, Self

import numpy as np

from headway.errors import InputError

SAMPLED_GROUPS = 512
"""Number of groups whose lengths are drawn where only their distribution is given."""
Pace = tuple[float, float]
"""Seconds of the learner, and of engines, over those that their rates say."""
LEAST_PACE = 0.01
"""Smaller paces count as this one, as they have to have a logarithm."""
MOST_MEMORY, FORGOTTEN = 0.95, 50
"""Largest memory of paces, and the number of batches after which little is left of one."""


class _Seconds:
    """Base of records whose fields are all finite and at least 0."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if not (0 <= value < math.inf):
                raise InputError(f"{field.name} = {value} must be a finite number, at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates(_Seconds):
    """Rates of one engine: n rollouts gain a token each in `step + n**exponent · rollout` s."""

    step_seconds: float
    """Seconds of a token for all running rollouts together, however few they are."""
    rollout_step_seconds: float = 0.0
    """Further seconds for each running rollout."""
    exponent: float = 1.0
    """Below 1 if many rollouts are more efficient than few."""
    turnover_seconds: float = 0.0
    """Work for one rollout beside its tokens, half at each end; the others wait meanwhile."""
    slowdown: float = 0.0
    """Share by which all of this takes longer while the learner computes, as on one machine."""
    put_seconds: float = 0.0
    """Seconds from the end of a group's last rollout to the answer that it is accepted."""

    @classmethod
    def of_throughput(cls, *, one: float, full: float, slots: int) -> Self:
        """Derive the rates of an engine from its tokens/s with one rollout, and with all slots.

        Raises InputError if `full` is below `one`, or above `slots` times `one`.
        """
        if not (0 < one <= full <= one * slots * (1 + 1e-9)):
            raise InputError(
                f"an engine that gives {one:g} tokens/s to one rollout cannot give {full:g} to "
                f"{slots} at once: it must be at least {one:g} and at most {one * slots:g}"
            )
        if slots == 1:
            return cls(step_seconds=1 / one)
        rollout = max(0.0, (slots / full - 1 / one) / (slots - 1))
        return cls(step_seconds=max(0.0, 1 / one - rollout), rollout_step_seconds=rollout)

    def token_seconds(self, running: int) -> float:
        """Return the seconds until each of `running` rollouts has one more token."""
        return self.step_seconds + float(running**self.exponent) * self.rollout_step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRates(_Seconds):
    """Rates of the learner: a batch of n tokens takes about `batch + n · token` seconds."""

    batch_seconds: float = 0.0
    token_seconds: float = 0.0
    take_seconds: float = 0.0
    """Seconds from asking for a batch that is ready to the beginning of its step."""
    publish_seconds: float = 0.0
    """Seconds from the end of a step to asking for the next batch: publishing, acknowledging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates(_Seconds):
    """Rates of a weight update of one engine."""

    staging_seconds: float = 0.0
    """Seconds from the publication until the engine asks to swap; it goes on generating."""
    pause_seconds: float = 0.0
    """Seconds of the swap, during which its rollouts stand still."""
    pause_rollout_seconds: float = 0.0
    """Further ones for each running rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """All rates that the throughput of a run depends on."""

    engine: EngineRates
    learner: LearnerRates
    update: UpdateRates = UpdateRates()
    lengths: Sequence[Sequence[int]]
    """Sampled tokens of each rollout of some groups; a simulation goes through them in turn."""
    tied_share: float = 0.0
    """Share of groups whose rollouts all earn the same; dropped where a recipe filters them."""
    ranks: int = 1
    """Ranks of the learner that its rates hold for."""
    ess_loss: float | None = None
    """−ln ESS per squared version of lag, fitted through 0 over batches' means; None: unknown."""
    paces: Sequence[Pace] = ()
    """Paces of consecutive batches; a simulation goes through them in turn."""

    def __post_init__(self) -> None:
        """Refuse a run without a token to train."""
        if not self.engine.token_seconds(1):
            raise InputError("step_seconds and rollout_step_seconds of an engine are both 0")
        if not self.lengths:
            raise InputError("no rollout's length is known, so there is nothing to simulate")

    def on_ranks(self, ranks: int) -> Self:
        """Return the rates of a learner of other ranks: only the time of its tokens changes."""
        seconds = self.learner.token_seconds * self.ranks / ranks
        return replace(self, learner=replace(self.learner, token_seconds=seconds), ranks=ranks)

    def shuffled(self, *, longest: int, seed: int) -> Self:
        """Return the rates with groups in random order, and no rollout of more tokens."""
        groups = [tuple(min(length, longest) for length in group) for group in self.lengths]
        random.Random(seed).shuffle(groups)
        return replace(self, lengths=tuple(groups))

    def resampled(self, batches: int, seed: int) -> Self:
        """Return rates of another run of so many batches, as far as these can tell.

        Paces and lengths are drawn twice: as another calibration would have found them, which is
        as uncertain as this one, and from those, as a run has them.
        """
        chance, groups, paces = np.random.default_rng(seed), self.lengths, self.paces
        for count in (len(paces), batches):
            drawn = chance.integers(len(groups), size=len(groups)).tolist()
            groups = [groups[number] for number in drawn]
            paces = paces and redrawn(paces, count, chance)
        return replace(self, lengths=groups, paces=paces)

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as JSON values, the lengths as their mean and variation."""
        flat = [length for group in self.lengths for length in group]
        mean = fmean(flat)
        lengths = {"rollouts": len(flat), "mean": mean, "variation": pstdev(flat) / mean}
        paces = [[own, engines] for own, engines in self.paces]
        return {**asdict(self), "lengths": lengths, "paces": paces}


def redrawn(paces: Sequence[Pace], count: int, chance: np.random.Generator) -> list[Pace]:
    """Draw paces of so many batches as another run would have them, from at least three.

    Their logarithms are autoregressive: a share of the deviation from the mean, the memory, stays
    until the next batch. Its bias in short runs, −(1 + 3·memory)/n (Kendall 1954), is made good;
    what is new is drawn for both sides together, which may be slow for one reason. None is beyond
    the measured ones by more than their standard deviation.
    """
    logs = np.log(np.maximum(paces, LEAST_PACE))
    mean, length = logs.mean(axis=0), len(logs)
    left = logs - mean
    memory = np.sum(left[1:] * left[:-1], axis=0) / np.maximum(np.sum(left**2, axis=0), 1e-12)
    memory = np.clip(memory + (1 + 3 * memory) / length, 0.0, MOST_MEMORY)
    new = left[1:] - memory * left[:-1]
    new = (new - new.mean(axis=0)) * math.sqrt(length / (length - 2))
    drawn, deviation = [], np.zeros(2)
    for row in chance.choice(new, FORGOTTEN + count):
        deviation = memory * deviation + row
        drawn.append(mean + deviation)
    low, high, spread = logs.min(axis=0), logs.max(axis=0), logs.std(axis=0)
    clipped = np.clip(drawn[FORGOTTEN:], low - spread, high + spread)
    return [(own, engines) for own, engines in np.exp(clipped).tolist()]


def lognormal_lengths(
    mean: float, variation: float, *, group_size: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Draw lengths in tokens from a lognormal distribution; `variation` is deviation over mean.

    Raises InputError if the mean is below 1 or the variation below 0.
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
        for _ in range(SAMPLED_GROUPS)
    )
