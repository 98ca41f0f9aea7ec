"""The watchdog with a broker and processes of a few lines: what it shows, writes and ends."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import psutil
import pytest

from deploy.config.loader import load_recipe
from deploy.driver.watchdog import Probes, Watchdog, concerned, write_durably, writing_ends
from deploy.errors import RunFailed
from deploy.observability.stack_dumps import ProcessDump, ProcessLocation, dump_local
from deploy.observability.waits import ActorHealth, Wait
from tests.deploy.driver.contexts import make_context, output
from tests.waiting import reached, until
from weight_sync.announcements import WeightUpdateReport

STATES = ("queued", "leased", "ready", "taken", "trained", "dropped", "failed")
STATUS = SimpleNamespace(
    version=1,
    learner=(0, 1),
    steps=5,
    depth=dict.fromkeys(STATES, 1),
    live=2,
    window=4,
    waits_for={},
    engines={"engine-0": 1},
    accepted=1,
    evaluations=("greedy@4",),
    last_error=None,
    paused=None,
)


def status(**changes):
    return SimpleNamespace(**{**vars(STATUS), **changes})


class Process:
    """A handle in Ray."""

    def __init__(self, pid, *, silent=False):
        self.silent = silent
        self.__ray_call__ = SimpleNamespace(remote=lambda _: self.answer(pid))

    async def answer(self, pid):
        if self.silent:
            await asyncio.Event().wait()
        return ProcessLocation("here", pid)


class Stage:
    """A run in which the learner has a batch and does not come back with it."""

    def __init__(self, tmp_path, *, aborts=False, deadline=0.05, file=None, **probes):
        intervals = {"look_seconds": 0.01, "answer_seconds": 0.05, "stall_seconds": 1000.0}
        settings = [f"deploy.watchdog_seconds={deadline}"]
        settings.append(f"deploy.watchdog_aborts={str(aborts).lower()}")
        self.events, self.restarts, self.answer = [], [], STATUS
        self.learner_waits, self.learner_starts, self.looks = None, False, 0
        self.moves = False
        self.actor_restarts, self.actor = [], ActorHealth(engine_id="engine-0")
        context = replace(make_context(tmp_path), config=load_recipe("demo", settings))
        self.record, self.directory = context.record, context.directory
        self.directory.logs.mkdir()
        if file is not None:
            context = replace(context, jsonl=SimpleNamespace(write=file))
        self.output = partial(output, context)
        probes = Probes(**{**intervals, "dump": self.dump, **probes})
        self.watchdog = Watchdog(context, self, self.save, probes)
        self.named = {"broker": Process(1), "learner-0": Process(2), "learner-1": Process(3)}

    # the processes, as the watchdog reaches them

    reward_models_start, saved = False, False

    @property
    def learner(self):
        return self

    @property
    def starts(self):
        return self.learner_starts

    async def paused(self):
        return self.learner_waits

    def restart_ranks(self, *restart):
        self.restarts.append(restart)

    def restart_actor(self, *restart):
        self.actor_restarts.append(restart)

    def health(self):
        return {"actor-0": self.actor}

    def actors_lacking(self):
        return 0

    def handles(self):
        return self.named

    async def status(self):
        self.looks += 1
        if self.answer is None:
            await asyncio.Event().wait()
        if self.moves:
            return SimpleNamespace(**{**vars(self.answer), "accepted": self.looks})
        return self.answer

    async def save(self):
        self.events.append("saved")

    def dump(self, location):
        return ProcessDump(f"pid {location.pid} is stopped", f"stack of {location.pid}")

    async def until(self, condition):
        following = asyncio.create_task(self.watchdog.follow())
        try:
            await reached(lambda: condition() or following.done())
        finally:
            following.cancel()
            await asyncio.wait({following})
        if not following.cancelled():
            following.result()

    def shown(self, text):
        return lambda: text in self.output()


def test_a_wait_that_lasts_is_said_written_and_kept_for_metrics_with_stacks(tmp_path):
    stage = Stage(tmp_path)
    asyncio.run(stage.until(stage.shown("stacks in")))
    assert "broker waits on learner for batch 1 to be trained since" in stage.output()
    [row] = stage.directory.rows("waits.jsonl")
    assert (row["who"], row["on"], row["what"]) == ("broker", "learner", "batch 1 to be trained")
    assert row["seconds"] > 0.05
    assert "learner-0: pid 2 is stopped; learner-1: pid 3 is stopped" in row["text"]
    stacks = (tmp_path / row["stacks"]).read_text()
    assert "stack of 2" in stacks
    assert "stack of 3" in stacks
    assert "stack of 1" not in stacks
    assert [late.on for late in stage.watchdog.overdue if late.who == "broker"] == ["learner"]


async def test_a_wait_is_said_once_and_its_end_too(tmp_path):
    stage = Stage(tmp_path)
    following = asyncio.create_task(stage.until(stage.shown("waits on learner no more")))
    await reached(stage.shown("broker waits on learner"))
    looks = stage.looks
    await reached(lambda: stage.looks >= looks + 5)
    stage.answer = status(depth={**STATUS.depth, "taken": 0})
    await following
    assert stage.output().count("broker waits on learner for batch 1") == 1


def test_one_rank_that_does_not_answer_is_named_and_asked_once(tmp_path):
    stage = Stage(tmp_path)
    asked = []

    async def hang():
        asked.append("learner-1")
        await asyncio.Event().wait()

    stage.answer = status(depth={**STATUS.depth, "taken": 0})
    hung = SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda _: hang()))
    stage.named = {"broadcaster": Process(2), "learner-0": Process(3), "learner-1": hung}
    asyncio.run(stage.until(stage.shown("stacks in")))
    waits = [(wait.who, wait.on, wait.what) for wait in stage.watchdog.overdue]
    assert waits == [("driver", "learner-1", "an answer")]
    assert asked == ["learner-1"]
    nodes = [stage.watchdog.node_of(f"learner-{rank}") for rank in range(2)]
    assert nodes == ["here", None]


def test_a_disk_that_does_not_come_back_is_named_and_keeps_nobody(tmp_path):
    hung = threading.Event()
    stage = Stage(tmp_path, write=lambda file: hung.wait(30))
    shows = stage.shown("waits on the disk of the run's folder")
    asyncio.run(stage.until(shows))
    assert shows()
    assert not hung.is_set()
    hung.set()


def test_a_wait_is_shown_before_its_stacks_are_dumped(tmp_path):
    release = threading.Event()
    stage = Stage(tmp_path, dump=lambda _: release.wait(30) and ProcessDump("is stopped", ""))

    async def play():
        following = asyncio.create_task(stage.until(stage.shown("stacks in")))
        await reached(stage.shown("broker waits on learner for batch 1"))
        assert "stacks" not in stage.output()
        release.set()
        await following

    try:
        asyncio.run(play())
    finally:
        release.set()


def test_a_report_whose_file_does_not_open_is_given_up(tmp_path):
    stage = Stage(tmp_path, report_seconds=0.1)
    stacks = stage.directory.logs / "stacks-1.txt"
    os.mkfifo(stacks)
    try:
        asyncio.run(stage.until(stage.shown("its disk did not answer within 0.1 s")))
        assert stage.shown("its disk did not answer within 0.1 s")()
    finally:
        os.close(os.open(stacks, os.O_RDONLY | os.O_NONBLOCK))


@pytest.mark.parametrize("fails", ["dump", "write"])
def test_a_learner_that_hangs_is_restarted_though_its_report_cannot_be_made(tmp_path, fails):
    def fail(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    stage = Stage(tmp_path, **({"dump": fail} if fails == "dump" else {"file": fail}))
    asyncio.run(stage.until(lambda: stage.restarts))
    [(epoch, reason, silent)] = stage.restarts
    assert (reason, epoch) == ("broker waited 0 s on learner", 0)
    assert silent > 0.0
    problem = {
        "dump": "learner-0: its stacks could not be taken (OSError(12, 'Cannot allocate memory'))",
        "write": "no file: the report could not be written (OSError(12, 'Cannot allocate memory'))",
    }
    assert stage.shown(problem[fails])()


@pytest.mark.parametrize(("aborts", "taken"), [(False, True), (True, True), (False, False)])
def test_a_learner_that_hangs_is_restarted_unless_the_recipe_ends_the_run(tmp_path, aborts, taken):
    """Without a batch that is taken, an actor is waited for, and nothing is restarted."""
    stage = Stage(tmp_path, aborts=aborts)
    if not taken:
        depth = {**STATUS.depth, "taken": 0}
        stage.answer = status(depth=depth, waits_for={"g1": "engine-0"})
    reason = r"waits on learner .* headway resume"
    with pytest.raises(RunFailed, match=reason) if aborts else contextlib.nullcontext():
        asyncio.run(stage.until(lambda: stage.shown("stacks in")() and stage.looks > 20))
    restarts = [(reason, epoch) for epoch, reason, _ in stage.restarts]
    assert restarts == ([("broker waited 0 s on learner", 0)] if taken and not aborts else [])
    assert stage.events == ["saved"] * aborts, "a run ends after a checkpoint"


def test_a_run_in_which_nothing_moves_ends_after_a_checkpoint_and_names_every_wait(tmp_path):
    stage = Stage(tmp_path, stall_seconds=0.15)
    stage.record.swaps.append(
        WeightUpdateReport(
            engine_id="e", version=1, published_at=0.0, bytes=0, error="LoadFailed: a cable"
        )
    )
    message = (
        r"^nothing moved for .* more than 3 times deploy.watchdog_seconds = 0.05; version 1, .*"
        r"unfinished evaluations: greedy@4; .* weight update: LoadFailed: a cable; "
        r"overdue waits: broker waits on learner for batch 1 to be trained; .* headway resume"
    )
    with pytest.raises(RunFailed, match=message):
        asyncio.run(stage.until(lambda: False))
    assert stage.events == ["saved"]


def test_a_run_whose_broker_never_answers_ends_as_well(tmp_path):
    stage = Stage(tmp_path, stall_seconds=0.15)
    stage.answer = None
    with pytest.raises(RunFailed, match="the broker does not answer"):
        asyncio.run(stage.until(lambda: False))
    assert stage.shown("driver waits on broker for an answer")()


@pytest.mark.parametrize("excuse", ["the broker pauses", "the learner pauses", "the learner loads"])
async def test_nothing_has_to_move_while_a_disk_is_full_or_the_learner_loads(tmp_path, excuse):
    stage = Stage(tmp_path, stall_seconds=0.15)
    reason, paused = "no space is left on the disk of X", int(excuse != "the learner loads")
    stage.learner_starts = not paused
    stage.learner_waits = reason if excuse == "the learner pauses" else None
    if excuse == "the broker pauses":
        stage.answer = status(paused=reason)
    following = asyncio.create_task(stage.until(lambda: False))
    began = time.monotonic()
    await reached(lambda: time.monotonic() > began + 0.5)  # longer than a stall
    assert not following.done()
    assert paused or not stage.watchdog.overdue
    assert stage.shown(f"paused: {reason}")() == paused
    stage.learner_waits, stage.learner_starts, stage.answer = None, False, STATUS
    with pytest.raises(RunFailed, match="nothing moved"):
        await following
    assert stage.output().count("paused: ") == paused
    assert stage.output().count("the pause is over") == paused


async def test_a_service_that_rollouts_wait_for_is_named_and_nothing_has_to_move(tmp_path):
    stage = Stage(tmp_path, stall_seconds=0.15)
    away = ("reward 'judge:score'", "raised ConnectionError('no judge')", 7.0)
    stage.actor = replace(stage.actor, running=2, outages=[away])
    following = asyncio.create_task(stage.until(lambda: False))
    began = time.monotonic()
    await reached(lambda: time.monotonic() > began + 0.5)  # longer than a stall
    assert not following.done()
    assert stage.actor_restarts == []
    assert "paused: actor-0: reward 'judge:score' waits since " in stage.output()
    assert "on a service that is away: raised ConnectionError('no judge')" in stage.output()
    [wait] = stage.watchdog.overdue
    assert (wait.who, wait.on, wait.seconds) == ("actor-0: reward 'judge:score'", "a service", 7.0)
    stage.actor = replace(stage.actor, outages=())
    with pytest.raises(RunFailed, match="nothing moved"):
        await following


def test_a_checkpoint_that_is_written_may_take_as_long_as_its_bytes(tmp_path):
    assert writing_ends(tmp_path) == 0
    unfinished = tmp_path / ".v000005.tmp" / "optimizer" / "rank-0.safetensors"
    unfinished.parent.mkdir(parents=True)
    with unfinished.open("wb") as file:
        file.truncate(2_500_000_000)
    os.utime(unfinished, (1000.0, 1000.0))
    assert writing_ends(tmp_path) == 1100
    unfinished.parent.parent.rename(tmp_path / "v000005")
    assert writing_ends(tmp_path) == 0


def test_of_a_weight_update_its_engine_is_looked_at():
    waits = [Wait("actor-1", "weight update", "")]
    assert concerned(waits, ["broker", "actor-0", "actor-1"]) == ["actor-1"]


def test_a_file_is_durable_and_gone(tmp_path):
    write_durably(tmp_path / "probe")
    assert not list(tmp_path.iterdir())


def test_a_stopped_process_is_seen_with_its_state_and_its_stack():
    code = "import time\ndef lost(): print('up', flush=True); time.sleep(60)\nlost()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == "stopped")
        dumped = dump_local(process.pid)
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
    assert dumped.states == f"pid {process.pid} is stopped"
    assert "lost (<string>:2)" in dumped.stacks
    assert dump_local(process.pid).states == f"pid {process.pid} is gone"


def test_every_one_of_the_processes_that_call_rewards_is_seen_with_their_actor():
    code = (
        "import subprocess, sys\n"
        "rest = [subprocess.Popen([sys.executable, '-c', 'input()']) for _ in range(8)]\n"
        "print(*[child.pid for child in rest], flush=True)\n"
        "input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    children = process.stdout.readline().split()
    states = dump_local(process.pid).states
    process.communicate()
    assert len(children) == 8
    assert all(f"pid {pid} is " in states for pid in children)


@pytest.mark.parametrize(
    ("silent", "moves", "restarts"),
    [(True, True, True), (False, False, True), (False, True, False)],
    ids=["it does not answer", "nothing moves", "others work"],
)
def test_an_actor_that_hangs_is_restarted(tmp_path, silent, moves, restarts):
    stage = Stage(tmp_path)
    stage.answer = status(depth=dict.fromkeys(STATES, 0))
    stage.moves, stage.actor = moves, ActorHealth(engine_id="engine-0", running=3)
    stage.named["actor-0"] = Process(9, silent=silent)
    asyncio.run(stage.until(lambda: stage.actor_restarts or stage.looks > 60))
    assert bool(stage.actor_restarts) == restarts
    for name, reason, _ in stage.actor_restarts:
        assert (name, reason.endswith("on actor-0")) == ("actor-0", True)
