"""Transports without staging on a cluster: how the learner finds engines and calls them.

    actor ─join─▶ broadcaster ◀─engines─ learner ─pause, transfer, resume, give_up─▶ actor

Leaves out what is sent when (`direct_publisher`) and how bytes travel (`vllm_sender`).
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
import ray.exceptions

from weight_sync.announcements import WeightUpdateReport
from weight_sync.config import WeightSyncConfig
from weight_sync.direct.engines import DirectEngines, EngineLink, Sender, Transfer, Weights
from weight_sync.direct.publisher import DirectPublisher
from weight_sync.errors import DeadlineExceeded, LoadFailed
from weight_sync.publish.snapshot import wire_dtype
from weight_sync.ray_broadcaster import BroadcasterClient

GIVE_UP_SECONDS = 10.0
"""How long an engine that is given up may take to answer."""


class RayEngineLink:
    """A rollout actor as the learner reaches it (a `direct.EngineLink`).

    Args:
        engine_id: Its name in reports.
        actor: Its handle; what `DirectReceiver` does, its method `weights` does.
        workers: Processes that hold a part of its weights.
        timeout: Deadline of a call in seconds.
    """

    def __init__(self, engine_id: str, actor: Any, workers: int, timeout: float) -> None:
        self.engine_id, self.actor, self.workers = engine_id, actor, workers
        self._timeout = timeout

    def pause(self, version: int, attempt: str) -> int | None:
        """See `EngineLink.pause`."""
        served: int | None = self._call("pause", version, attempt)
        return served

    def transfer(self, attempt: str, method: str, payload: dict[str, Any] | None) -> None:
        """See `EngineLink.transfer`."""
        self._call("transfer", attempt, method, payload)

    def resume(self, attempt: str) -> None:
        """See `EngineLink.resume`."""
        self._call("resume", attempt)

    def give_up(self, why: str) -> None:
        """See `EngineLink.give_up`."""
        self._call("give_up", why, timeout=min(self._timeout, GIVE_UP_SECONDS))

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        timeout = timeout or self._timeout
        try:
            return ray.get(self.actor.weights.remote(method, *arguments), timeout=timeout)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineExceeded(
                f"{self.engine_id} did not answer {method!r} within {timeout:g} s"
            ) from error
        except ray.exceptions.RayError as error:
            raise LoadFailed(f"{self.engine_id} is gone: {error}") from error


class JoinedEngines:
    """The engines that have joined, one link for each life of an actor.

    Args:
        broadcaster: Where they join.
        timeout: Deadline of a call in seconds.
    """

    def __init__(self, broadcaster: BroadcasterClient, timeout: float) -> None:
        self._broadcaster, self._timeout = broadcaster, timeout
        self._links: dict[Any, RayEngineLink] = {}

    def __call__(self) -> Sequence[EngineLink]:
        """Links in the order in which the engines joined."""
        joined = asyncio.run(self._broadcaster.engines())
        self._links = {
            actor: self._links.get(actor) or RayEngineLink(name, actor, workers, self._timeout)
            for name, (actor, workers) in joined.items()
        }
        return list(self._links.values())


def make_direct_publisher(
    config: WeightSyncConfig, broadcaster: BroadcasterClient
) -> DirectPublisher:
    """The publisher of a learner whose engines vLLM's own transfer engines serve."""
    backend, timeout = config.transport, config.timeout_seconds

    def connect(link: EngineLink, weights: Weights, transfer: Transfer) -> Sender:
        from weight_sync.direct.vllm_sender import VllmSender

        address = ray.util.get_node_ip_address()
        return VllmSender(backend, link.workers, weights, transfer, address, "cuda")

    def report(report: WeightUpdateReport) -> None:
        asyncio.run(broadcaster.report(report))

    engines = DirectEngines(JoinedEngines(broadcaster, timeout), connect, report, timeout=timeout)
    return DirectPublisher(engines, timeout=timeout, wire_dtype=wire_dtype(config))
