"""The title of an actor's process says what it does now, also after Ray has set its own."""

import asyncio
import os

import psutil
import pytest
import ray

from headway.ray_process import RENEWED_SECONDS, keep_title
from tests.waiting import until

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


def test_the_title_follows_the_state_and_comes_back_after_every_call():
    actor = ray.remote(num_cpus=0)(Shown).remote()
    process = psutil.Process(ray.get(actor.start.remote(), timeout=60))
    until(lambda: process.cmdline()[0] == "ray::Shown worker-3: begins", 20 * RENEWED_SECONDS)
    ray.get(actor.change.remote("worker-3: goes on"), timeout=60)
    until(lambda: process.cmdline()[0] == "ray::Shown worker-3: goes on", 20 * RENEWED_SECONDS)
    ray.kill(actor)
