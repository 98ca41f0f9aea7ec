"""One run, wired together: read this first.

    feeder ─issue▶ broker ─lease▶ actors ─put▶ broker ─take▶ learner ─publish▶ broadcaster ─▶ actors
      ▲              │                                         │ack
      └────wanted────┘◀────────────────────────────────────────┘

Every box but the feeder is a Ray actor. This process creates them, feeds prompts, follows what
happens, and ends everything when the learner has trained its last batch and the last score is in,
when one of them fails, or when the user says so. A rollout actor that dies is made again
(`supervisor`), and so is the process of the reward models, where there are any
(`reward_model_supervisor`). Nothing of the loop itself lives here: how far actors run ahead is
decided by `queues.admission`, what a batch teaches by `learner`, how weights travel by
`weight_sync`.
"""

import asyncio
import os
import time
from collections.abc import Awaitable
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.ray_actor import create_actor
from actors.ray_reward_model import create_reward_model
from deploy import heldout
from deploy.config import RunConfig
from deploy.cores import actors_on_cores
from deploy.errors import RunFailed
from deploy.exporter import Exporter, is_loopback, show_process
from deploy.inputs import Inputs
from deploy.interrupt import Interrupts
from deploy.metrics import RunMetrics
from deploy.placement import options
from deploy.progress import Screen
from deploy.recorder import Recorder
from deploy.reward_model_supervisor import RewardModelSupervisor
from deploy.rows import Rows
from deploy.run_directory import RunDirectory
from deploy.stacks import is_placed
from deploy.summary import Record
from deploy.supervisor import Supervisor
from deploy.tasks import all_or_first_error, named
from deploy.trackers import Trackers
from deploy.watchdog import Watchdog
from learner.cores import cores_of
from learner.ray_group import create_learner
from queues.accounts import newest_checkpoint
from queues.errors import QueueClosed, QueuesError
from queues.ray_broker import create_broker
from queues.records import Purpose
from weight_sync.errors import WeightSyncError
from weight_sync.ray_broadcaster import create_broadcaster

CLOSE_SECONDS = 2.0
"""What an interrupted run gets to ask for its last figures, and any run to close its books; both
can be had from its folder as well."""


