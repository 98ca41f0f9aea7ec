"""Groups, payloads and brokers for the tests of `queues`."""

import asyncio
import re
import struct
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from queues.broker.broker import Broker
from queues.config import QueuesConfig, RunSpec
from queues.errors import JournalError
from queues.records import FinishReason, Prompt, Rollout, RolloutGroup
from queues.schema import encode
from queues.storage.journal import Location, read_group

BEGIN = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
CONFIG: dict[str, Any] = {
    "max_staleness": 1,
    "lease_seconds": 30.0,
    "heartbeat_seconds": 1.0,
    "max_attempts": 2,
    "retry_seconds": 0.0,
    "synchronous": "normal",
    "commit_interval_seconds": 0.0,
}
SIZES: dict[str, Any] = {"groups_per_batch": 2, "group_size": 2, "steps": 3}

WAIT = 10.0
"""Deadline of a long poll that is answered."""


@asynccontextmanager
async def opened(broker):
    """Use a broker for a minute at most, and close it whatever happens."""
    try:
        async with asyncio.timeout(60):
            yield broker
    finally:
        await broker.close()


def make_prompts(count, first=0):
    return [
        Prompt(prompt_id=f"sums/0/{index}", text=f"{index}+1=", answer=str(index + 1))
        for index in range(first, first + count)
    ]


def make_rollout(index=0, sampled=(0, 0), **changes):
    """Three prompt tokens, then one sampled token per version in `sampled`."""
    count = len(sampled)
    values: dict[str, Any] = {
        "sample_index": index,
        "token_ids": list(range(3 + count)),
        "prompt_length": 3,
        "loss_mask": [False] * 3 + [True] * count,
        "behavior_logprobs": [0.0] * 3 + [-0.5] * count,
        "versions": [-1] * 3 + list(sampled),
        "reward": 1.0,
        "reward_parts": {"exact": 1.0},
        "finish_reason": FinishReason.STOP,
        "turns": 1,
        "environment": "single_turn",
        "engine_id": "engine-0",
        "created_at": BEGIN,
        "finished_at": BEGIN + timedelta(seconds=1),
    }
    return Rollout(**(values | changes))


def make_group(size=2, **changes):
    values: dict[str, Any] = {
        "group_id": "g00000001",
        "prompt_id": "sums/0/0",
        "attempt": 1,
        "rollouts": [make_rollout(index) for index in range(size)],
    }
    return RolloutGroup(**(values | changes))


def payload_of(lease, rollouts):
    names = {"group_id": lease.group_id, "prompt_id": lease.prompt.prompt_id}
    return encode(make_group(**names, attempt=lease.attempt, rollouts=rollouts))


def answer(lease, *, reward=1.0, version=None, tied=False):
    """Return the payload of a finished group, as a worker puts it for a lease."""
    versions = [lease.start_version if version is None else version] * 2
    rollouts = [
        make_rollout(index, versions, reward=reward + index * (not tied))
        for index in range(lease.group_size)
    ]
    return payload_of(lease, rollouts)


def unfinished(lease, *versions, reward=0.0):
    """Return the payload of a leased group with one interrupted rollout."""
    rollout = make_rollout(0, versions, finish_reason=FinishReason.ABORTED, reward=reward)
    return payload_of(lease, [rollout])


async def begin_work(broker, prompts, *engines, capacity=0, **issue):
    """Issue prompts to engines that serve version 0, "a" by default; return the first's leases."""
    await broker.issue(make_prompts(prompts), cursor=str(prompts), **issue)
    for engine in engines or ("a",):
        await broker.serving(engine, 0)
    return await broker.lease("a", capacity, WAIT) if capacity else []


async def put_all(broker, leases, engine="a"):
    """Put a result for each lease of an engine."""
    for lease in leases:
        await broker.put(engine, answer(lease))


async def train_a_batch(broker, issued=2, *, capacity=8, answered=None, **figures):
    """Issue prompts, answer the first groups that are leased, and train batch 0."""
    leases = await begin_work(broker, issued, capacity=capacity)
    await put_all(broker, leases[:answered])
    assert await broker.take(0, WAIT) is not None
    await broker.ack(0, figures)


async def half_a_run(directory):
    """Return a broker of which batch 0 is trained, a group ready, one leased, and two queued."""
    broker = make_broker(directory)
    await train_a_batch(broker, 6, answered=3)
    return broker


async def until_paused(broker, pattern):
    """Wait until the broker says that it pauses for this reason; "None" waits for the end."""
    async with asyncio.timeout(2 * WAIT):
        while not re.search(pattern, str(await broker.paused())):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def frames(directory, segment):
    """Location and payload of a journal segment's frames, up to the first damaged one."""
    content, offset = (directory / f"{segment:08d}.segment").read_bytes(), 0
    with suppress(JournalError, struct.error):
        while True:
            location = Location(segment, offset, *struct.unpack_from("<IQ", content, offset))
            payload = read_group(directory, location)
            yield location, payload
            offset += 12 + len(payload)


def make_broker(directory, **changes):
    """Return a broker of 2 groups of 2 rollouts a batch, with `changes` to its settings."""
    return Broker(directory, **_arguments(changes))


def _arguments(changes):
    sizes = {name: changes.pop(name) for name in list(changes) if name in RunSpec.__slots__}
    own = {
        name: changes.pop(name) for name in ("probe_seconds", "session", "owner") if name in changes
    }
    return own | {"config": QueuesConfig(**(CONFIG | changes)), "spec": RunSpec(**(SIZES | sizes))}


class InProcess:
    """A handle that calls an object of this process, as a handle of Ray calls an actor."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(self._target, name))


over_ray = pytest.mark.parametrize(
    "connect", ["in_process", pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
"""Marks tests whose broker is tried over Ray in CI too; one process for each test would be many."""


@pytest.fixture(
    params=["in_process", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow])]
)
def connect(request, tmp_path):
    """Make the broker under test: in this process, or a client of one in a Ray actor."""
    if request.param == "in_process":
        return lambda **changes: make_broker(tmp_path, **changes)
    request.getfixturevalue("ray_cluster")
    from queues.ray_broker import create_broker

    return lambda **changes: create_broker(tmp_path, **_arguments(changes))
