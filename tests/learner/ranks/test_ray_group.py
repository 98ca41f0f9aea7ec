"""The learner group over Ray: trains, stops, goes on, and names the rank that fails."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import ray
from rollouts import random_groups

from headway.errors import HeadwayError
from learner.config.learner import LearnerConfig
from learner.disk_wait import wait_for_space
from learner.errors import RankFailed
from learner.ranks.ray_group import create_learner
from learner.ranks.spec import LearnerSpec
from queues.records import Batch
from queues.schema import encode

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 100.0
"""Deadline of every wait."""


class FileBroker:
    """Always has a batch; writes what it is told as lines of a file."""

    def __init__(self, file, payloads):
        self.file, self.payloads = file, payloads

    async def take(self, version, timeout):
        return Batch(version=version, payloads=self.payloads)

    async def ack(self, version, statistics):
        self.write({"ack": version, **statistics})
        return True

    async def cursor(self):
        return "prompt 9"

    async def commit_checkpoint(self, version, path):
        self.write({"commit": version, "path": path})

    def write(self, row):
        with Path(self.file).open("a") as lines:
            lines.write(json.dumps(row) + "\n")


class NobodyListens:
    def announce(self, manifest):
        pass


class Session:
    """A learner group; its broker writes to `log`."""

    def __init__(self, model_path, folder, *, checkpoint=None, version=0, steps=1000, **settings):
        self.folder, self.log = folder, folder / "log.jsonl"
        self.config = LearnerConfig(**{"ranks": 2, "threads": 1, **settings})
        spec = LearnerSpec(
            config=self.config,
            model_path=model_path,
            seed=0,
            steps=steps,
            checkpoint=checkpoint,
            version=version,
            checkpoints=str(folder / "checkpoints"),
        )
        self.group = create_learner(spec)

    async def start(self):
        async with asyncio.timeout(SECONDS):
            await self.group.start()

    async def run(self):
        broker = FileBroker(str(self.log), [encode(item) for item in random_groups(count=4)])
        async with asyncio.timeout(SECONDS):
            return await self.group.run(broker, NobodyListens())

    def rows(self):
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    async def acks(self, count):
        """Wait until so many batches are trained."""
        deadline = time.monotonic() + SECONDS
        while not self.log.exists() or sum("ack" in row for row in self.rows()) < count:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    def call(self, rank, function):
        return ray.get(self.group.handles[rank].__ray_call__.remote(function), timeout=SECONDS)


@pytest.fixture
def session(ray_cluster, model_path, tmp_path):
    made = []

    def make(model=model_path, **settings):
        made.append(Session(model, tmp_path, **settings))
        return made[-1]

    yield make
    for item in made:
        item.group.kill()


def test_a_rank_whose_thread_waits_for_room_says_why_and_the_group_with_it(session, tmp_path):
    group = session().group

    async def reason():
        async with asyncio.timeout(SECONDS):
            return await group.paused()

    def wait(actor):
        actor._thread.submit(wait_for_space, tmp_path, 2**60)

    assert asyncio.run(reason()) is None
    ray.get(group.handles[1].__ray_call__.remote(wait), timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while (found := asyncio.run(reason())) is None:
        assert time.monotonic() < deadline
    assert f"no space is left on the disk of {tmp_path}" in found
    group.kill()
    while asyncio.run(reason()) is not None:
        assert time.monotonic() < deadline, "the dead wait for nothing"


FLOAT32 = {"zero_stage": 3}
BFLOAT16 = {
    "dtype": "bfloat16",
    "zero_stage": 2,
    "activation_checkpointing": True,
    "offload_optimizer": True,
    "loss": "reinforce",
    "learning_rate": 1e-3,
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16, offloaded"])
async def test_a_group_trains_saves_and_goes_on_exactly_from_a_checkpoint(
    session, tmp_path, settings
):
    settings = {**settings, "checkpoint_every": 2, "keep_checkpoints": 2}
    first = session(**settings, steps=6)

    await first.start()
    assert await first.run() == 6
    rows = first.rows()
    assert [row["ack"] for row in rows if "ack" in row] == [*range(6)]
    commits = [row for row in rows if "commit" in row]
    assert [row["commit"] for row in commits] == [2, 4, 6]
    for commit in commits:  # after the batch before, and beside later ones
        acks = [row["ack"] for row in rows[: rows.index(commit)] if "ack" in row]
        assert commit["commit"] - 1 in acks
    assert commits[0]["path"] == "checkpoints/v000002"
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == ["v000004", "v000006"]
    state = json.loads((tmp_path / "checkpoints/v000004/state.json").read_text())
    assert state["cursor"] == "prompt 9"
    assert state["totals"]["rollouts"] == sum(
        row["rollouts_trained"] for row in rows if row.get("ack", 9) < 4
    )
    first.group.stop()
    first.group.kill()
    first.group.stop()  # a group that is dead takes it too
    losses = [row["loss"] for row in rows if "ack" in row]
    assert settings.get("dtype") != "bfloat16" or losses[3] < losses[0]

    second = session(
        **settings, checkpoint=str(tmp_path / "checkpoints/v000004"), version=4, steps=6
    )
    await second.start()
    assert await second.run() == 6
    for version in (4, 5):  # the second feels whether the optimizer's state came back
        [before, after] = [row for row in second.rows() if row.get("ack") == version]
        for name in ("loss", "grad_norm", "entropy_mean", "totals"):
            assert after[name] == before[name], (version, name)
        assert after["session_started_at"] > before["published_at"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "killed"), [(1, 0), (2, 1), (3, 1)])
async def test_a_rank_that_is_killed_ends_the_run_soon_with_its_name_in_one_line(
    session, ranks, killed
):
    item = session(ranks=ranks, cores="0", checkpoint_every=1000)
    await item.start()
    running = asyncio.create_task(item.run())
    await item.acks(2)
    os.kill(item.call(killed, lambda _: os.getpid()), signal.SIGKILL)
    died = time.monotonic()
    with pytest.raises(RankFailed, match=f"rank {killed} died: ") as caught:
        await running
    assert "\n" not in str(caught.value)
    assert time.monotonic() - died < 15


@pytest.mark.slow
async def test_a_follower_that_raises_ends_the_run_while_the_leader_waits_for_it(session):
    item = session(checkpoint_every=1000)

    def break_update(actor):
        def raise_it(payloads, version):
            raise ValueError("boom")

        actor._rank.update = raise_it

    assert item.call(0, repr) == "learner-0"
    await item.start()
    item.call(1, break_update)
    with pytest.raises(RankFailed, match=r"rank 1: ValueError\('boom'\)"):
        await item.run()


@pytest.mark.slow
async def test_stop_ends_the_run_at_a_batch_boundary_with_a_checkpoint(session):
    item = session(zero_stage=0, checkpoint_every=1000)
    await item.start()
    running = asyncio.create_task(item.run())
    await item.acks(1)
    item.group.stop()
    reached = await running
    assert reached >= 1
    assert item.rows()[-1]["commit"] == reached


@pytest.mark.slow
async def test_a_model_that_does_not_exist_is_bad_input_with_the_name_of_a_rank(session):
    item = session(model="/no/such/model")
    with pytest.raises(HeadwayError, match=r"rank \d: no language model") as caught:
        await item.start()
    assert caught.value.exit_code == 2
