"""One run, wired together: read this first.

    feeder ─issue▶ broker ─lease▶ actors ─put▶ broker ─take▶ learner ─publish▶ broadcaster ─▶ actors
      ▲              │                                         │ack
      └────wanted────┘◀────────────────────────────────────────┘

Every box but the feeder is a Ray actor (`driver.processes`). This process creates them, feeds
prompts, records what they report, restarts what dies, and ends everything when the last batch is
trained and scored, when something fails for good, or when the user interrupts.
The loop itself is elsewhere: `queues.policy.admission` decides how far actors run ahead, `learner`
what a batch teaches, `weight_sync` how weights travel.
"""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext, suppress

import ray

from deploy.cluster.ray_cluster import fail_with_ray, status_command
from deploy.config.evaluation_schedule import evaluator
from deploy.driver import evaluations
from deploy.driver.actor_fleet import PATIENT_SECONDS
from deploy.driver.feeder import feed
from deploy.driver.named_tasks import all_or_first_error, named
from deploy.driver.processes import Processes
from deploy.driver.recorder import Recorder
from deploy.driver.run_context import RunContext
from deploy.driver.run_metrics import RunMetrics
from deploy.driver.scrape_targets import ScrapeTargets
from deploy.driver.supervisor import Supervisor
from deploy.driver.uploads import Uploads
from deploy.driver.watchdog import Watchdog
from deploy.errors import RayDied, RunFailed
from deploy.observability.exporter import Exporter, metrics_access
from deploy.observability.trackers import Trackers
from deploy.planner.byte_counts import checkpoint_bytes, version_weight_bytes
from deploy.runtime.signals import Interrupts
from headway.daemon_thread import run_in_daemon_thread
from headway.errors import HeadwayError
from headway.ray_process import is_placed
from headway.roles import Role
from queues.readers.checkpoints import LONGEST_SAVE_SECONDS, last_save_seconds
from weight_sync.progress import allowance

SAVE_FACTOR = 2.0
"""Time for a checkpoint after an interrupt, for each second that the last one took."""
CLOSE_SECONDS = 2.0
"""Deadline of an interrupted run's last figures and trackers, and of closing any run's broker."""
TRACKERS_SECONDS = 120.0
"""Deadline of trackers to take what waits for them at the end of a run."""


