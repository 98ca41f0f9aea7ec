"""What the receiver needs of an engine: the seam that the engines of `actors` implement."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # keeps torch out of modules that only describe engines
    from weight_sync.receive.staging import StagedWeights


class UpdatableEngine(Protocol):
    """An engine whose weights can be replaced while it has requests."""

    async def prepare(self, weights: "StagedWeights") -> None:
        """Does beforehand what it can of `load`, while tokens are sampled by the old weights.

        Called before `pause`, and not followed by a `load` if a newer version comes. Weights that
        cannot be prepared are no error here: `load` refuses them.
        """
        ...

    async def pause(self) -> None:
        """Returns when no token is sampled any more; calling it again while paused is harmless."""
        ...

    async def load(self, weights: "StagedWeights", version: int) -> None:
        """Replaces every weight; tokens sampled after `resume` carry `version`.

        Called only while paused. What an earlier failed load left behind has no effect.

        Raises:
            LoadFailed: The weights may be a mixture; the engine lives and waits, paused, for a
                full load. Any other error means that the engine is beyond repair.
        """
        ...

    async def resume(self) -> None:
        """Continues every request where it was frozen."""
        ...
