"""The schedule of held-out evaluations: which versions, which problems, which actor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.config import HeldoutConfig
from actors.rollout.actor_statistics import engine_id_of
from queues.records import Purpose

GREEDY, SAMPLED = "greedy", "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One evaluation of a run."""

    version: int
    kind: str
    temperature: float
    size: int
    """Problems."""
    samples: int = 1
    """Of each problem."""

    @property
    def name(self) -> str:
        """Its name in the broker."""
        return f"{self.kind}@{self.version}"


def plan(config: HeldoutConfig, *, steps: int, temperature: float) -> list[Planned]:
    """The evaluations of a run, by version: every `every` versions, and larger at both ends."""
    versions = sorted({0, *range(config.every, steps, config.every), steps})
    kinds = [(GREEDY, 0.0)] + ([(SAMPLED, temperature)] if config.sampled else [])
    return [
        Planned(
            version=version,
            kind=kind,
            temperature=heat,
            samples=config.samples if kind == SAMPLED else 1,
            size=(config.final_size or config.size) if version in (0, steps) else config.size,
        )
        for version in versions
        for kind, heat in kinds
    ]


def purpose(config: HeldoutConfig | None, actor: int, actors: int) -> Purpose | None:
    """What the actor of this number, of so many, leases; None where all of them do everything."""
    found = evaluator(config, actors)
    if found is None:
        return None
    return Purpose.EVALUATE if engine_id_of(actor) == found else Purpose.TRAIN


def evaluator(config: HeldoutConfig | None, actors: int) -> str | None:
    """Id of the engine that only evaluates; None where all of them do everything."""
    return engine_id_of(actors - 1) if config is not None and config.pinned else None


def pinned_seconds(config: HeldoutConfig | None, actor: int, actors: int) -> float:
    """How long the actor of this number may keep a version, since it evaluates it."""
    evaluates = purpose(config, actor, actors) is Purpose.EVALUATE
    return config.pinned_seconds if config is not None and evaluates else 0.0


def scores_first(unfinished: Sequence[str]) -> bool:
    """Whether one of these evaluations is of the initial policy: no prompt comes before its end.

    Example:
        >>> scores_first(["greedy@0", "greedy@50"]), scores_first(["greedy@10", "sampled@50"])
        (True, False)
    """
    return any(name.endswith("@0") for name in unfinished)


def by_version(planned: Sequence[Planned]) -> Iterator[tuple[int, list[Planned]]]:
    """The evaluations of each version, in order."""
    for version in sorted({evaluation.version for evaluation in planned}):
        yield version, [p for p in planned if p.version == version]
