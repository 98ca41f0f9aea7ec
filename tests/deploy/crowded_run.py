"""`headway run` with 64 simulated actors besides its own, for counting exported metrics.

A simulated actor registers with the broker, receives every version from the broadcaster, and
exports every metric that an actor can have. It generates nothing.
"""

import asyncio

from actors.metrics import ActorMetrics
from actors.rollout.actor_statistics import ActorStatistics
from deploy import run, session
from deploy.cli import main
from deploy.driver.scrape_targets import ScrapeTargets
from deploy.run import Run
from headway import clock
from headway.metrics import MetricsAccess, MetricsServer
from queues.records import PutStatus
from weight_sync.announcements import WeightUpdateReport

SIMULATED = 64
HOST = "127.0.0.1"
POLL_SECONDS = 1.0
SIMULATED_TARGETS: list[tuple[str, str]] = []
"""Names and addresses of the simulated actors."""


class CrowdedTargets(ScrapeTargets):
    """The addresses of a run, and of simulated actors in this process."""

    def reachable(self) -> list[tuple[str, str]]:
        return [*super().reachable(), *SIMULATED_TARGETS]


class Crowded(Run):
    """A run with simulated actors."""

    async def train(self) -> None:
        first = self.context.config.actors.count
        crowd = [
            asyncio.create_task(self.simulate(index)) for index in range(first, first + SIMULATED)
        ]
        try:
            await super().train()
        finally:
            for task in crowd:
                task.cancel()
            await asyncio.wait(crowd)

    async def simulate(self, index: int) -> None:
        name, engine = f"actor-{index}", f"engine-{index}"
        statistics = ActorStatistics(engine)
        statistics.groups.update([*(status.value for status in PutStatus), "failed", "aborted"])
        self.context.record.restarts[name] = 1
        port = MetricsServer([ActorMetrics(statistics)], MetricsAccess(HOST)).port
        SIMULATED_TARGETS.append((name, f"{HOST}:{port}"))
        broadcaster, serves = self.processes.broadcaster, -1
        while True:
            manifest = await broadcaster.newest(serves, POLL_SECONDS)
            if manifest is None or not await broadcaster.acquire_swap(engine, POLL_SECONDS):
                continue
            now, serves = clock.now(), manifest.version
            await broadcaster.report(
                WeightUpdateReport(
                    engine_id=engine, version=serves, published_at=manifest.created_at,
                    staged_at=now, pause_seconds=0.0, load_seconds=0.0, resume_seconds=0.0,
                    swap_started_at=now, swap_finished_at=now, bytes=64,
                )
            )  # fmt: skip
            await self.processes.broker.serving(engine, serves)


if __name__ == "__main__":
    session.Run = Crowded
    run.ScrapeTargets = CrowdedTargets
    main()
