"""Calls from the learner to the engines of a cluster, for transports without staging.

actor ─join─▶ broadcaster ◀─engines─ learner ─pause, transfer, resume, give_up─▶ actor
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch

from headway.ray_service import answer_of
from weight_sync.config import WeightSyncConfig
from weight_sync.direct.attempt import EngineLink, Sender, Transfer, Weights
from weight_sync.direct.direct_receiver import DirectReceiver
from weight_sync.direct.publisher import DirectPublisher
from weight_sync.errors import DeadlineExceeded, LoadFailed
from weight_sync.publish.snapshot import wire_dtype
from weight_sync.ray_broadcaster import BroadcasterClient

GIVE_UP_SECONDS = 10.0
"""Longest wait for the answer of an engine that is given up."""


class RayEngineLink(EngineLink):
    """Calls of a rollout actor, without a deadline but for `give_up`; LoadFailed if it is gone."""

    def __init__(self, engine_id: str, actor: Any, workers: int) -> None:
        self.engine_id, self.actor, self.workers = engine_id, actor, workers

    def pause(self, version: int, attempt: str) -> int | None:
        served: int | None = self._call(DirectReceiver.pause, version, attempt)
        return served

    def transfer(self, attempt: str, method: str, payload: dict[str, Any] | None) -> None:
        self._call(DirectReceiver.transfer, attempt, method, payload)

    def resume(self, attempt: str) -> None:
        self._call(DirectReceiver.resume, attempt)

    def give_up(self, reason: str) -> None:
        self._call(DirectReceiver.give_up, reason, seconds=GIVE_UP_SECONDS)

    def _call(self, step: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        name = f"{self.engine_id}, asked to {step.__name__.replace('_', ' ')},"
        pending = self.actor.update.remote(step, *arguments)
        return answer_of(pending, name, seconds, gone=LoadFailed, late=DeadlineExceeded)


class JoinedEngines:
    """The engines that have joined a broadcaster, with one link for each life of an actor."""

    def __init__(self, broadcaster: BroadcasterClient) -> None:
        self._broadcaster = broadcaster
        self._links: dict[Any, RayEngineLink] = {}

    def __call__(self) -> Sequence[EngineLink]:
        """Return links in the order in which the engines joined."""
        joined = asyncio.run(self._broadcaster.engines())
        self._links = {
            actor: self._links.get(actor) or RayEngineLink(name, actor, workers)
            for name, (actor, workers) in joined.items()
        }
        return list(self._links.values())


def make_direct_publisher(
    config: WeightSyncConfig, broadcaster: BroadcasterClient, *, seed_seconds: float = 1.0
) -> DirectPublisher:
    """Build the publisher that sends by vLLM's own transfer engines.

    Imports vLLM at once: the first engine stands still while it is connected.
    """
    from weight_sync.direct.vllm_sender import VllmSender

    def connect(links: Sequence[EngineLink], weights: Weights, transfer: Transfer) -> Sender:
        address = ray.util.get_node_ip_address()
        workers = [link.workers for link in links]
        return VllmSender(config.transport, workers, weights, transfer, address, "cuda")

    publisher = DirectPublisher(
        JoinedEngines(broadcaster),
        connect,
        lambda report: asyncio.run(broadcaster.report(report)),
        timeout=config.timeout_seconds,
        wire_dtype=wire_dtype(config),
        seed_seconds=seed_seconds,
    )
    publisher.together = config.transport == "nccl"
    if publisher.together and torch.cuda.is_available():
        publisher.gpu_memory = torch.cuda.mem_get_info
    return publisher
