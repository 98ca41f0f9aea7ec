"""The broker's contract with its three kinds of callers.

`queues.broker.broker.Broker` (in this process) and `queues.ray_broker.BrokerClient` (over Ray)
satisfy all three protocols. Every `timeout` is in seconds and ends a long poll without an error.

After the broker is closed every call raises QueueClosed, and after a failed commit LedgerError;
only `cursor`, which reads memory, still answers.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from queues.records import Batch, Evaluation, Lease, Prompt, Purpose, PutStatus


class PromptFeed(Protocol):
    """The calls of the feeder of prompts."""

    async def prompts_wanted(self, timeout: float) -> int:
        """Return how many train prompts to issue now; long-polls, 0 at the timeout.

        Raises QueueClosed once no prompt will be wanted any more.
        """

    async def issue(
        self, prompts: Sequence[Prompt], *, cursor: str, last: bool = False, token: str = ""
    ) -> None:
        """Queue prompts for training, in one transaction with the source's cursor.

        Args:
            prompts: Each becomes a group, unless it is retired or failed before. Once a whole epoch
                is skipped that way, the source counts as ended.
            cursor: Position of the source after these prompts.
            last: No prompt follows these: the number of prompts is finite. Only then may the last
                batch be short. Otherwise issuing ends with the steps (`prompts_wanted`).
            token: Name of this call, if any: one with the name of a recent one changes nothing.

        Raises:
            InputError: Metadata that is not JSON, or with a pass-rate cap an id without an epoch.
            ProtocolError: The last prompts were issued before.
        """

    async def cursor(self) -> str | None:
        """Return the cursor of the last `issue`; None before the first."""

    async def evaluate(
        self, name: str, prompts: Sequence[Prompt], *, temperature: float, min_version: int
    ) -> None:
        """Queue an evaluation; a name that exists already is left as it is.

        Every prompt is sampled as often as it is given, ahead of training, by engines that serve
        `min_version` or later; it fails if training ends before that version. Queue the evaluation
        of the last version before the last `ack`, which ends the run if no work is left.

        Raises InputError if there are no prompts or `min_version` is after the last step, and
        QueueClosed once the run is over.
        """

    async def evaluation(self, name: str, timeout: float) -> Evaluation | None:
        """Return the outcome of an evaluation; long-polls, None if unfinished at the timeout.

        Raises ProtocolError if no evaluation of this name was queued.
        """


class WorkQueue(Protocol):
    """The calls of a rollout worker, and of its supervisor once the worker is gone."""

    async def serving(self, engine_id: str, version: int) -> None:
        """Report that the engine samples from this policy version from now on; durable.

        Raises ProtocolError if the engine reported a later version before.
        """

    async def lease(
        self, engine_id: str, capacity: int, timeout: float, purpose: Purpose | None = None
    ) -> list[Lease]:
        """Lease groups to generate; long-polls, empty at the timeout.

        Evaluations come first, then what admission allows at the version that the engine last
        reported; an engine that has reported none gets nothing. All leased groups together have at
        most `capacity` rollouts (`Lease.capacity`). With a purpose, only groups of that purpose are
        leased. Raises QueueClosed once the run is over.
        """

    async def heartbeat(
        self, engine_id: str, held: Collection[tuple[str, int]]
    ) -> list[tuple[str, int]]:
        """Renew leases, given as (group id, attempt); return those that are lost: abort them.

        They are all that the engine holds, read again if the call is repeated. A broker that was
        made again takes back what else it had leased to the engine before, since the answer to that
        lease was lost.
        """

    async def put(self, engine_id: str, payload: bytes) -> PutStatus:
        """Deliver a finished group, made by `queues.schema.encode`.

        An accepted group is durable before the answer, and no second result of it is ever accepted.
        Evaluation groups are scored and not kept. Raises SchemaError if the payload breaks the
        schema or is not what was leased (the lease stays), and ProtocolError if the group was never
        issued.
        """

    async def save(self, engine_id: str, payload: bytes) -> None:
        """Save the sampled tokens of a group that has no result yet, replacing earlier ones.

        The next lease of the group carries them, unless they are too old for it to be trained in
        time. Does nothing if the caller does not hold the lease, or the group is of an evaluation.
        Raises SchemaError if the payload breaks the schema or has no sampled token.
        """

    async def note(
        self,
        engine_id: str,
        group_id: str,
        attempt: int,
        sample_index: int,
        name: str,
        payload: bytes,
        oldest_version: int | None,
    ) -> bytes:
        """Keep a note about one rollout of a leased group, durable before the answer.

        The first note of a name stays, and is returned. The next leases of the group carry its
        notes and what was saved, unless those are too old for it to be trained in time: then all
        are deleted, as they are with the result. A second failed attempt deletes the notes too: it
        went on from them. Keeps nothing, and returns the payload, if the caller does not hold the
        lease or the group is of an evaluation.

        Args:
            engine_id: The holder of the lease.
            group_id: The leased group.
            attempt: That of the lease.
            sample_index: The rollout.
            name: "turn/3" for a turn of `queues.turns`, "call/3/0" for the result of a tool call.
            payload: The note.
            oldest_version: That of the sampled tokens in it, which counts as those of saved tokens
                do; None without any. Notes without it are kept only beside one that has it.
        """

    async def fail(
        self, engine_id: str, group_id: str, attempt: int, *, reason: str, error: str
    ) -> None:
        """Return a group that could not be generated: redelivered, or failed after `max_attempts`.

        Does nothing if the caller does not hold the lease.
        """

    async def release(self, engine_id: str) -> int:
        """Take back all leases of an engine that is gone, and forget the version it served.

        The groups are redelivered first; results of the old leases are fenced, and open `lease`
        calls of the engine end empty. Returns the number of leases that the engine held, or raises
        QueueClosed if the run is over, so that no successor is needed.
        """


class BatchQueue(Protocol):
    """The calls of the learner."""

    async def take(self, version: int, timeout: float) -> Batch | None:
        """Return the batch to train at `version`; long-polls, None at the timeout.

        Its composition is recorded before the answer: the same call returns the same batch again,
        also after a restart. Raises QueueClosed if that batch will never come, and ProtocolError if
        another batch is due.
        """

    async def ack(self, version: int, statistics: Mapping[str, Any]) -> bool:
        """Acknowledge that the batch is trained: the learner is at version + 1.

        Repeating it changes nothing, but weights that differ from the first time are counted;
        returns whether it was the first time. The statistics are JSON values, kept in the ledger.
        The broker adds counts of groups that were left out or trained late, and the state of the
        staleness controller, which reads `ess`.

        Raises:
            InputError: The statistics are not JSON.
            ProtocolError: That batch is not taken.
            AccountingError: The states of the groups do not add up any more.
        """

    async def commit_checkpoint(self, version: int, path: str) -> None:
        """Record a checkpoint, which is complete on disk, of the first `version` batches.

        `path` is its folder, relative to the run's, so that a copied run keeps its checkpoints; an
        absolute path is kept as it is.
        """

    async def cursor(self) -> str | None:
        """Return the cursor of the last `issue`; None before the first."""
