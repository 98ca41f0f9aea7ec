"""The supervisor of an actor that dies, with actors of a few lines."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from actors.errors import EngineDied
from actors.rollout.actor_statistics import ActorStatistics
from deploy.driver.actor_supervisor import ActorSupervisor
from deploy.driver.supervisor import Timing
from deploy.errors import RunFailed
from headway import clock
from headway.errors import InputError
from queues.errors import BrokerLostError, QueueClosed
from queues.records import Purpose
from tests.deploy.driver.contexts import SupervisorStage, output
from tests.waiting import reached
from weight_sync.errors import DeadlineExceeded, IncompatibleWeights, LoadFailed

OVER = None
HANG = "hang"
SILENT = "silent"
"""A life that hangs, and answers no ping."""


def raised(cause):
    """Return an error as Ray brings it from another process."""
    return RayTaskError("run", "", cause)


class Stage(SupervisorStage):
    """Creates actors that play given lives, and records what happens to them and the leases.

    A life is what its `run` ends with, or (what `start` ends with, what `run` ends with).
    """

    def __init__(self, tmp_path, monkeypatch, *lives, release=None, purpose=None,
                 count=1, min_count=None, **settings):  # fmt: skip
        super().__init__(tmp_path, lives, **settings)
        self.release_error, self.sleep_hook = release, None
        self.actors, self.rollouts = [], {}
        monkeypatch.setattr("ray.kill", self.kill)
        self.supervisor = ActorSupervisor(
            self.context,
            SimpleNamespace(
                index=3,
                broker=self,
                broadcaster=SimpleNamespace(release=self.release_permit),
                purpose=purpose,
            ),
            lambda: (count - self.supervisor.given_up, min_count or count),
            self.create,
            timing=Timing(
                **self.clock,
                poll_seconds=60.0,
                answer_seconds=0.05,
                resend_seconds=0.05,
                silent_seconds=0.2,
                loading_silent_seconds=0.2,
            ),
        )

    def note(self, *event):
        self.events.append(event)

    def kill(self, actor):
        self.note("kill", actor.number)
        actor.killed.set()

    def create(self, spec):
        assert spec.index == 3
        self.actors.append(Actor(self, self.lives.pop(0)))
        return self.actors[-1]

    async def release(self, engine_id):
        self.note("release", engine_id)
        if self.release_error is not None:
            raise self.release_error

    async def release_permit(self, engine_id):
        self.note("permit", engine_id)

    async def sleep(self, seconds):
        await super().sleep(seconds)
        if self.sleep_hook is not None:
            await self.sleep_hook(seconds)


class Actor:
    """A Ray handle of one life; its tokens are 10 for each actor before it, and 10."""

    def __init__(self, stage, life):
        self.stage = stage
        self.started, self.ran, *seconds = life if isinstance(life, tuple) else (OVER, life)
        self.seconds = seconds[0] if seconds else 0.0
        self.number = sum(kind == "create" for kind, *_ in stage.events)
        stage.note("create", self.number)
        for name in ("start", "run", "statistics", "stop", "resend", "ping"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))
        self.dead = False
        self.killed = asyncio.Event()

    async def _end(self, name, how):
        self.stage.note(name, self.number)
        if how in (HANG, SILENT):
            await self.killed.wait()
            raise RayActorError
        self.stage.now += self.seconds
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)  # let others look
        if how is not OVER:
            self.dead = not isinstance(how, RayTaskError)
            raise how

    async def _start(self):
        await self._end("start", self.started)

    async def _run(self):
        await self._end("run", self.ran)

    async def _stop(self, seconds):
        self.stage.note("stop", self.number)
        await asyncio.Event().wait()

    async def _resend(self):
        self.stage.note("resend", self.number)
        await asyncio.Event().wait()

    async def _ping(self):
        if self.ran == SILENT:
            await asyncio.Event().wait()

    async def _statistics(self):
        if self.dead:
            raise RayActorError
        return {
            **ActorStatistics("engine-3").statistics(),
            "tokens_generated": 10**self.number,
            "rollouts": self.stage.rollouts.get(self.number, 0),
        }


@pytest.fixture
def stage(tmp_path, monkeypatch):
    return lambda *lives, **settings: Stage(tmp_path, monkeypatch, *lives, **settings)


MORTAL = {
    "process": (RayActorError(), "its process died"),
    "memory": (OutOfMemoryError("the node has no memory left"), "its process died"),
    "engine": (
        raised(EngineDied("the engine [/tmp/model] is gone")),
        "engine [/tmp/model] is gone",
    ),
    "transfer": (raised(LoadFailed("a cable")), "a cable"),
    "swap": (raised(DeadlineExceeded("engine-3 did not take version 2")), "did not take version 2"),
}


@pytest.mark.parametrize("how", MORTAL)
def test_a_dead_actor_is_cleared_away_before_another_is_made_that_works_on(stage, how):
    error, reason = MORTAL[how]
    played = stage(error, OVER)
    played.play()
    assert played.events == [
        ("create", 0), ("start", 0), ("run", 0), ("kill", 0), ("release", "engine-3"),
        ("permit", "engine-3"),
        ("create", 1), ("start", 1), ("run", 1),
    ]  # fmt: skip
    assert played.record.restarts.total() == 1
    printed = output(played.context)
    assert "actor-3 is restarted (1 of 5 in a row)" in printed
    assert reason in printed
    assert "actor-3 is ready again" in printed
    (row,) = played.rows()
    assert reason in row.pop("reason")
    assert 0.0 <= clock.now() - row.pop("at") < 10.0
    assert row == {"actor": "actor-3", "in_a_row": 1}


@pytest.mark.parametrize(
    "cause",
    [
        InputError("the reward does not import"),
        IncompatibleWeights("another model"),
        BrokerLostError("gone"),
        ZeroDivisionError("a bug"),
    ],
)
@pytest.mark.parametrize("moment", ["run", "second start"])
def test_what_would_happen_again_is_raised_as_it_is(stage, cause, moment):
    played = (
        stage(raised(cause)) if moment == "run" else stage(RayActorError(), (raised(cause), OVER))
    )
    with pytest.raises(RayTaskError) as caught:
        played.play()
    assert caught.value.cause is cause
    assert played.record.restarts.total() == (moment != "run")


def test_a_first_start_that_fails_is_tried_again(stage):
    played = stage((raised(EngineDied("no memory")), OVER), (RayActorError(), OVER), OVER)
    played.play()
    assert played.waits == [1, 2]
    assert [row["reason"].split(":")[0] for row in played.rows()] == [
        "no memory", "its process died",
    ]  # fmt: skip
    assert played.events[-2:] == [("start", 2), ("run", 2)]
    [row] = played.context.directory.rows("recoveries.jsonl")
    assert (row["process"], row["seconds"]) == ("actor-3", 0.0), "its lost time ends here"


@pytest.mark.parametrize("moment", ["start", "run", "wait"])
async def test_an_actor_that_leaves_is_ended_at_any_moment_and_may_come_back(stage, moment):
    lives = {"start": [(HANG, OVER)], "run": [HANG], "wait": [RayActorError()]}
    played = stage(*lives[moment], OVER)
    supervisor = played.supervisor
    if moment != "wait":
        running = asyncio.create_task(supervisor.run())
        await reached(lambda: (moment, 0) in played.events)
        await supervisor.leave(0.05)
    else:

        async def sleep(seconds):
            await supervisor.leave(0.05)

        played.sleep_hook = sleep
        running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(running, 10)
    assert (supervisor.handle, supervisor.health, supervisor.left) == (None, None, True)
    assert played.events[-2:] == [("release", "engine-3"), ("permit", "engine-3")]
    supervisor.left = False
    await supervisor.run()
    assert (("stop", 0) in played.events) == (moment == "run"), "it hands over"
    assert (("start", 1) in played.events, len(played.rows())) == (True, moment == "wait")


@pytest.mark.parametrize(
    ("moment", "count", "min_count", "joins", "purpose", "given_up"),
    [
        ("start", 2, 1, False, None, True),
        ("run", 2, 1, False, None, True),
        ("start", 2, None, True, None, True),
        ("start", 1, None, True, None, False),
        ("start", 2, 1, False, Purpose.EVALUATE, False),
        ("start", 2, 1, True, Purpose.EVALUATE, False),
    ],
)
def test_an_actor_is_given_up_if_it_is_not_needed_and_else_ends_the_run(
    stage, moment, count, min_count, joins, purpose, given_up
):
    """One that joins is not, if any other is left; one that evaluates always is."""
    died = RayActorError()
    played = stage(*[(died, OVER) if moment == "start" else died] * 2, max_restarts=1, count=count,
                   min_count=min_count, purpose=purpose)  # fmt: skip
    played.supervisor.joins = joins
    if given_up:
        played.play()
        assert (
            "actor-3 is given up, 1 of at least 1 actor(s) go on: actor-3 died 2 times in a row"
        ) in output(played.context)
        assert played.supervisor.health is None
    else:
        with pytest.raises(RunFailed, match="actor-3 died 2 times in a row"):
            played.play()
    assert played.supervisor.given_up == given_up


def test_ten_good_minutes_begin_the_count_anew(stage):
    died = RayActorError()
    played = stage(died, (OVER, died, 599.0), (OVER, died, 300.0), (OVER, died, 600.0), died, OVER,
                   max_restarts=3)  # fmt: skip
    played.play()
    assert played.waits == [1, 2, 4, 1, 2]


def test_an_actor_that_answers_no_ping_is_ended_and_its_silence_counts_as_lost(stage):
    played = stage(SILENT, OVER)
    played.play()
    assert played.events[2:6] == [
        ("run", 0), ("kill", 0), ("kill", 0), ("release", "engine-3"),
    ]  # fmt: skip
    assert [row["reason"] for row in played.rows()] == ["it did not answer within 0.2 s"]
    assert played.record.away == {"actor-3": 0.2}


def test_an_actor_that_finished_a_rollout_begins_the_count_anew(stage):
    again = raised(EngineDied("the engine is gone"))
    played = stage(again, again, again, OVER, max_restarts=2)
    played.rollouts = {1: 5}
    played.play()
    assert played.waits == [1, 1, 2]


def test_an_actor_that_joins_again_begins_anew(stage):
    played = stage(RayActorError(), RayActorError(), OVER, max_restarts=1, count=2, min_count=1)
    played.play()
    assert played.supervisor.given_up
    played.now = 3600.0
    played.supervisor.join()
    asyncio.run(asyncio.wait_for(played.supervisor.run(), 10))
    assert played.record.away == {"actor-3": 0.0}, "it was not missed meanwhile"


def test_a_restart_that_fails_or_hangs_in_its_start_counts_and_is_tried_again(stage):
    died = RayActorError()
    played = stage(
        died, (died, OVER), (HANG, OVER), (raised(EngineDied("no memory")), OVER), OVER,
        start_timeout_seconds=0.05,
    )  # fmt: skip
    played.play()
    assert [row["reason"].split(":")[0] for row in played.rows()] == [
        "its process died",
        "its process died",
        "actor-3 did not start within deploy.start_timeout_seconds = 0.05",
        "no memory",
    ]
    assert [event for event in played.events if event[0] == "kill"] == [
        ("kill", i) for i in range(4)
    ]


NO_PACKAGE = "ModuleNotFoundError: No module named 'flash_attn'"
NOT_CREATED = RayActorError(error_msg=f"its creation task failed\n{NO_PACKAGE}",
                            actor_init_failed=True)  # fmt: skip


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NOT_CREATED, f"its process died: {NO_PACKAGE}"),
        (raised(EngineDied("Head size 24 is not supported")), "Head size 24 is not supported"),
    ],
)
@pytest.mark.parametrize("worked_before", [False, True])
def test_an_actor_that_fails_twice_in_the_same_way_at_its_start_ends_the_run_with_the_error(
    stage, error, reason, worked_before
):
    played = stage(*[RayActorError()] * worked_before, *[(error, OVER)] * 5)
    with pytest.raises(RunFailed) as failed:
        played.play()
    assert str(failed.value) == (
        f"actor-3 failed twice in the same way before it did any work: {reason}"
    )
    assert len(played.waits) == 1 + worked_before


def test_no_successor_is_made_when_the_run_is_over(stage):
    played = stage(RayActorError(), release=QueueClosed("the run is over"))
    played.play()
    assert played.events[-1] == ("release", "engine-3")
    assert played.record.restarts.total() == 0


def test_a_lost_broker_ends_the_run(stage):
    played = stage(RayActorError(), release=BrokerLostError("gone"))
    with pytest.raises(BrokerLostError):
        played.play()


def test_statistics_count_every_life_with_what_it_last_said(stage):
    played = stage(raised(EngineDied("gone")), RayActorError(), OVER)
    played.play()
    assert asyncio.run(played.supervisor.statistics())["tokens_generated"] == 1 + 10 + 100


async def test_statistics_never_hang_or_raise(stage):
    played = stage(OVER)
    first = await played.supervisor.statistics()
    assert (first["engine_id"], first["pid"], first["tokens_generated"]) == ("engine-3", None, 0)
    await played.supervisor.start()
    before = await played.supervisor.statistics()
    played.actors[0].statistics.remote = asyncio.Event().wait
    assert await played.supervisor.statistics() == before
    played.actors[0].dead = True
    assert await played.supervisor.statistics() == before


async def test_an_actor_that_works_is_asked_to_hand_over_and_not_waited_for_without_end(stage):
    played = stage(HANG)
    await played.supervisor.stop(0.05)
    assert played.events == [], "there is none yet"
    working = asyncio.create_task(played.supervisor.run())
    await reached(lambda: ("run", 0) in played.events)
    await played.supervisor.stop(0.05)
    assert played.events[-1] == ("stop", 0)
    working.cancel()
    await asyncio.wait({working})


async def test_an_actor_that_is_to_be_restarted_is_and_the_reason_is_recorded(stage):
    played = stage(HANG, OVER)
    played.supervisor.restart("there is none yet")
    await played.supervisor.resend()
    assert played.events == []
    working = asyncio.create_task(played.supervisor.run())
    await reached(lambda: ("run", 0) in played.events)
    await played.supervisor.resend()
    played.supervisor.restart("it hangs", 300.0)
    await asyncio.wait_for(working, 10)
    assert played.events == [
        ("create", 0), ("start", 0), ("run", 0), ("resend", 0), ("kill", 0), ("kill", 0),
        ("release", "engine-3"), ("permit", "engine-3"),
        ("create", 1), ("start", 1), ("run", 1),
    ]  # fmt: skip
    assert [row["reason"] for row in played.rows()] == ["it hangs"]
    assert played.record.away["actor-3"] >= 300.0, "what it did not answer is lost"
