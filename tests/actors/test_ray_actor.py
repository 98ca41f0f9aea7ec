"""The actor as a process: weights come in, groups go out, and it leaves when the run is over."""

import asyncio
import contextlib
import json

import pytest
import torch
from characters import character_tokenizer
from fakes import Desk, lease
from safetensors.torch import save_file

from actors.config import ActorsConfig
from actors.engines.model_folder import context_length, load_tokenizer, weight_shapes
from actors.errors import EngineDied
from actors.ray_actor import ActorSpec, RolloutActor, create_actor
from headway.errors import HeadwayError, InputError
from queues.errors import QueueClosed
from weight_sync.broadcaster import Broadcaster
from weight_sync.config import WeightSyncConfig
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.transports.shared_memory import SharedMemoryTransport

CONTEXT = 64


@pytest.fixture
def folder(tmp_path):
    """Write a model folder for a scripted engine."""
    path = tmp_path / "model"
    character_tokenizer().save_pretrained(path)
    save_file({"layer.weight": torch.ones(3, 2), "lm_head.weight": torch.ones(4)},
              path / "model.safetensors")  # fmt: skip
    config = {
        "model_type": "qwen3", "max_position_embeddings": CONTEXT, "tie_word_embeddings": True,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_model_folder_tells_its_context_and_the_weights_that_are_published(folder):
    assert context_length(folder) == CONTEXT
    assert weight_shapes(folder) == {"layer.weight": (3, 2)}
    assert load_tokenizer(folder).eos_token == "<eos>"


@pytest.mark.parametrize("read", [context_length, load_tokenizer, weight_shapes])
def test_a_folder_that_is_no_model_is_an_input_error(tmp_path, monkeypatch, read):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="model"):
        read(str(tmp_path))


def spec(folder, broker, broadcaster, *, size=2, heartbeat=60.0, **settings):
    return ActorSpec(
        index=0,
        config=ActorsConfig(
            **{"engine": "scripted", "reward": ["user_module:length"], "cpus": 0, **settings}
        ),
        weight_sync=WeightSyncConfig(),
        model_path=str(folder),
        seed=0,
        group_size=size,
        heartbeat_seconds=heartbeat,
        broker=broker,
        broadcaster=broadcaster,
    )


def build(folder, work, broadcaster, *, changes=None, **scripted):
    """Make an actor in this process, without Ray."""
    settings = {"scripted_options": scripted, **(changes or {})}
    return RolloutActor(spec(folder, work, broadcaster, **settings))


@contextlib.contextmanager
def published(broadcaster):
    """Version 0 of the weights, announced and readable."""
    loop = asyncio.get_running_loop()

    def announce(manifest):
        asyncio.run_coroutine_threadsafe(broadcaster.announce(manifest), loop)

    with StagedPublisher(SharedMemoryTransport(), announce) as publisher:
        publisher.publish(0, [("layer.weight", torch.ones(3, 2))])
        yield


async def test_an_actor_whose_broker_leaves_while_a_version_arrives_ends_without_an_error(folder):
    desk, broadcaster = Desk(), Broadcaster(1.0, 1)
    desk.errors["serving"] = QueueClosed("the run is over")
    actor = build(folder, desk, broadcaster)
    await actor.start()
    with published(broadcaster):
        await asyncio.wait_for(actor.run(), 10)
    assert desk.events == [("serving", 0)]


async def test_an_actor_whose_engine_dies_ends_with_that_error(folder):
    desk, broadcaster = Desk(lease("g1")), Broadcaster(1.0, 1)
    actor = build(folder, desk, broadcaster, tokens_per_second=10.0)
    await actor.start()
    with published(broadcaster):
        running = asyncio.create_task(actor.run())
        await desk.until(lambda events: len(desk.of("lease")) > 1)
        await actor.parts.engine.close()
        with pytest.raises(EngineDied):
            await asyncio.wait_for(running, 10)
    assert desk.of("fail") == desk.of("put") == []


async def test_an_actor_leaves_when_it_is_told_to_and_can_still_be_asked(folder):
    desk, broadcaster = Desk(lease("g1")), Broadcaster(1.0, 1)
    actor = build(folder, desk, broadcaster, tokens_per_second=10.0)
    await actor.start()
    with published(broadcaster):
        running = asyncio.create_task(actor.run())
        await desk.until(lambda events: len(desk.of("lease")) > 1)
        await actor.stop(5.0)
        await asyncio.wait_for(running, 10)
    statistics = await actor.statistics()
    assert statistics["version"] == 0
    assert statistics["groups"] == {"aborted": 1}
    assert statistics["running_rollouts"] == 0


MISTAKES = {
    "no such option": ({"scripted_options": {"speed": 3}}, "speed"),
    "no room for a group": ({"max_concurrent_rollouts": 1}, "max_concurrent_rollouts = 1"),
    "no environment": ({"environment": "user_module:World"}, "has no 'World'"),
    "no chat template": ({"chat_template": True}, "no chat template"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_what_the_user_got_wrong_is_said_by_start_as_an_input_error(folder, mistake):
    changes, message = MISTAKES[mistake]
    actor = build(folder, Desk(), None, changes=changes)
    with pytest.raises(InputError, match=message):
        await actor.start()


async def test_an_actor_can_be_asked_and_stopped_before_it_has_started(folder):
    desk = Desk(lease("g1"))
    actor = build(folder, desk, Broadcaster(1.0, 1))
    with pytest.raises(HeadwayError, match="must be started before"):
        await actor.run()
    before = await actor.statistics()
    await actor.stop(5.0)
    await actor.start()
    await asyncio.wait_for(actor.run(), 10)
    assert desk.events == []
    assert before["version"] is None
    assert before.keys() == (await actor.statistics()).keys()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
async def test_an_input_error_crosses_the_process_boundary_as_such(tmp_path):
    actor = create_actor(
        spec(tmp_path, None, None, reward=["exact_match"]),
        runtime_env={"env_vars": {"HF_HUB_OFFLINE": "1"}},
    )

    async with asyncio.timeout(120):
        before = await actor.statistics.remote()
        with pytest.raises(InputError, match="has no tokenizer"):
            await actor.start.remote()
        await actor.stop.remote(5.0)
    after = await actor.statistics.remote()
    assert before["engine_id"] == after["engine_id"] == "engine-0"
