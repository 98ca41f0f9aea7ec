"""Engines and brokers of a few lines, for what the real ones cannot be made to do."""

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial

from actors.config import ActorsConfig
from actors.engines.protocol import EngineSpec, Generation, SamplingParameters
from actors.engines.scripted import ScriptedEngine
from actors.environments.load_environment import load_environment
from actors.rewards.pool import RewardPool
from actors.rewards.rewards import load_rewards
from actors.rollout.actor_statistics import ActorStatistics
from actors.rollout.chat_rendering import Renderer
from actors.rollout.episode import EpisodeRunner
from actors.rollout.rollout_worker import RolloutWorker
from queues.broker.broker import Broker
from queues.config import QueuesConfig, RunSpec
from queues.records import FinishReason, Lease, Prompt, Purpose, PutStatus, Rollout
from tests.actors.characters import character_tokenizer
from weight_sync.config import WeightSyncConfig

EOS = 1
POOL = RewardPool()
"""For all tests that call rewards of a user's and test something else."""


def lease(
    group="g1", *, attempt=1, size=2, start=3, temperature=None, greedy_baseline=False, **prompt
) -> Lease:
    values = {"prompt_id": "sums/0/1", "text": "3+4=", "answer": "7", **prompt}
    return Lease(
        group_id=group,
        attempt=attempt,
        prompt=Prompt(**values),
        group_size=size,
        purpose=Purpose.TRAIN,
        temperature=temperature,
        start_version=start,
        deadline_version=start + 2,
        greedy_baseline=greedy_baseline,
    )


def engine_spec(model_path="model", *, version=None, weight_sync=None, **settings) -> EngineSpec:
    """Return the description of an engine with these settings of `ActorsConfig`."""
    return EngineSpec(
        index=0,
        config=ActorsConfig(**settings),
        weight_sync=weight_sync or WeightSyncConfig(),
        model_path=str(model_path),
        seed=0,
        initial_version=version,
    )


def rollout(of: Lease, index: int, *, version: int = 3) -> Rollout:
    now = datetime.now(UTC)
    return Rollout(
        sample_index=index,
        token_ids=[5, 6, 7],
        prompt_length=1,
        loss_mask=[False, True, True],
        behavior_logprobs=[0.0, -0.5, -0.25],
        versions=[-1, version, version],
        reward=1.0,
        reward_parts={"exact_match": 1.0},
        finish_reason=FinishReason.STOP,
        turns=1,
        environment="single_turn",
        engine_id="engine-0",
        created_at=now,
        finished_at=now,
    )


class Recited:
    """An engine that says its lines in turn, or raises them, and remembers what it was asked.

    A line with a reason ends for that, in place of the end-of-sequence token.
    """

    def __init__(self, *lines, version=3):
        self.tokenizer = character_tokenizer()
        self.lines, self.version, self.requests = list(lines), version, []

    async def generate(self, request_id, prompt_ids, sampling, *, cache_salt=None):
        self.requests.append((request_id, list(prompt_ids), sampling, cache_salt))
        line = self.lines.pop(0)
        if isinstance(line, Exception):
            raise line
        text, reason = line if isinstance(line, tuple) else (line, FinishReason.STOP)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        if reason is FinishReason.STOP:
            ids = [*ids, EOS]
        if len(ids) > sampling.max_new_tokens:
            ids, reason = ids[: sampling.max_new_tokens], FinishReason.LENGTH
        return Generation(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            versions=[self.version] * len(ids),
            finish_reason=reason,
            cache_salt=str(self.version) if cache_salt is None else cache_salt,
        )


def episodes(
    engine,
    sampling,
    *,
    environment="single_turn",
    options=None,
    rewards=("last_answer",),
    heldout_rewards=None,
    renderer=None,
    new_environment=None,
    max_model_len=200,
    gold=None,
    **settings,
):
    config = ActorsConfig(
        environment=environment,
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        **{"rollout_timeout_seconds": 5.0, "environment_timeout_seconds": 5.0, **settings},
    )
    return EpisodeRunner(
        engine_id="engine-0",
        engine=engine,
        renderer=renderer or Renderer(character_tokenizer()),
        config=config,
        new_environment=new_environment or load_environment(environment, options),
        rewards=load_rewards(rewards, pool=POOL),
        heldout_rewards=load_rewards(heldout_rewards or rewards, pool=POOL),
        max_model_len=max_model_len,
        gold=gold,
    )


