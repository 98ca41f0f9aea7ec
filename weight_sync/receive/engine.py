"""The interface of an engine whose weights a `Receiver` replaces; `actors.engines` implement it."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # keeps torch out of modules that only describe engines
    from weight_sync.receive.staging import StagedWeights


class PausableEngine(Protocol):
    """An engine that can stand still while it has requests."""

    async def pause(self) -> None:
        """Return once no token is sampled any more; harmless while paused."""

    async def resume(self) -> None:
        """Continue every request where it was frozen."""


class UpdatableEngine(PausableEngine, Protocol):
    """An engine whose weights can be replaced while it has requests."""

    async def prepare(self, weights: "StagedWeights") -> None:
        """Do as much of `load` as possible in advance, while the old weights are served.

        No `load` follows if a newer version comes. `load` refuses what cannot be prepared.
        """

    async def load(self, weights: "StagedWeights", version: int) -> None:
        """Replace every weight, while paused; tokens sampled after `resume` carry `version`.

        Remains of a failed load must have no effect. Raises LoadFailed if the weights may be a
        mixture: the engine waits, paused, for a full load. No other error can be repaired.
        """
