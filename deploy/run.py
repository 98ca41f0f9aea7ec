"""One run, wired together: read this first.

    feeder ─issue▶ broker ─lease▶ actors ─put▶ broker ─take▶ learner ─publish▶ broadcaster ─▶ actors
      ▲              │                                         │ack
      └────wanted────┘◀────────────────────────────────────────┘

Every box but the feeder is a Ray actor (`processes`). This process creates them, feeds prompts,
follows what happens, and ends everything when the learner has trained its last batch and the last
score is in, when one of them fails, or when the user says so. A rollout actor that dies is made
again (`supervisor`), and so is the process of the reward models, where there are any
(`reward_model_supervisor`). Nothing of the loop itself lives here: how far actors run ahead is
decided by `queues.policy.admission`, what a batch teaches by `learner`, how weights travel by
`weight_sync`.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from deploy.config import evaluation_schedule
from deploy.config.run_config import RunConfig
from deploy.driver import evaluations
from deploy.driver.named_tasks import all_or_first_error, named
from deploy.driver.processes import Processes
from deploy.driver.recorder import Recorder
from deploy.driver.run_metrics import RunMetrics
from deploy.driver.scrape_targets import Targets
from deploy.errors import RunFailed
from deploy.observability.stack_dumps import is_placed
from deploy.observability.trackers import Trackers
from deploy.observability.watchdog import Watchdog
from deploy.preflight.inputs import Inputs
from deploy.runtime.console import Screen
from deploy.runtime.daemon_thread import run_in_daemon_thread
from deploy.runtime.signals import Interrupts
from deploy.storage.jsonl import JsonlWriter
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from queues.errors import QueueClosed, QueuesError
from queues.readers.accounting import newest_checkpoint
from queues.records import Prompt
from weight_sync.errors import WeightSyncError

T = TypeVar("T")

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
        self.rows = JsonlWriter(directory)
        self.checkpoint = newest_checkpoint(directory.path) if directory.ledger.exists() else None
        self.learning: asyncio.Task[None] | None = None
        self.processes = Processes(
            config, inputs, directory, record, self.rows, screen, checkpoint=self.checkpoint
        )
        self.broker, self.broadcaster = self.processes.broker, self.processes.broadcaster
        self.learner, self.actors = self.processes.learner, self.processes.actors
        self.watchdog = self.watch()
        self.targets = self.export() if config.deploy.metrics else None
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

    def watch(self) -> Watchdog:
        """Sees to it that nothing waits in silence."""
        return Watchdog(
            self.config,
            self.directory,
            self.screen,
            status=lambda: self.broker.status(after=self.config.steps),
            actors=lambda: {
                a.name: health for a in self.actors if (health := a.health) is not None
            },
            handles=self.processes.handles,
            save=self.save,
        )

    def export(self) -> Targets:
        """Opens the address that Prometheus asks."""
        metrics = RunMetrics(self.record, self.directory.path, lambda: self.watchdog.overdue)
        return Targets(
            self.config, self.directory.path, metrics, self.processes, self.watchdog.node_of
        )

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
            if self.targets is not None:
                self.targets.exporter.close()
            self.trackers.close()
            with suppress(QueuesError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.broker.close()
            for judge in self.processes.judges:
                judge.stop()

    async def train(self) -> None:
        """The whole run, watched from its beginning."""
        meanwhile = [named("watchdog", self.watchdog.follow())]
        if self.targets is not None:
            meanwhile.append(named("exporter", self.targets.exporter.follow()))
        await all_or_first_error([named("run", self.work())], meanwhile=meanwhile)
        await self.recorder.conclude("done")

    async def work(self) -> None:
        """Start, learn, score."""
        await self.start()
        await evaluations.queue_all(self.broker, self.inputs.evaluations, self.inputs.problems)
        if self.targets is not None and (missing := self.targets.missing()):
            self.screen.say(missing)
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
                    *(named(judge.name, judge.run()) for judge in self.processes.judges),
                ],
            )

    async def start(self) -> None:
        """Loads the model in the learner and in every engine at once."""
        config = self.config
        self.screen.say(
            f"the learner and {config.actors.count} actor(s) load {self.inputs.model_path}"
        )
        loading = {
            "learner": self.learner.start(),
            **{judge.name: judge.start() for judge in self.processes.judges},
            **{actor.name: actor.start() for actor in self.actors},
        }
        tasks = [named(name, self.announce(name, ready)) for name, ready in loading.items()]
        if self.targets is not None:
            self.screen.say(f"metrics: http://{self.targets.exporter.address}/targets")
            tasks += [named(name, shown) for name, shown in self.targets.show()]
        try:
            async with asyncio.timeout(config.deploy.start_timeout_seconds):
                await all_or_first_error(tasks)
        except TimeoutError:
            late = dict.fromkeys(task.get_name() for task in tasks if task.cancelled())
            handles = self.processes.handles()
            unplaced = [name for name, each in handles.items() if not is_placed(each)]
            waits = f"; Ray has not placed {', '.join(unplaced)}: see ray status" * bool(unplaced)
            raise RunFailed(
                f"{', '.join(late)} did not start within deploy.start_timeout_seconds = "
                f"{config.deploy.start_timeout_seconds:g}{waits}"
            ) from None

    async def announce(self, name: str, ready: Any) -> None:
        """Says when a process is up."""
        await ready
        self.screen.say(f"{name} is ready")

    async def learn(self) -> None:
        """Run the learner from its first publication to its last."""
        await self.learner.run(self.broker, self.broadcaster)

    async def feed(self) -> None:
        """Issues prompts as the broker wants them, once the initial policy is scored or kept."""
        evaluator = evaluation_schedule.evaluator(self.config.heldout, self.config.actors.count)
        await evaluations.initial(self.broker, self.inputs.evaluations, evaluator)
        source = self.inputs.source
        if (cursor := await self.broker.cursor()) is not None:
            await self.ask_source(partial(source.restore, cursor))

        def draw(count: int) -> tuple[list[Prompt], str]:
            return source.next(count), source.cursor()

        while True:
            try:
                wanted = await self.broker.prompts_wanted(timeout=10.0)
            except QueueClosed:
                return
            if wanted:
                prompts, after = await self.ask_source(partial(draw, wanted))
                await self.broker.issue(prompts, cursor=after)

    async def ask_source(self, work: Callable[[], T]) -> T:
        """What the prompt source answers; it may be the user's, and block.

        Raises:
            RunFailed: It does not answer.
        """
        limit = self.config.deploy.stall_seconds
        try:
            async with asyncio.timeout(limit):
                return await run_in_daemon_thread(work)
        except TimeoutError:
            raise RunFailed(
                f"prompts.source = {self.config.prompts.source!r} did not answer within "
                f"deploy.stall_seconds = {limit:g}"
            ) from None

    async def collect_scores(self) -> None:
        """Records every held-out score when it is complete."""
        for version, planned in evaluation_schedule.by_version(self.inputs.evaluations):
            if version in self.record.scored:
                continue
            scores = {p.kind: await evaluations.outcome(self.broker, p) for p in planned}
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
