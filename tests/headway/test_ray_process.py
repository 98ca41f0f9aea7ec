"""The title of an actor's process says what it does now, also after Ray has set its own."""

import asyncio
import os
import time

import psutil
import pytest
import ray

from headway.ray_process import RENEWED_SECONDS, keep_title

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
