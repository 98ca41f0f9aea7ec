"""The actors of a run whose number changes, with supervisors of a few lines."""

import asyncio
import json
import os
import threading
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from deploy.config.loader import load_recipe
from deploy.driver import actor_fleet
from deploy.driver.actor_fleet import ActorFleet
from deploy.errors import RunFailed
from deploy.storage import scaling
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_lock import RunLock
from headway.errors import InputError
from headway.roles import Role
from queues.errors import QueueClosed
from tests.deploy.conftest import RECIPE
from tests.deploy.driver.contexts import make_context, output
from tests.waiting import reached

REQUESTS = scaling.requests
SHARED = "deploy.ray_address=auto"


class Supervisor:
    """An actor that works until the test ends it or the fleet has it leave."""

    def __init__(self, context, spec, counts, create):
        self.number, self.name, self.engine_id = spec, f"actor-{spec}", f"engine-{spec}"
        self.given_up = self.left = self.joins = False
        self.handle, self.ended = None, asyncio.Event()
        self.fails, self.counts = None, counts
        self.health, self.seconds, self.hands_over = "working", None, None

    def join(self):
        self.given_up, self.joins = False, True
        self.ended.clear()

    async def run(self):
        self.left = False
        await self.ended.wait()
        if self.fails:
            raise self.fails

    async def leave(self, seconds):
        self.seconds = seconds
        await asyncio.sleep(0)
        if self.hands_over is not None:
            await self.hands_over.wait()
        self.ended.set()


class Nodes:
    """Resources for so many actors, of which those at `lost` numbers are on nodes that go."""

    def __init__(self, free):
        self.free, self.held, self.lost = free, set(), set()
        self.awaited, self.needed, self.asked = set(), 0, None
        self.removes = threading.Event()
        self.removes.set()

    def lacking(self, role, numbers, count):
        new = [number for number in numbers if number not in self.held]
        return [f"there is room for {self.free}"] if len(new) > self.free else []

    def add(self, role, number):
        if number in self.held and number not in self.lost:
            return True
        if not self.free:
            return False
        self.lost.discard(number)
        self.free -= 1
        self.held.add(number)
        return True

    def remove(self, role, number):
        assert self.removes.wait(10)
        if number in self.held and number not in self.lost:
            self.free += 1
        self.held.discard(number)

    def waits(self, role, number):
        return number not in self.held

    def to_give_back(self, role, numbers):
        self.asked = self.asked or numbers
        return numbers[: self.needed]

    def node(self, role, number):
        return "lost" if number in self.lost else "stays"

    def options(self, role, number):
        return {}


class Queue:
    def __init__(self):
        self.sizes, self.over, self.released = [], False, []

    async def release(self, engine_id):
        self.released.append(engine_id)
        if self.over:
            raise QueueClosed("the run is over")

    async def resize(self, size):
        self.sizes.append(size)


class Stage:
    """A fleet, its run folder, and the sizes that broker and broadcaster were told."""

    def __init__(self, folder, monkeypatch, free, *settings, reserved=None):
        monkeypatch.setattr(actor_fleet, "ActorSupervisor", Supervisor)
        monkeypatch.setattr(actor_fleet, "staying_nodes", lambda: {"stays"})
        monkeypatch.setattr(RunLock, "rests", lambda _: False)
        monkeypatch.setattr(scaling, "requests", self.requests)
        self.looks = 0
        text = RECIPE.read_text().replace('cores = ["0"]', "")
        (folder / "recipe.toml").write_text(text)
        config = load_recipe(str(folder / "recipe.toml"), settings)
        made = make_context(folder)
        self.context = SimpleNamespace(
            config=config, console=made.console, directory=made.directory, jsonl=made.jsonl
        )
        self.directory = made.directory
        self.directory.store_recipe(config)
        self.nodes, self.queues = Nodes(free), (Queue(), Queue())
        self.nodes.held = set(range(config.actors.count if reserved is None else reserved))
        self.learner_starts = False
        self.fleet = ActorFleet(
            self.context,
            lambda number, count: number,
            self.nodes,
            self.queues,
            learner_starts=lambda: self.learner_starts,
        )
        self.fleet.look_seconds = 0.01

    @asynccontextmanager
    async def play(self):
        """Run the fleet during the block, and end it after."""
        running = asyncio.create_task(self.fleet.run())
        async with asyncio.timeout(20):
            await self.look(0)
            yield running
            for actor in self.fleet.active:
                actor.ended.set()
            await running

    def numbers(self):
        return sorted(actor.number for actor in self.fleet.active)

    def requests(self, directory):
        self.looks += 1
        return REQUESTS(directory)

    async def look(self, times=3):
        """Wait until the fleet has looked so often, from beginning to end."""
        due = self.looks + times + 1
        await reached(lambda: self.looks >= due)

    async def scale(self, actors):
        return await asyncio.to_thread(scaling.ask, self.directory, actors)

    def recorded(self):
        return self.directory.config().actors