SAMPLING = SamplingParameters(temperature=0.7, max_new_tokens=40, top_p=0.9, top_k=5)


def play(engine, *, of=None, sampling=SAMPLING, saved=None, **settings) -> Rollout:
    """Return rollout 1 of a group, as `episodes` plays it with these settings."""
    return asyncio.run(episodes(engine, sampling, **settings).run(of or lease(), 1, saved))


def ids(text):
    """Return the ids of a text's characters."""
    return character_tokenizer().encode(text, add_special_tokens=False)


def sums(count, name="sums"):
    return [
        Prompt(prompt_id=f"{name}/0/{i}", text=f"{i}+1=", answer=str(i + 1)) for i in range(count)
    ]


def open_broker(folder, *, batch=1, size=2, steps=3, staleness=2, **spec) -> Broker:
    return Broker(
        folder,
        config=QueuesConfig(max_staleness=staleness, synchronous="normal"),
        spec=RunSpec(groups_per_batch=batch, group_size=size, steps=steps, **spec),
    )


def make_worker(work, run, *, name="engine-0", slots=4, size=2, heartbeat=60.0, **options):
    """Return a worker whose engine `run` stands for; it is never interrupted by default."""
    return RolloutWorker(
        ActorStatistics(name),
        work,
        run,
        max_concurrent_rollouts=slots,
        largest_group=size,
        heartbeat_seconds=heartbeat,
        **{"interrupt": lambda: asyncio.sleep(0), **options},
    )


async def scripted_worker(
    broker, name="engine-0", *, run=None, version=0, slots=4, size=2, purpose=None, **engine
):
    """Return a scripted engine that has started, and its worker, whose episodes `run` may wrap."""
    options = {"median_length": 12, "initial_version": version, **engine}
    scripted = ScriptedEngine({}, vocabulary=40, **options)
    await scripted.start()
    runner = episodes(scripted, SamplingParameters(temperature=1.0, max_new_tokens=30))
    episode = partial(run, runner.run) if run else runner.run
    keywords = {"interrupt": scripted.interrupt, "purpose": purpose, "slots": slots, "size": size}
    return scripted, make_worker(broker, episode, name=name, **keywords)


class Desk:
    """A broker that hands out given leases and writes down every call."""

    def __init__(self, *leases):
        self.leases, self.events = list(leases), []
        self.changed = asyncio.Condition()
        self.lost = []
        self.errors = {}
        """Raised by the method of that name."""

    async def note(self, *event):
        async with self.changed:
            self.events.append(event)
            self.changed.notify_all()
        if error := self.errors.get(event[0]):
            raise error

    async def until(self, happened):
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(lambda: happened(self.events))

    def of(self, kind):
        return [event[1:] for event in self.events if event[0] == kind]

    async def serving(self, engine_id, version):
        await self.note("serving", version)

    async def lease(self, engine_id, limit, timeout, purpose=None):
        await self.note("lease", limit)
        granted = []
        while self.leases and self.leases[0].capacity <= limit:
            limit -= self.leases[0].capacity
            granted.append(self.leases.pop(0))
        if not granted:
            await asyncio.sleep(0.001)  # a long poll that found nothing
        return granted

    async def heartbeat(self, engine_id, held):
        await self.note("heartbeat", sorted(held))
        return self.lost

    async def put(self, engine_id, payload):
        await self.note("put", payload)
        return PutStatus.ACCEPTED

    async def save(self, engine_id, payload):
        await self.note("save", payload)

    async def fail(self, engine_id, group_id, attempt, *, reason, error):
        await self.note("fail", group_id, attempt, reason, error)


@asynccontextmanager
async def working(worker):
    """Run a worker and stop it at the end; it has to leave in time."""
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    yield task
    stop.set()
    async with asyncio.timeout(10):
        await task