class Run:
    """The processes of one run and the tasks that keep them going."""

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        directory: RunDirectory,
        screen: Screen,
        record: Record,
    ) -> None:
        self.config, self.inputs, self.directory = config, inputs, directory
        self.screen, self.record = screen, record
        self.rows = Rows(directory)
        self.checkpoint = newest_checkpoint(directory.path) if directory.ledger.exists() else None
        self.learning: asyncio.Task[None] | None = None
        self.broker = create_broker(
            directory.path,
            config=config.flow,
            groups_per_batch=config.prompts.groups_per_batch,
            group_size=config.prompts.group_size,
            steps=config.steps,
            greedy_baseline=config.actors.greedy_baseline,
            pass_rate_cap=config.prompts.pass_rate_cap,
            pass_threshold=config.prompts.pass_threshold,
        )
        self.broadcaster = create_broadcaster(
            config.weight_sync.update_fraction,
            config.actors.count,
            permit_seconds=config.weight_sync.timeout_seconds,
        )
        self.node = ray.get_runtime_context().get_node_id()
        """Ray's id of this process' node."""
        here = NodeAffinitySchedulingStrategy(self.node, soft=False)
        self.judges = self.make_judges(here)
        self.learner = create_learner(
            config.objective, **options(config.deploy.placement.learner, here)
        )
        self.actors = self.make_actors(here)
        self.shown: list[tuple[str, str]] = []
        """Processes that live as long as the run, and where their metrics are."""
        self.watchdog = self.watch()
        self.exporter = self.export() if config.deploy.metrics else None
        self.trackers = Trackers(
            config.deploy.trackers,
            directory.path,
            config.name,
            config.model_dump(mode="json"),
            screen.say,
        )
        self.recorder = Recorder(
            config,
            record,
            directory,
            screen,
            broker=self.broker,
            broadcaster=self.broadcaster,
            learner=self.learner,
            actors=self.actors,
            rows=self.rows,
            trackers=self.trackers,
        )

    def make_judges(self, here: NodeAffinitySchedulingStrategy) -> list[RewardModelSupervisor]:
        """The process of the reward models, where a reward asks them."""
        config, models = self.config, self.inputs.reward_models
        if not models:
            return []
        judge = create_reward_model(
            models,
            config.actors.reward_model,
            timeout=config.actors.reward_timeout_seconds,
            **options(config.deploy.placement.reward_model, here),
        )
        return [
            RewardModelSupervisor(
                judge,
                config=config.deploy,
                record=self.record,
                rows=self.rows,
                screen=self.screen,
                metrics_host=config.deploy.metrics_host if config.deploy.metrics else None,
            )
        ]

    def make_actors(self, here: NodeAffinitySchedulingStrategy) -> list[Supervisor]:
        """The rollout actors; on other nodes too, where weights cross between nodes."""
        config = self.config
        create = partial(
            create_actor,
            config=actors_on_cores(
                config.actors,
                os.sched_getaffinity(0),
                set(cores_of(config.learner.cores)) if config.learner.cores else set(),
            ),
            weight_sync=config.weight_sync,
            model_path=self.inputs.model_path,
            seed=config.seed,
            group_size=config.prompts.group_size,
            heartbeat_seconds=config.queues.heartbeat_seconds,
            broker=self.broker,
            broadcaster=self.broadcaster,
            judge=self.judges[0].client if self.judges else None,
            metrics_host=config.deploy.metrics_host if config.deploy.metrics else None,
            engine_metrics=config.deploy.engine_metrics,
            pinned_seconds=config.heldout.pinned_seconds if config.heldout else 0.0,
            **options(
                config.deploy.placement.actors,
                here if config.weight_sync.one_node else "SPREAD",
            ),
        )
        return [
            Supervisor(
                index,
                partial(
                    create,
                    index,
                    purpose=heldout.purpose(config.heldout, index, config.actors.count),
                ),
                broker=self.broker,
                broadcaster=self.broadcaster,
                config=config.deploy,
                record=self.record,
                rows=self.rows,
                screen=self.screen,
                pinned_seconds=heldout.pinned_seconds(config.heldout, index, config.actors.count),
            )
            for index in range(config.actors.count)
        ]

    def watch(self) -> Watchdog:
        """Sees to it that nothing waits in silence."""
        return Watchdog(
            self.config,
            self.directory,
            self.screen,
            status=lambda: self.broker.status(after=self.config.steps),
            actors=lambda: {a.name: seen for a in self.actors if (seen := a.signs) is not None},
            handles=self.handles,
            save=self.save,
        )

    def handles(self) -> dict[str, Any]:
        """Of the processes in Ray that there are now, by name."""
        return {
            "broker": self.broker.handle,
            "broadcaster": self.broadcaster.actor,
            **{judge.name: judge.client.handle for judge in self.judges},
            **{f"learner-{rank}": each for rank, each in enumerate(self.learner.handles)},
            **{a.name: a.handle for a in self.actors if a.handle is not None},
        }

    def export(self) -> Exporter:
        """Opens the address that Prometheus asks."""
        return Exporter(
            self.config.name,
            self.directory.path,
            [RunMetrics(self.record, self.directory.path, lambda: self.watchdog.overdue)],
            lambda: [found for found in self.targets() if found[0] not in self.out_of_reach()],
            host=self.config.deploy.metrics_host,
            port=self.config.deploy.metrics_port,
            node=ray.util.get_node_ip_address(),
            evaluators=[
                actor.name
                for index, actor in enumerate(self.actors)
                if heldout.purpose(self.config.heldout, index, self.config.actors.count)
                is Purpose.EVALUATE
            ],
        )

    def targets(self) -> list[tuple[str, str]]:
        """Every other process that shows metrics, and where."""
        return [
            *self.shown,
            *((judge.name, judge.metrics) for judge in self.judges if judge.metrics),
            *((actor.name, actor.metrics) for actor in self.actors if actor.metrics),
        ]

    def out_of_reach(self) -> list[str]:
        """Processes of other nodes whose metrics only their own node reaches."""
        if not is_loopback(self.config.deploy.metrics_host):
            return []
        names = [name for name, _ in self.targets()]
        nodes = {name: self.watchdog.node_of(name) for name in names}
        nodes["learner"] = self.watchdog.node_of("learner-0")
        return [name for name in names if nodes[name] not in (None, self.node)]

    async def run(self) -> None:
        """Trains until the end, a failure, or the user's interrupt.

        Raises:
            KeyboardInterrupt: The user's, after everything was brought to a good end.
        """
        interrupts = Interrupts()
        training = asyncio.create_task(self.train())
        asked = asyncio.create_task(interrupts.asked.wait())
        await asyncio.wait({training, asked}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if not training.done():
                await self.interrupt(training, interrupts)
            await training
        finally:
            asked.cancel()
            if self.exporter is not None:
                self.exporter.close()
            self.trackers.close()
            with suppress(QueuesError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.broker.close()
            for judge in self.judges:
                judge.stop()

    async def train(self) -> None:
        """The whole run, watched from its beginning."""
        meanwhile = [named("watchdog", self.watchdog.follow())]
        if self.exporter is not None:
            meanwhile.append(named("exporter", self.exporter.follow()))
        await all_or_first_error([named("run", self.work())], meanwhile=meanwhile)
        await self.recorder.conclude("done")

    async def work(self) -> None:
        """Start, learn, score."""
        await self.start()
        await heldout.queue_all(self.broker, self.inputs.evaluations, self.inputs.problems)
        if self.exporter is not None and (away := self.out_of_reach()):
            self.screen.say(
                f"no metrics of {', '.join(away)}: on other nodes, and deploy.metrics_host = "
                f"{self.config.deploy.metrics_host!r} is their own loopback; set it to '0.0.0.0'"
            )
        self.learning = named("learner", self.learn())
        with self.screen.bar(self.config.steps, "waiting for the first batch"):
            await all_or_first_error(
                [
                    self.learning,
                    *(named(actor.name, actor.run()) for actor in self.actors),
                    named("feeder", self.feed()),
                    named("evaluation", self.collect_scores()),
                ],
                meanwhile=[
                    named("recorder", self.recorder.follow()),
                    *(named(judge.name, judge.run()) for judge in self.judges),
                ],
            )

    async def start(self) -> None:
        """Loads the model in the learner and in every engine at once."""
        config = self.config
        self.screen.say(
            f"the learner and {config.actors.count} actor(s) load {self.inputs.model_path}"
        )
        loading = {
            "learner": self.learner.start(
                self.inputs.model_path,
                checkpoint=str(self.checkpoint[1]) if self.checkpoint else None,
                seed=config.seed,
                steps=config.steps,
                temperature=config.actors.temperature,
            ),
            **{judge.name: judge.start() for judge in self.judges},
            **{actor.name: actor.start() for actor in self.actors},
        }
        tasks = [named(name, self.announce(name, ready)) for name, ready in loading.items()]
        if self.exporter is not None:
            self.screen.say(f"metrics: http://{self.exporter.address}/targets")
            tasks += [named(name, self.show(name, shows)) for name, shows in self.showing()]
        try:
            async with asyncio.timeout(config.deploy.start_timeout_seconds):
                await all_or_first_error(tasks)
        except TimeoutError:
            late = dict.fromkeys(task.get_name() for task in tasks if task.cancelled())
            handles = self.handles()
            unplaced = [name for name, each in handles.items() if not is_placed(each)]
            waits = f"; Ray has not placed {', '.join(unplaced)}: see ray status" * bool(unplaced)
            raise RunFailed(
                f"{', '.join(late)} did not start within deploy.start_timeout_seconds = "
                f"{config.deploy.start_timeout_seconds:g}{waits}"
            ) from None

    def showing(self) -> list[tuple[str, Awaitable[str]]]:
        """Calls that have processes show their metrics; those of actors do by themselves."""
        host, plain = self.config.deploy.metrics_host, self.handles()
        own = {"broker", "learner-0", *(actor.name for actor in self.actors)}
        own |= {judge.name for judge in self.judges}  # in each of its lives
        return [
            ("broker", self.broker.serve_metrics(host)),
            ("learner", self.learner.serve_metrics(host)),
            *((name, show_process(each, host)) for name, each in plain.items() if name not in own),
        ]

    async def show(self, name: str, shows: Awaitable[str]) -> None:
        """Lets Prometheus find a process, once it is there."""
        self.shown.append((name, await shows))

    async def announce(self, name: str, ready: Any) -> None:
        """Says when a process is up."""
        await ready
        self.screen.say(f"{name} is ready")

    async def learn(self) -> None:
        """The learner, from its first publication to its last."""
        await self.learner.run(
            self.broker,
            self.broadcaster,
            version=self.checkpoint[0] if self.checkpoint else 0,
            steps=self.config.steps,
            checkpoints=str(self.directory.checkpoints),
            weight_sync=self.config.weight_sync,
        )

    async def feed(self) -> None:
        """Issues prompts as the broker wants them, once the initial policy is scored or kept."""
        evaluator = heldout.evaluator(self.config.heldout, self.config.actors.count)
        await heldout.initial(self.broker, self.inputs.evaluations, evaluator)
        source = self.inputs.source
        if (cursor := await self.broker.cursor()) is not None:
            source.restore(cursor)
        while True:
            try:
                wanted = await self.broker.prompts_wanted(timeout=10.0)
            except QueueClosed:
                return
            if wanted:
                await self.broker.issue(source.next(wanted), cursor=source.cursor())

    async def collect_scores(self) -> None:
        """Records every held-out score when it is complete."""
        for version, planned in heldout.by_version(self.inputs.evaluations):
            if version in self.record.scored:
                continue
            scores = {p.kind: await heldout.outcome(self.broker, p) for p in planned}
            samples = {p.kind: p.samples for p in planned}
            self.record.add_scores(version, scores, now=time.time(), samples=samples)
            shown = {kind: score.score for kind, score in scores.items()}
            best = {f"pass@{n}": scores[kind].best for kind, n in samples.items() if n > 1}
            self.trackers.scores(version, shown | best)
            self.screen.score(version, shown | best)

    async def hand_over(self) -> None:
        """Returns when the learner has ended and the actors have saved what they are sampling."""
        assert self.learning is not None
        leaving = [asyncio.create_task(actor.stop()) for actor in self.actors]
        await asyncio.wait({self.learning, *leaving})

    async def save(self) -> None:
        """Has the learner save a checkpoint and the actors what they sample, as far as they can.

        Nothing where they still start.
        """
        if self.learning is None:
            return
        self.learner.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.deploy.checkpoint_seconds):
                await self.hand_over()

    async def interrupt(self, training: "asyncio.Task[None]", interrupts: Interrupts) -> None:
        """Lets learner and actors save what they have, unless the user insists; then ends the rest.

        Raises:
            KeyboardInterrupt: Unless training ended by itself meanwhile.
        """
        if self.learning is not None:
            self.screen.say(
                "stopping: the learner ends its step and saves a checkpoint (once more: at once)"
            )
            self.learner.stop()
            insisted = asyncio.create_task(interrupts.insisted.wait())
            saved = asyncio.create_task(self.hand_over())
            await asyncio.wait(
                {saved, insisted},
                timeout=self.config.deploy.checkpoint_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            insisted.cancel()
            saved.cancel()
            if self.learning.done():
                self.learning.result()
            else:
                self.screen.say("no checkpoint was saved; a resumed run trains its batches again")
        training.cancel()
        await asyncio.wait({training})
        if not training.cancelled():
            return  # it ended meanwhile, well or badly: that is how the run ended
        if self.learning is not None:
            with suppress(QueuesError, WeightSyncError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.recorder.conclude("interrupted")
        raise KeyboardInterrupt
