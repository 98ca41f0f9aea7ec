"""The notes of one rollout in the ledger, by which another attempt goes on at its last turn."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from actors.outages import untimed
from queues.protocols import WorkQueue
from queues.records import Lease, Turn
from queues.turns import decode_turn, encode_turn

TURN = "turn/"
"""Prefix of the names of turns, before their numbers."""


class Notes:
    """The notes of earlier attempts about a rollout, and those that this one adds.

    Without a work queue nothing is kept. Turns raise SchemaError where they cannot be read.
    """

    def __init__(
        self, work: WorkQueue | None, engine_id: str, lease: Lease, sample_index: int
    ) -> None:
        self._work = work
        self._rollout = (engine_id, lease.group_id, lease.attempt, sample_index)
        self._kept = {name: note for (i, name), note in lease.notes.items() if i == sample_index}

    def turn(self, number: int) -> Turn | None:
        """Return the turn of this number; None if there is none."""
        payload = self._kept.get(f"{TURN}{number}")
        return None if payload is None else decode_turn(payload)

    async def add(self, turn: Turn) -> None:
        """Note a turn."""
        if self._work is not None:
            oldest = min(turn.versions, default=None)
            await self._keep(f"{TURN}{turn.number}", encode_turn(turn), oldest)

    async def recall(self, turn: int, index: int, call: Callable[[], Awaitable[Any]]) -> Any:
        """Return the noted result of a tool call of a turn; make the call first if there is none.

        The result is a JSON value.
        """
        name = f"call/{turn}/{index}"
        payload = self._kept.get(name)
        if payload is None:
            payload = await self._keep(name, json.dumps(await call()).encode(), None)
        return json.loads(payload)

    def leave(self) -> None:
        """Go on without notes: the conversation has become another than the noted one."""
        self._work, self._kept = None, {}

    async def _keep(self, name: str, payload: bytes, oldest_version: int | None) -> bytes:
        if self._work is not None:
            note = self._work.note(*self._rollout, name, payload, oldest_version)
            payload = await untimed(note)
        self._kept[name] = payload
        return payload


def noted_turns(lease: Lease, sample_index: int) -> dict[int, Turn]:
    """Return the turns that earlier attempts have noted of a rollout, by number."""
    turns = [
        decode_turn(note)
        for (index, name), note in lease.notes.items()
        if index == sample_index and name.startswith(TURN)
    ]
    return {turn.number: turn for turn in turns}
