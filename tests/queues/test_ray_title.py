"""The title of an actor's process says what it does now, also after Ray has set its own."""

import asyncio
import os
import time

import psutil
import pytest
import ray

from queues.config import QueuesConfig
from queues.ray_broker import create_broker
from queues.ray_title import RENEWED_SECONDS, keep_title
from tests.queues.conftest import make_prompts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


class Shown:
    def __init__(self):
        self.state = "worker-3: begins"
        self.task = None

    async def start(self):
        self.task = asyncio.create_task(keep_title("Shown", lambda: self.state))
        return os.getpid()

    async def change(self, state):
        self.state = state


def wait_for_title(pid, wanted):
    deadline = time.monotonic() + 20 * RENEWED_SECONDS
    while (title := psutil.Process(pid).cmdline()[0]) != wanted:
        assert time.monotonic() < deadline, title
        time.sleep(0.02)


def test_the_title_follows_the_state_and_comes_back_after_every_call():
    actor = ray.remote(num_cpus=0)(Shown).remote()
    pid = ray.get(actor.start.remote(), timeout=60)
    wait_for_title(pid, "ray::Shown worker-3: begins")
    ray.get(actor.change.remote("worker-3: goes on"), timeout=60)
    wait_for_title(pid, "ray::Shown worker-3: goes on")
    ray.kill(actor)


def test_a_broker_says_its_version_and_how_many_groups_are_live(tmp_path):
    shape = {"groups_per_batch": 2, "group_size": 2, "steps": 9}
    client = create_broker(tmp_path, config=QueuesConfig(max_staleness=1), **shape)
    pid = ray.get(client._actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
    wait_for_title(pid, "ray::_BrokerActor broker: version 0, 0 of 4 groups live")

    async def lease():
        await client.issue(make_prompts(3), cursor="3")
        await client.serving("a", 0)
        return {lease.group_id for lease in await client.lease("a", 3, 10.0)}

    live = len(asyncio.run(lease()))
    assert live
    wait_for_title(pid, f"ray::_BrokerActor broker: version 0, {live} of 4 groups live")
    ray.kill(client._actor)