@pytest.fixture
def stage(tmp_path, monkeypatch):
    return partial(Stage, tmp_path, monkeypatch)


async def test_a_run_that_begins_without_resources_for_all_actors_takes_them_when_they_are_free(
    stage,
):
    played = stage(0, "actors.count=3", SHARED, reserved=1)
    assert played.numbers() == [0]
    async with played.play():
        await played.look()
        assert "2 actor(s) wait for free resources" in output(played.context)
        assert played.queues[1].sizes[-1] == 1
        played.nodes.free = 2
        await reached(lambda: played.numbers() == [0, 1, 2])
        await played.look()
        assert played.queues[1].sizes[-1] == 3


async def test_actors_join_and_leave_as_asked_and_the_recipe_keeps_their_number(stage):
    played = stage(5)
    async with played.play() as running:
        answer = await played.scale(3)
        assert (answer["before"], answer["asked"], answer["refused"]) == (1, 3, None)
        assert (played.numbers(), played.nodes.held) == ([0, 1, 2], {0, 1, 2})
        assert all(actor.joins for actor in played.fleet.actors[1:])
        assert played.recorded().count == 3
        await played.scale(1)
        await reached(lambda: played.nodes.held == {0})
        assert played.numbers() == [0]
        assert played.fleet.actors[2].seconds == actor_fleet.PATIENT_SECONDS
        await played.scale(2)
        assert (played.numbers(), len(played.fleet.actors)) == ([0, 1], 3)
        await reached(lambda: played.queues[1].sizes[-1] == 2)
        assert not running.done()
    assert played.recorded().count == 2
    broker, broadcaster = played.queues
    assert [*dict.fromkeys(broadcaster.sizes)][:2] == [3, 1]
    # 2 groups a batch and 4 rollouts, or 2 groups, at once in an engine
    assert set(broker.sizes) <= {2 + held + 1 for held in (4, 8, 12)}
    assert [*played.directory.path.glob("scale-*")] == []


@pytest.mark.parametrize(
    ("settings", "actors", "reason"),
    [
        ([], 4, "there is room for 2"),
        (["actors.min_count=1", "actors.count=2"], 0, "actors.count"),
        (['actors.cores=["0"]'], 2, "actors.cores has 1 entries for actors.count = 2"),
        (["heldout.pinned=true", "actors.count=3"], 1, "set actors.count to 2 or more"),
    ],
)
async def test_a_number_that_cannot_be_is_refused_and_nothing_changes(
    stage, settings, actors, reason
):
    played = stage(2, *settings)
    count = played.recorded().count
    async with played.play():
        with pytest.raises(InputError, match=reason) as refused:
            await played.scale(actors)
        assert f"keeps {count} actor(s)" in str(refused.value)
        assert (played.numbers(), played.nodes.free) == ([*range(count)], 2)
    assert played.recorded().count == count
    [row] = played.directory.rows(scaling.FILE)
    assert (row["before"], row["asked"]) == (count, actors)


async def test_the_actor_that_only_evaluates_stays(stage):
    played = stage(9, "heldout.pinned=true", "actors.count=2")
    async with played.play():
        await played.scale(4)
        await played.scale(2)
        await reached(lambda: played.numbers() == [0, 1])


async def test_the_actor_that_only_evaluates_joins_again_before_all_others(stage):
    played = stage(0, "heldout.pinned=true", "actors.count=2", "actors.max_count=3", SHARED)
    async with played.play():
        resident = played.fleet.actors[0]
        resident.hands_over = asyncio.Event()
        played.nodes.lost, played.nodes.free = {0, 1}, 1
        await reached(lambda: played.numbers() == [])
        await played.look()
        assert played.numbers() == [], "it has not left yet"
        resident.hands_over.set()
        await reached(lambda: played.numbers() == [0])
        played.nodes.free = 2
        await reached(lambda: played.numbers() == [0, 1, 2])


