"""A whole run in one event loop: broker, two workers with scripted engines, feeder and learner.

    lockstep   everything that may be generated is generated and put ─▶ one batch is trained ─▶
               every engine takes the new version ─▶ again
    time       virtual: it stands while anyone can go on, and then jumps to the next moment that
               someone waits for

So the outcome is a function of the prompts alone. A crash is a copy of the run's folder, taken in
the middle of a commit or between two; a world on such a copy resumes the run. A death is that of
the learner alone, at one of its steps: another takes its place while the rest goes on.

`on_overdue` is `wait`. With the other policies time decides what a batch is made of, and a crash
costs time; saved tokens of an overdue group, for one, do not fit any more and are sampled afresh.
So a run that drops, masks or trains stragglers need not equal the uninterrupted one.
"""

import asyncio
import selectors
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch

from actors.config import ActorsConfig
from actors.engines.scripted import ScriptedEngine
from actors.environments.load_environment import load_environment
from actors.rewards.rewards import Rewards, call_here
from actors.rollout.actor_statistics import ActorStatistics
from actors.rollout.chat_rendering import Renderer
from actors.rollout.episode import EpisodeRunner
from actors.rollout.rollout_worker import RolloutWorker
from learner.diagnostics.batch_report import BatchReport
from learner.engine import checkpoint
from learner.engine.tensor_parts import Part, PartReader, write_parts
from learner.learner import Learner
from queues.broker.broker import Broker
from queues.config import QueuesConfig, RunSpec
from queues.errors import QueueClosed
from queues.readers.checkpoints import newest_checkpoint
from queues.readers.recorded_batches import read_batch
from queues.records import Prompt
from queues.schema import decode
from queues.storage.group_commit import GroupCommit
from tests.actors.characters import CHARACTERS, character_tokenizer
from tests.weight_sync.checksum import checksum
from weight_sync.manifest import Bucket, Manifest, TensorSpec

STEPS, GROUPS, SIZE, STALENESS = 7, 3, 2, 2
QUIET_SECONDS = 3.0
"""Virtual seconds without a result after which no more is generated at this version."""
HEARTBEAT = 0.1
"""Virtual seconds between heartbeats, short enough to save rollouts before their group ends."""
WRITER_SECONDS = 20.0
TOKENIZER = character_tokenizer()


