"""The broker as its three kinds of callers see it.

`Broker` (in this process) and `BrokerClient` (over Ray) satisfy all three; one contract test-suite
runs against both. Every `timeout` is in seconds and ends a long poll without an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from queues.records import Batch, Evaluation, Lease, Prompt, Purpose, PutStatus


class PromptFeed(Protocol):
    """What the feeder of prompts calls."""

    async def prompts_wanted(self, timeout: float) -> int:
        """How many train prompts to issue now; 0 at the timeout."""

    async def issue(self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False) -> None:
        """Queue prompts for training, in one transaction with the source's cursor."""

    async def cursor(self) -> str | None:
        """The cursor of the last `issue`."""

    async def evaluate(
        self, name: str, prompts: Sequence[Prompt], *, temperature: float, min_version: int
    ) -> None:
        """Queue an evaluation."""

    async def evaluation(self, name: str, timeout: float) -> Evaluation | None:
        """The outcome; None while unfinished at the timeout."""


class WorkQueue(Protocol):
    """What a rollout worker calls, and its supervisor once it is gone."""

    async def serving(self, engine_id: str, version: int) -> None:
        """The engine now samples from this policy version."""

    async def lease(
        self, engine_id: str, room: int, timeout: float, purpose: Purpose | None = None
    ) -> list[Lease]:
        """Groups to generate, of at most `room` rollouts together; empty at the timeout."""

    async def heartbeat(
        self, engine_id: str, held: Sequence[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """Renew leases (group id, attempt); returns those that are lost and must be aborted."""

    async def put(self, engine_id: str, payload: bytes) -> PutStatus:
        """Deliver a finished group, made by `queues.schema.encode`; durable when accepted."""

    async def save(self, engine_id: str, payload: bytes) -> None:
        """Keep what there is of a group without a result, for whoever leases it next."""

    async def fail(
        self, engine_id: str, group_id: str, attempt: int, *, reason: str, error: str
    ) -> None:
        """Give a group back."""

    async def release(self, engine_id: str) -> int:
        """Take back every lease of an engine that is gone; returns how many it held."""


class BatchQueue(Protocol):
    """What the learner calls."""

    async def take(self, version: int, timeout: float) -> Batch | None:
        """The batch to train at `version`; the same one when asked again; None at the timeout."""

    async def ack(self, version: int, statistics: Mapping[str, Any]) -> None:
        """The batch is trained: the learner is at version + 1."""

    async def commit_checkpoint(self, version: int, path: str) -> None:
        """A checkpoint of `version` is complete at `path`, relative to the run's folder."""

    async def cursor(self) -> str | None:
        """The cursor of the last `issue`, which a checkpoint keeps."""