@pytest.mark.parametrize("asked", [4, 2])
async def test_the_actor_that_only_evaluates_comes_back_whatever_number_is_asked_for(stage, asked):
    played = stage(0, "heldout.pinned=true", "actors.count=3", SHARED)
    async with played.play():
        resident = played.fleet.actors[0]
        resident.hands_over = asyncio.Event()
        played.nodes.lost = {0}
        await reached(lambda: played.numbers() == [1, 2])
        played.nodes.free = 9
        await played.scale(asked)
        await played.look()
        assert 0 not in played.numbers()
        resident.hands_over.set()
        await reached(lambda: 0 in played.numbers())
        await played.look()
        assert len(played.numbers()) == asked


async def test_nobody_joins_while_the_learner_may_need_what_is_free(stage):
    played = stage(0, "actors.count=2", SHARED)
    async with played.play():
        played.learner_starts, played.nodes.lost, played.nodes.free = True, {1}, 1
        await reached(lambda: played.numbers() == [0])
        await played.look()
        assert (played.numbers(), played.fleet.lacking) == ([0], 1)
        with pytest.raises(InputError, match="the learner is being restarted"):
            await played.scale(3)
        played.learner_starts = False
        await reached(lambda: played.numbers() == [0, 1])


async def test_actors_give_back_what_others_need_and_join_again(stage):
    played = stage(2, "actors.count=2", "actors.max_count=4", SHARED)
    async with played.play():
        await reached(lambda: played.numbers() == [0, 1, 2, 3])
        played.nodes.needed, played.nodes.awaited = 1, {Role.LEARNER}
        await reached(lambda: played.numbers() == [0, 1, 2])
        await played.look()
        assert played.numbers() == [0, 1, 2], "the others get time to take it"
        with pytest.raises(InputError, match="or reward models are, and may need the resources"):
            await played.scale(5)
        played.nodes.awaited = set()
        await reached(lambda: played.numbers() == [0, 1, 2, 3])
    assert played.nodes.asked == [3, 2], "the last ones first"


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ((), [0, 1]),
        (("actors.min_count=1",), [0]),
        (("actors.min_count=1", "heldout.pinned=true"), [0, 1]),
    ],
)
async def test_as_many_actors_as_the_run_needs_give_nothing_back(
    stage, monkeypatch, settings, left
):
    monkeypatch.setattr(actor_fleet, "GIVE_SECONDS", 0.0)
    settings = ("actors.count=2", "actors.max_count=4", SHARED, *settings)
    played = stage(2, *settings)
    async with played.play():
        await reached(lambda: played.numbers() == [0, 1, 2, 3])
        played.nodes.needed, played.nodes.awaited = 4, {Role.LEARNER}
        await reached(lambda: played.numbers() == left)
        await played.look()
        assert played.numbers() == left


async def test_actors_leave_nodes_that_go_and_join_again_where_there_is_room(stage):
    played = stage(0, "actors.count=2", SHARED)
    async with played.play() as running:
        played.nodes.lost = {1}
        await reached(lambda: played.numbers() == [0])
        leaving = played.fleet.actors[1]
        await reached(lambda: leaving.seconds == actor_fleet.HURRY_SECONDS)
        await reached(lambda: "1 actor(s) wait for free resources" in output(played.context))
        played.nodes.free = 1
        await reached(lambda: played.numbers() == [0, 1])
        played.nodes.lost = {0, 1}
        await reached(lambda: played.numbers() == [])
        assert not running.done(), "it waits for nodes"
        played.nodes.free = 2
        await reached(lambda: played.numbers() == [0, 1])
    assert output(played.context).count("wait for free resources") <= 4


async def test_a_run_takes_actors_as_nodes_join_until_a_number_is_asked_for(stage):
    played = stage(0, "actors.max_count=3", SHARED)
    async with played.play():
        played.nodes.free = 1
        await reached(lambda: played.numbers() == [0, 1])
        played.nodes.free = 5
        await reached(lambda: played.numbers() == [0, 1, 2])
        assert {actor.counts() for actor in played.fleet.actors} == {(3, 1)}, "they are not needed"
        played.nodes.lost = {2}
        played.nodes.free = 0
        await reached(lambda: played.numbers() == [0, 1])
        assert "wait for free resources" not in output(played.context)
        await played.scale(1)
        played.nodes.free = 5
        await played.look()
        assert played.numbers() == [0]
    assert (played.recorded().count, played.recorded().max_count) == (1, None)