class Clock:
    """Virtual time in seconds, monotonic and since the epoch."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def epoch(self):
        return 1.8e9 + self.now


class Jumping(selectors.DefaultSelector):
    """A selector that advances the clock by the timeout instead of waiting."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def select(self, timeout=None):
        assert timeout is not None, "deadlock: every task waits for another"
        self.clock.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock that runs executor calls at once."""

    def __init__(self, clock):
        super().__init__(Jumping(clock))
        self.clock = clock
        self.answered = threading.Event()
        """Set when another thread has scheduled a callback."""

    def time(self):
        return self.clock.now

    def call_soon_threadsafe(self, *args, **options):
        handle = super().call_soon_threadsafe(*args, **options)
        self.answered.set()
        return handle

    def run_in_executor(self, executor, function, *args):
        done = self.create_future()
        try:
            done.set_result(function(*args))
        except Exception as error:  # noqa: BLE001  (raised where it is awaited)
            done.set_exception(error)
        return done


class Crashes:
    """Copies of the folder of a run, taken at numbered moments before and after commits."""

    def __init__(self, folder, moments=()):
        self.folder, self.moments, self.count = folder, set(moments), 0
        self.copies = []

    def pass_moment(self):
        self.count += 1
        if self.count in self.moments:
            copy = self.folder.with_name(f"{self.folder.name}-{self.count}")
            shutil.copytree(self.folder, copy)
            self.copies.append(copy)


def lockstep_writer(crashes):
    """Return a `Writer` that commits each change before any other task of the loop runs."""

    class LockstepWriter(GroupCommit):
        def submit(self, change):
            answered = asyncio.get_running_loop().answered
            answered.clear()

            def changed():
                result = change()
                crashes.pass_moment()  # written, not committed
                return result

            future = super().submit(changed)
            assert answered.wait(WRITER_SECONDS), "the writer's thread has not answered"
            crashes.pass_moment()  # committed, and nobody knows yet
            return future

    return LockstepWriter


class BanditState:
    """Weights and momentum of a distribution over tokens, as a checkpoint has them."""

    rank, ranks = 0, 1

    def __init__(self):
        self.weights = torch.zeros(len(TOKENIZER))
        self.momentum = torch.zeros(len(TOKENIZER))

    def capture(self):
        parts = [Part("weights", 0, self.weights), Part("momentum", 0, self.momentum)]
        return lambda folder: write_parts(folder / "optimizer", parts, rank=0, ranks=1)

    def load(self, folder):
        reader = PartReader(folder / "optimizer")
        self.weights = reader.read("weights", 0, len(TOKENIZER))
        self.momentum = reader.read("momentum", 0, len(TOKENIZER))

    def sum_over_ranks(self, values):
        return values


class Died(Exception):
    """The learner is gone."""


class Bandit:
    """A trainer of one distribution over tokens, by REINFORCE with momentum, in a world.

    It dies at the steps that its world says.
    """

    def __init__(self, world, folder, on_publish, checksums):
        self.world, self.root, self.on_publish = world, folder / "checkpoints", on_publish
        self.state = BanditState()
        self.checksums = checksums

    async def update(self, payloads, version):
        state = self.state
        state.weights.requires_grad_(True)
        logprobs, loss, tokens = torch.log_softmax(state.weights, 0), torch.zeros(()), 0
        for group in map(decode, payloads):
            mean = sum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)
            for rollout in group.rollouts:
                sampled = rollout.token_ids[rollout.prompt_length :]
                loss = loss - (rollout.reward - mean) * logprobs[list(sampled)].mean()
                tokens += len(sampled)
        (gradient,) = torch.autograd.grad(loss, state.weights)
        state.momentum = 0.9 * state.momentum + gradient
        state.weights = state.weights.detach() - 0.1 * state.momentum
        figures = {"rollouts_trained": len(payloads) * SIZE, "tokens_trained": tokens}
        self.world.pass_step()
        return BatchReport.from_dict({"loss": float(loss.detach()), **figures})

    async def publish(self, version):
        digest = checksum([("weights", self.state.weights)])
        assert self.checksums.setdefault(version, digest) == digest, (
            "a version is one set of weights"
        )
        await self.on_publish(version)
        self.world.pass_step()
        return asyncio.sleep(0, digest)

    async def save(self, version, *, cursor, totals, weights_checksum):
        write = checkpoint.capture(self.state)
        state = checkpoint.State(
            version=version, saved_at=time.time(), optimizer_steps=version, ranks=1, zero_stage=0,
            dtype="float32", cursor=cursor, totals=dict(totals), weights_checksum=weights_checksum,
        )  # fmt: skip

        async def written():
            write(checkpoint.prepare(self.root, version))
            return f"checkpoints/{checkpoint.finish(self.root, state).name}"

        self.world.pass_step()
        return written()

    async def prune(self, version):
        checkpoint.prune(self.root, newest=version, keep=2, keep_seconds=0.0)


async def score(prompt, completion, answer, metadata):
    """Return the parity of the text, which ties half of the groups of two."""
    return float(sum(map(ord, completion)) % 2)


def weights_of_nothing(version):
    """Return staged weights for an engine without a model."""
    tensor = TensorSpec(name="w", dtype="float32", shape=(1,), bucket=0, offset=0)
    bucket = Bucket(nbytes=4, checksum="0" * 32, location="nowhere")
    manifest = Manifest(version=version, tensors=(tensor,), buckets=(bucket,), created_at=0.0)
    return SimpleNamespace(manifest=manifest, tensors=lambda: [("w", torch.zeros(1))])


class World:
    """One session of a run: begins or resumes it in a folder, and trains it to its end.

    `start` finds version and folder of the checkpoint to go on from; `options` are the broker's.
    The learner dies at the steps `deaths`, counted from 1.
    """

    def __init__(
        self, folder, start=newest_checkpoint, *, deaths=(), segment_bytes=2**28, **options
    ):
        self.folder, self.stop, self.start = folder, asyncio.Event(), start
        self.deaths, self.learner_steps, self.epoch, self.served = {*deaths}, 0, 0, -1
        self.broker = Broker(
            folder,
            config=QueuesConfig(
                max_staleness=STALENESS, filter_tied=True, synchronous="normal",
                commit_interval_seconds=0.0, on_overdue="wait", segment_bytes=segment_bytes,
            ),
            spec=RunSpec(groups_per_batch=GROUPS, group_size=SIZE, steps=STEPS), **options,
        )  # fmt: skip
        self.workers = [self.make_worker(index) for index in range(2)]
        self.checksums = {}

    def make_worker(self, index):
        engine = ScriptedEngine(
            {"w": (1,)}, vocabulary=len(TOKENIZER), tokens_per_second=50.0 * (index + 1),
            median_length=12.0, length_sigma=0.6,
        )  # fmt: skip
        rewards = Rewards({"parity": partial(call_here, "parity", score, timeout=9.0)}, {})
        episodes = EpisodeRunner(
            engine_id=f"engine-{index}", engine=engine, renderer=Renderer(TOKENIZER),
            config=ActorsConfig(max_new_tokens=40),
            new_environment=load_environment("single_turn"),
            rewards=rewards, heldout_rewards=rewards, max_model_len=200,
        )  # fmt: skip

        def first_attempt(lease, index, saved):
            """Run every attempt as the first: the tokens depend on the name of the request."""
            return episodes.run(replace(lease, attempt=1), index, saved)

        worker = RolloutWorker(
            ActorStatistics(f"engine-{index}"), self.broker, first_attempt,
            interrupt=engine.interrupt, max_concurrent_rollouts=2 * SIZE, largest_group=SIZE,
            heartbeat_seconds=HEARTBEAT,
        )  # fmt: skip
        return engine, worker

    async def run(self):
        """Train to the last step and return the checksums of the versions published."""
        for engine, _ in self.workers:
            await engine.start()
        await self.broker.evaluate("held-out", prompts(3, "h"), temperature=0.0, min_version=3)
        async with asyncio.TaskGroup() as tasks:
            for _, worker in self.workers:
                tasks.create_task(worker.run(self.stop))
            tasks.create_task(self.feed())
            await self.learn()
            assert await self.broker.evaluation("held-out", 60.0) is not None
        await self.broker.close()
        return self.checksums

    async def learn(self):
        """Train to the last step, by another learner whenever one dies."""
        while True:
            trainer = Bandit(self, self.folder, self.serve_if_newest, self.checksums)
            start = self.start(self.folder)
            saved = start and checkpoint.load(trainer.state, start[1])
            learner = Learner(
                trainer, self, steps=STEPS, checkpoint_every=2,
                start_version=start[0] if start else 0,
                start_checksum=saved.weights_checksum if saved else None,
            )  # fmt: skip
            try:
                return await learner.run()
            except Died:
                self.epoch += 1
                await self.broker.begin_learner(self.epoch)

    def pass_step(self):
        """Count a step of the learner, which dies at some."""
        self.learner_steps += 1
        if self.learner_steps in self.deaths:
            raise Died

    async def feed(self):
        while True:
            try:
                wanted = await self.broker.prompts_wanted(10.0)
            except QueueClosed:
                return
            issued = int(await self.broker.cursor() or 0)
            if wanted:
                await self.broker.issue(prompts(wanted, "t", issued), cursor=str(issued + wanted))

    # --- the learner's queue, which keeps everyone in step

    async def take(self, version, timeout):
        status = await self.broker.status()
        if version == status.version and not status.depth["taken"]:
            await self.quiet()
        batch = await self.broker.take(version, timeout, epoch=self.epoch)
        self.pass_step()
        return batch

    async def ack(self, version, statistics):
        is_new = await self.broker.ack(version, statistics, epoch=self.epoch)
        self.pass_step()
        await self.serve_if_newest(version + 1)
        return is_new

    async def commit_checkpoint(self, version, path):
        await self.broker.commit_checkpoint(version, path, epoch=self.epoch)
        self.pass_step()

    async def cursor(self):
        return await self.broker.cursor()

    async def quiet(self):
        """Wait until nothing is leased and no result has come for `QUIET_SECONDS`."""
        seen, leased = None, 1
        while leased or seen != (status := await self.broker.status()).accepted:
            status = await self.broker.status()
            seen, leased = status.accepted, status.depth["leased"]
            await asyncio.sleep(QUIET_SECONDS)

    async def serve_if_newest(self, version):
        """Load a version into every engine, unless they have it or the run has a newer one."""
        if (await self.broker.status()).version == version > self.served:
            self.served = version
            for engine, worker in self.workers:
                await engine.pause()
                await engine.load(weights_of_nothing(version), version)
                await engine.resume()
                await worker.on_version(version)


def prompts(count, kind, first=0):
    """Return prompts with consecutive indices."""
    return [
        Prompt(prompt_id=f"{kind}/0/{index}", text=CHARACTERS[index % 26] + str(index), answer="1")
        for index in range(first, first + count)
    ]


@contextmanager
def lockstep(monkeypatch, crashes):
    """Patch clocks and writer in the block; yields a factory of event loops."""
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", clock.monotonic)
        patch.setattr(time, "time", clock.epoch)
        patch.setattr("queues.broker.commit_pipeline.GroupCommit", lockstep_writer(crashes))
        yield lambda: VirtualLoop(clock)


def play(monkeypatch, folder, moments=(), **options):
    """Play one session in a folder; returns checksums by version, and the crashes."""
    crashes = Crashes(folder, moments)

    async def main():
        return await World(folder, **options).run()

    with lockstep(monkeypatch, crashes) as factory, asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main()), crashes


def outcome(folder):
    """Return every trained batch of a run: its groups, in order, with all that was sampled."""
    return [recorded_batch(folder, version) for version in range(STEPS)]


def recorded_batch(folder, version):
    """Return the groups of a trained batch, in order, with all that was sampled."""
    groups = [decode(payload) for payload in read_batch(folder, version)]
    return [
        (
            group.group_id, group.prompt_id,
            [
                (
                    list(r.token_ids), list(r.versions), list(r.behavior_logprobs),
                    list(r.loss_mask), r.reward, r.turn_rewards, r.baseline_reward,
                )
                for r in group.rollouts
            ],
        )
        for group in groups
    ]  # fmt: skip
