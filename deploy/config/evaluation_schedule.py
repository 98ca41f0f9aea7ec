"""The schedule of held-out evaluations: which versions, which problems, which actor."""

from collections.abc import Sequence
from dataclasses import dataclass

from actors.config import HeldoutConfig
from headway.roles import ProcessName, Role
from queues.records import Purpose

GREEDY, SAMPLED = "greedy", "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEvaluation:
    """One held-out evaluation of a run."""

    version: int
    kind: str
    temperature: float
    size: int
    """Number of problems."""
    samples: int = 1
    """Number of rollouts of each problem."""

    @property
    def name(self) -> str:
        """The evaluation's name in the broker."""
        return f"{self.kind}@{self.version}"


def plan(config: HeldoutConfig, *, steps: int, temperature: float) -> list[PlannedEvaluation]:
    """Plan the evaluations of a run in the order of versions, larger at both ends."""
    versions = sorted({0, *range(config.every, steps, config.every), steps})
    kinds = [(GREEDY, 0.0)] + ([(SAMPLED, temperature)] if config.sampled else [])
    return [
        PlannedEvaluation(
            version=version,
            kind=kind,
            temperature=kind_temperature,
            samples=config.samples if kind == SAMPLED else 1,
            size=(config.final_size or config.size) if version in (0, steps) else config.size,
        )
        for version in versions
        for kind, kind_temperature in kinds
    ]


EVALUATOR = 0
"""Number of the actor that only evaluates, if one does: the first, which is kept where few fit."""


def evaluator(config: HeldoutConfig | None) -> ProcessName | None:
    """Return the name of the actor that only evaluates; None where all actors do everything."""
    pinned = config is not None and config.pinned
    return ProcessName(Role.ACTOR, EVALUATOR) if pinned else None


def purpose(config: HeldoutConfig | None, actor: int) -> Purpose | None:
    """Return what an actor, by its number, leases; None where all actors do everything."""
    if evaluator(config) is None:
        return None
    return Purpose.EVALUATE if actor == EVALUATOR else Purpose.TRAIN


def scores_first(unfinished: Sequence[str]) -> bool:
    """Return True if one of these evaluations, by name, is of the initial policy."""
    return any(name.endswith("@0") for name in unfinished)
