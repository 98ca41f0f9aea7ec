"""Calls from the learner to the engines of a cluster, for transports without staging.

actor ─join─▶ broadcaster ◀─engines─ learner ─pause, transfer, resume, give_up─▶ actor
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from weight_sync.config import WeightSyncConfig
from weight_sync.direct.publisher import (
    Call,
    DirectPublisher,
    EngineLink,
    Sender,
    Transfer,
    Weights,
)
from weight_sync.errors import DeadlineExceeded, LoadFailed
from weight_sync.publish.snapshot import wire_dtype
from weight_sync.ray_broadcaster import BroadcasterClient
from weight_sync.ray_calls import remote_errors

GIVE_UP_SECONDS = 10.0
"""Longest wait for the answer of an engine that is given up."""


class RayEngineLink(EngineLink):
    """Calls of the `DirectReceiver` of a rollout actor, by its method `weights`."""

    def __init__(self, engine_id: str, actor: Any, workers: int, timeout: float) -> None:
        self.engine_id, self.actor, self.workers = engine_id, actor, workers
        self._timeout = timeout

    def call(self, method: Call, *arguments: Any) -> Any:
        """See `EngineLink.call`; also DeadlineExceeded, or LoadFailed if the actor is gone."""
        timeout = min(self._timeout, GIVE_UP_SECONDS) if method == "give_up" else self._timeout
        name = f"{self.engine_id}, asked to {method},"
        with remote_errors(name, timeout, gone=LoadFailed, late=DeadlineExceeded):
            return ray.get(self.actor.weights.remote(method, *arguments), timeout=timeout)


class JoinedEngines:
    """The engines that have joined a broadcaster, with one link for each life of an actor."""

    def __init__(self, broadcaster: BroadcasterClient, timeout: float) -> None:
        self._broadcaster, self._timeout = broadcaster, timeout
        self._links: dict[Any, RayEngineLink] = {}

    def __call__(self) -> Sequence[EngineLink]:
        """Return links in the order in which the engines joined."""
        joined = asyncio.run(self._broadcaster.engines())
        self._links = {
            actor: self._links.get(actor) or RayEngineLink(name, actor, workers, self._timeout)
            for name, (actor, workers) in joined.items()
        }
        return list(self._links.values())


def make_direct_publisher(
    config: WeightSyncConfig, broadcaster: BroadcasterClient, *, seed_seconds: float = 1.0
) -> DirectPublisher:
    """Build the publisher that sends by vLLM's own transfer engines."""
    backend, timeout = config.transport, config.timeout_seconds

    def connect(link: EngineLink, weights: Weights, transfer: Transfer) -> Sender:
        from weight_sync.direct.vllm_sender import VllmSender

        address = ray.util.get_node_ip_address()
        return VllmSender(backend, link.workers, weights, transfer, address, "cuda")

    return DirectPublisher(
        JoinedEngines(broadcaster, timeout),
        connect,
        lambda report: asyncio.run(broadcaster.report(report)),
        timeout=timeout,
        wire_dtype=wire_dtype(config),
        seed_seconds=seed_seconds,
    )