async def test_an_actor_that_is_given_up_is_not_missed_before_another_number_is_asked_for(stage):
    played = stage(5, "actors.count=3", "actors.min_count=1", SHARED)
    actors = played.fleet.actors

    async def give_up():
        actors[1].given_up = True
        actors[1].ended.set()
        await reached(lambda: played.numbers() == [0, 2])
        await played.look()
        assert played.numbers() == [0, 2]

    async with played.play():
        await give_up()
        await played.scale(3)
        assert played.numbers() == [0, 1, 2]
        await give_up()
        await played.scale(2)
        assert played.numbers() == [0, 2]
        played.nodes.free, played.nodes.lost = 0, {2}
        await reached(lambda: played.numbers() == [0])
        played.nodes.free = 1
        await reached(lambda: len(played.numbers()) == 2)


async def test_a_number_above_the_limit_of_growth_ends_the_growth_too(stage):
    played = stage(9, "actors.max_count=3", SHARED)
    async with played.play():
        assert (await played.scale(5))["refused"] is None
        await reached(lambda: played.numbers() == [0, 1, 2, 3, 4])


async def test_a_number_is_free_once_what_it_had_is_given_back(stage):
    played = stage(0, "actors.count=2", SHARED)
    async with played.play():
        played.nodes.removes.clear()
        played.nodes.lost = {1}
        await reached(lambda: played.numbers() == [0])
        played.nodes.free = 1
        await reached(lambda: played.numbers() == [0, 2])
        played.nodes.removes.set()
        await reached(lambda: played.nodes.held == {0, 2})
        played.nodes.free = 1
        await played.scale(3)
        assert (played.numbers(), played.nodes.held) == ([0, 1, 2], {0, 1, 2})


async def test_a_run_whose_last_actor_waits_for_a_node_ends_when_it_is_over(stage):
    played = stage(0, SHARED)
    async with played.play() as running:
        played.nodes.lost = {0}
        await reached(lambda: played.numbers() == [])
        await played.look()
        assert not running.done()
        played.queues[0].over = True
        await running


async def test_an_actor_that_still_starts_does_not_keep_a_run_that_is_over(stage):
    played = stage(5, "actors.count=2")
    async with played.play() as running:
        first, second = played.fleet.actors
        second.health = None
        played.queues[0].over = True
        first.ended.set()
        await running
        assert second.ended.is_set()
        assert {*played.queues[0].released} == {"engine-1"}, "it has no leases to lose"


async def test_the_error_of_an_actor_ends_the_fleet(stage):
    played = stage(5, "actors.count=2")
    with pytest.raises(RunFailed, match="too often"):  # noqa: PT012
        async with played.play():
            played.fleet.actors[1].fails = RunFailed("it died too often")
            played.fleet.actors[1].ended.set()


def test_a_request_that_nobody_answers_is_withdrawn(tmp_path, monkeypatch):
    monkeypatch.setattr(RunLock, "rests", lambda _: False)
    directory = RunDirectory(tmp_path)
    with pytest.raises(InputError, match=r"has not answered within 0\.01 s, and the request is"):
        scaling.ask(directory, 3, seconds=0.01)
    assert [*tmp_path.iterdir()] == []


def test_requests_that_are_damaged_or_of_killed_commands_are_dropped(tmp_path):
    directory, request = RunDirectory(tmp_path), tmp_path / "scale-1.json"
    request.write_text(json.dumps({"actors": 3}))
    (tmp_path / "scale-0.json").mkdir()  # cannot be read, and is skipped
    (tmp_path / "scale-2.json").write_text("{")
    assert scaling.requests(directory) == [(request, 3)]
    asked_at = request.stat().st_mtime - scaling.ANSWER_SECONDS - 1
    os.utime(request, (asked_at, asked_at))
    assert scaling.requests(directory) == []
    assert [file.name for file in tmp_path.iterdir()] == ["scale-0.json"]