def save_seconds(context: RunContext) -> float:
    """Return the seconds added to `deploy.checkpoint_seconds` for the bytes of a checkpoint."""
    if took := last_save_seconds(context.directory.path):
        return SAVE_FACTOR * took
    if not context.record.swaps:
        return 0.0
    config, sent = context.config, context.record.swaps[-1].full_bytes
    nbytes = checkpoint_bytes(config.learner, sent // version_weight_bytes(config))
    return min(LONGEST_SAVE_SECONDS, allowance(0.0, nbytes))


def has_ended(task: "asyncio.Task[None]") -> bool:
    """Return True if a task ended by itself, well or badly.

    Not so where Ray was lost: a signal to the process group of the command ends Ray too.
    """
    if not task.done() or task.cancelled():
        return False
    return not isinstance(task.exception(), RayDied)


class Run:
    """The processes of one run and the tasks that keep them going."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        config, directory = context.config, context.directory
        self.learning: asyncio.Task[None] | None = None
        self.processes = Processes(context)
        self.watchdog = Watchdog(context, self.processes, self.save)
        self.targets = ScrapeTargets(
            self.processes, metrics_access(config.deploy), self.watchdog.node_of
        )
        self.starting = {"the run"}
        """Processes that have not started yet, and the run itself until its loop begins."""
        metrics = RunMetrics(
            context.record,
            directory.path,
            lambda: self.watchdog.overdue,
            processes=self.processes.names,
        )
        self.exporter: Exporter | None = None
        if config.deploy.metrics:
            reachable, node = self.targets.reachable, ray.util.get_node_ip_address()
            self.exporter = Exporter(
                config, directory.path, metrics, reachable, node, self.waits_for
            )
        self.trackers = Trackers(config, directory.path, context.console.say)
        self.recorder = Recorder(context, self.processes, self.trackers)
        self.uploads = Uploads(context)

    def waits_for(self) -> list[str]:
        """Return what the run waits for instead of training; it may be called in any thread."""
        overdue = [f"{wait.who} waits on {wait.on}" for wait in self.watchdog.overdue]
        return [*sorted(self.starting), *overdue]

    async def run(self) -> None:
        """Train until the end, a failure, or the interrupt of the user (KeyboardInterrupt)."""
        interrupts = Interrupts()
        training = asyncio.create_task(self.train())
        asked = asyncio.create_task(interrupts.asked.wait())
        await asyncio.wait({training, asked}, return_when=asyncio.FIRST_COMPLETED)
        try:
            if interrupts.asked.is_set() and not has_ended(training):
                await self.interrupt(training, interrupts)
            await training
        finally:
            asked.cancel()
            if self.exporter is not None:
                self.exporter.close()
            with suppress(HeadwayError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.processes.broker.close()
            for service in self.processes.services:
                service.stop()
            seconds = CLOSE_SECONDS if interrupts.asked.is_set() else TRACKERS_SECONDS
            await run_in_daemon_thread(lambda: self.trackers.close(seconds))

    async def train(self) -> None:
        """Do the work of the run, watched from its beginning."""
        meanwhile = [named(service.name, service.keep()) for service in self.processes.services]
        meanwhile.append(named("watchdog", self.watchdog.follow()))
        if self.context.config.deploy.ray_address == "local":
            meanwhile.append(named("Ray", fail_with_ray()))
        if self.exporter is not None:
            meanwhile.append(named("exporter", self.exporter.follow()))
        await all_or_first_error([named("run", self.work())], meanwhile=meanwhile)

    async def work(self) -> None:
        """Start all processes, learn, score, and record that all is done."""
        context, processes = self.context, self.processes
        await self.start()
        prompts = context.inputs.prompts
        await evaluations.queue_all(processes.broker, prompts.evaluations, prompts.problems)
        if self.exporter is not None and (warning := self.targets.warning()):
            context.console.say(warning)
        self.learning = named("learner", processes.learner.run())
        if context.process is not None and (away := context.process.works()) is not None:
            context.record_recovery(Role.DRIVER, away)
        self.starting.clear()
        with context.console.bar(context.config.steps, "waiting for the first batch"):
            await all_or_first_error(
                [
                    self.learning,
                    named("actors", processes.fleet.run()),
                    named("feeder", self.feed()),
                    named(
                        "evaluation",
                        evaluations.collect(context, processes.broker, self.trackers),
                    ),
                ],
                meanwhile=[
                    named("learner", processes.learner.remain()),
                    named("recorder", self.recorder.follow(self.save)),
                    named("drift", self.recorder.drift.follow()),
                    named("uploads", self.uploads.follow()),
                ],
            )
        await self.uploads.finish()
        await self.recorder.check_complete()
        await self.recorder.conclude("done")  # while a process that it asks is still replaced

    async def start(self) -> None:
        """Load the model in the learner and in every engine, at once or, on a shared GPU, in turn.

        Raises RunFailed if not all were ready within deploy.start_timeout_seconds.
        """
        config, console = self.context.config, self.context.console
        model_path = self.context.inputs.model_path
        actors = self.processes.fleet.active
        console.say(f"the learner and {len(actors)} actor(s) load {model_path}")
        broker, broadcaster, *reward_models = self.processes.services
        # Engines before others: one that shares a GPU takes memory by what is free as it starts.
        loading = [broker, broadcaster, *actors, self.processes.learner, *reward_models]
        shared = any(0 < role.gpus < 1 for role in (config.actors, config.learner))
        turn = asyncio.Lock() if shared else nullcontext()
        self.starting = {*(process.name for process in loading), "the run"}
        tasks = [named(process.name, self.announce(process, turn)) for process in loading]
        if self.exporter is not None:
            console.say(f"metrics: http://{self.exporter.address}/targets")
        try:
            async with asyncio.timeout(config.deploy.start_timeout_seconds):
                await all_or_first_error(tasks)
        except TimeoutError:
            late = [task.get_name() for task in tasks if task.cancelled()]
            message = (
                f"{', '.join(dict.fromkeys(late))} did not start within "
                f"deploy.start_timeout_seconds = {config.deploy.start_timeout_seconds:g}"
            )
            handles = self.processes.handles()
            if unplaced := [name for name, handle in handles.items() if not is_placed(handle)]:
                look = status_command(config.deploy.ray_address)
                message += f"; Ray has not placed {', '.join(unplaced)}: see {look}"
            raise RunFailed(message) from None

    async def announce(
        self, process: Supervisor, turn: AbstractAsyncContextManager[object]
    ) -> None:
        """Start a process and print when it is ready, unless it is an actor that was given up."""
        async with turn:
            is_ready = await process.start()
        self.starting.discard(process.name)
        if is_ready:
            self.context.console.say(f"{process.name} is ready")

    async def feed(self) -> None:
        """Issue prompts, once the initial policy is scored or its evaluator has it."""
        config, opened = self.context.config, self.context.inputs.prompts
        broker = self.processes.broker
        await evaluations.initial(broker, opened.evaluations, evaluator(config.heldout))
        await feed(broker, opened.source, config)

    async def save(self, insisted: asyncio.Event | None = None) -> None:
        """Have the learner save a checkpoint and the actors what they sample, before a deadline.

        Returns earlier if the user has `insisted`; does nothing while they start, and waits for
        actors alone while the ranks of the learner are made again.
        """
        if self.learning is None:
            return
        learner = self.processes.learner
        learner.stop()
        seconds = self.context.config.deploy.checkpoint_seconds
        seconds += save_seconds(self.context)
        handing_over = min(seconds, PATIENT_SECONDS)
        actors = self.processes.fleet.actors
        leaving = [asyncio.create_task(actor.stop(handing_over)) for actor in actors]
        saving = () if learner.starts else (self.learning,)  # ranks that load have nothing to save
        ends = [
            asyncio.create_task(asyncio.wait({*saving, *leaving})),
            asyncio.create_task((insisted or asyncio.Event()).wait()),
        ]
        try:
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def interrupt(self, training: "asyncio.Task[None]", interrupts: Interrupts) -> None:
        """Let learner and actors save what they have, unless the user insists; then end the rest.

        Raises KeyboardInterrupt, unless training ended by itself meanwhile.
        """
        console = self.context.console
        if self.learning is not None:
            console.say(
                "stopping: the learner ends its step and saves a checkpoint (once more: at once)"
            )
            await self.save(interrupts.insisted)
            if has_ended(self.learning):
                self.learning.result()
            if not self.processes.learner.saved:
                console.say("no checkpoint was saved; a resumed run trains its batches again")
        training.cancel()
        await asyncio.wait({training})
        if has_ended(training):
            return  # it ended by itself meanwhile, well or badly
        if self.learning is not None:
            with suppress(HeadwayError, TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.recorder.conclude("interrupted")
        raise KeyboardInterrupt
