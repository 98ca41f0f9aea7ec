"""Has an engine score the probe after its swaps, beside its rollouts (`weight_sync.probe`)."""

import asyncio
import logging

from actors.engines.protocol import RolloutEngine
from headway.errors import HeadwayError
from weight_sync.announcements import Announcements
from weight_sync.probe import ProbeBudget, ProbeReport, Probing

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 60.0
"""Longest time of a probe, after which it is left out."""


class Prober:
    """Scores one version at a time; a newer one ends the probe of the one before."""

    def __init__(
        self, engine_id: str, engine: RolloutEngine, broadcaster: Announcements, probing: Probing
    ) -> None:
        self._engine_id, self._engine, self._broadcaster = engine_id, engine, broadcaster
        self._budget = ProbeBudget(probing)
        self._task: asyncio.Task[None] | None = None

    def begin(self, version: int) -> None:
        """Begin to probe a version that the engine serves, if the learner did and time allows."""
        if self._task is not None:
            self._task.cancel()
        self._task = asyncio.create_task(self._probe(version)) if self._budget.allows() else None

    async def _probe(self, version: int) -> None:
        """Report the scores; a failure is logged, and ends nothing."""
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                if (sequences := await self._broadcaster.probe(version)) is None:
                    return
                with self._budget.spend():
                    scored = await self._engine.score(sequences)
                if scored is not None:
                    scores, sampled = scored
                    report = ProbeReport(
                        source=self._engine_id, version=version, sequences=sequences,
                        scores=scores, sampled=sampled,
                    )  # fmt: skip
                    await self._broadcaster.probed(report)
        except (HeadwayError, TimeoutError) as error:
            log.warning("%s: version %d is not probed: %s", self._engine_id, version, error)
