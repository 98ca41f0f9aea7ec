"""Trains a stage of supervised learning: one rank in this process, several on a Ray cluster.

unfinished/ ─newest checkpoint─▶ batches that are left ─▶ ranks ─▶ model, losses
◀────checkpoints, losses───────────────────────────────┘
"""

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.engines.model_folder import context_length
from deploy.cluster.cpu_affinity import learner_of_stage
from deploy.cluster.placement import resource_requests
from deploy.config.run_config import RunConfig
from deploy.preflight.models import refuse_another_origin
from deploy.runtime.console import Terminal
from deploy.storage.atomic_folder import ORIGIN_FILE, UNFINISHED, atomic_folder
from deploy.storage.jsonl import append_rows, read_rows, rewrite_rows
from headway.cpu_cores import usable_cores
from headway.errors import InputError
from headway.folder_checksums import damage_of
from headway.roles import Role
from learner.config.supervised import StageConfig

if TYPE_CHECKING:
    from learner.ranks.spec import LearnerSpec
    from learner.supervised.row_training import Progress
    from learner.supervised.stage import Stage

ANEW = "begin anew with --replace, or go on with what it was made with"


def _has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("v*"))


@contextmanager
def made_model(
    config: RunConfig, folder: Path, origin: str, terminal: Terminal, *, replace: bool
) -> Iterator[Path]:
    """Yield the folder to write a stage's model to; its checkpoints lie in one beside it.

    They are kept for the next command, if there are any, where the block is interrupted.

    Raises:
        InputError: It exists, or has checkpoints of another `origin`, and may not be replaced.
    """
    unfinished, private = folder.with_name(UNFINISHED), config.deploy.private
    replacing = replace or _has_checkpoint(unfinished)  # a command that might replace it has begun
    try:
        with atomic_folder(folder, replace=replacing, private=private) as made:
            if _has_checkpoint(unfinished) and not replace:
                refuse_another_origin(unfinished, origin, ANEW, files=True)
            else:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(mode=0o700 if private else 0o777)
                (unfinished / ORIGIN_FILE).write_text(origin)
            try:
                terminal.say("loading torch and DeepSpeed")
                yield made
                (made / ORIGIN_FILE).write_text(origin)
            except BaseException as error:
                if not _has_checkpoint(unfinished):
                    shutil.rmtree(unfinished)
                elif not isinstance(error, InputError):
                    terminal.say(f"the command goes on from the newest checkpoint in {unfinished}")
                raise
    except BaseException:
        with suppress(OSError):  # a folder that holds something else stays
            folder.parent.rmdir()
        raise
    shutil.rmtree(unfinished, ignore_errors=True)


class UnfinishedStage:
    """The folder of a stage that trains: its losses, and checkpoints to go on from."""

    def __init__(self, folder: Path) -> None:
        """Find the newest checkpoint that is whole, and drop the losses after it.

        Raises:
            InputError: Its description cannot be read.
        """
        from learner.engine.checkpoint import read_state
        from learner.engine.model_folder import LOSSES_FILE

        newest_first = sorted(folder.glob("v*"), reverse=True)
        self.checkpoint = next((f for f in newest_first if damage_of(f) is None), None)
        state = read_state(self.checkpoint) if self.checkpoint else None
        self.steps = state.optimizer_steps if state else 0
        """Steps that its weights have been trained."""
        self._tokens = state.totals["tokens"] if state else 0
        self.losses = folder / LOSSES_FILE
        rows = read_rows(self.losses).intact
        rewrite_rows(self.losses, [row for row in rows if row["step"] <= self.steps])

    def left(self, batches: Iterator[Sequence[Any]], steps: int) -> Iterator[Sequence[Any]]:
        """Return what is left of the batches of so many steps; draws those trained before.

        Raises:
            InputError: The batches are not those that were trained.
        """
        tokens = sum(len(item) for batch in islice(batches, self.steps) for item in batch)
        if tokens != self._tokens:
            raise InputError(
                f"{self.checkpoint} was trained on {self._tokens} tokens in {self.steps} steps, "
                f"and now they have {tokens}: the source draws others; begin anew with --replace"
            )
        return islice(batches, steps - self.steps)

    def record(self, progress: "Progress") -> None:
        """Write the loss of a step."""
        measured, heldout_loss = progress.heldout or (0, None)
        row = {
            "step": progress.step,
            "loss": progress.loss,
            "tokens": self._tokens + progress.tokens,
            "heldout_loss": heldout_loss if measured == progress.step else None,
        }
        if progress.accuracy is not None:
            heldout_accuracy = progress.heldout_accuracy if measured == progress.step else None
            row |= {"accuracy": progress.accuracy, "heldout_accuracy": heldout_accuracy}
        append_rows(self.losses, [row])


def stage_spec(
    config: RunConfig, section: StageConfig, name: str, path: str, unfinished: UnfinishedStage
) -> "LearnerSpec":
    """Return what the ranks of a stage begin with: the model of `path`, or the checkpoint."""
    from learner.ranks.spec import LearnerSpec

    return LearnerSpec(
        config=learner_of_stage(config, section, usable_cores()),
        section=name,
        model_path=path,
        seed=config.seed,
        steps=section.steps,
        context=config.actors.max_model_len or context_length(path),
        checkpoint=str(unfinished.checkpoint) if unfinished.checkpoint else None,
        checkpoints=str(unfinished.losses.parent),
    )


def train_stage(
    config: RunConfig,
    stage: "Stage",
    batches: Iterator[Sequence[Any]],
    unfinished: UnfinishedStage,
    terminal: Terminal,
) -> None:
    """Train a stage on what is left of its batches; write its model, with the losses beside it.

    Raises:
        InputError: The model or the checkpoint cannot be loaded, the cluster not hold the ranks, or
            the batches are not those that were trained.
        RunFailed: A rank died, raised or does not answer.
    """
    steps, batches = stage.config.steps, unfinished.left(batches, stage.config.steps)
    going_on = f", from step {unfinished.steps} on" if unfinished.steps else ""
    terminal.say(f"{stage.spec.section}: {steps} steps{going_on}")
    train_ranks(config, stage, batches, terminal, unfinished.record)
    shutil.copy(unfinished.losses, stage.folder)


def train_ranks(
    config: RunConfig,
    stage: "Stage",
    batches: Iterator[Sequence[Any]],
    terminal: Terminal,
    record: "Callable[[Progress], None]" = lambda _: None,
) -> None:
    """Train a stage on the batches that it has steps left for, and write its model.

    `record` is called after each step. Raises InputError and RunFailed, as `train_stage`.
    """
    learner, section = stage.spec.config, stage.spec.section
    bar = terminal.bar(stage.config.steps, "the first step")

    def report(progress: "Progress") -> None:
        terminal.advance(progress.step, progress.text)
        record(progress)
        if (lost := progress.lost_to_rounding) is not None:
            terminal.say(f"lost to rounding of the adapter's changes: {lost:.1%}")

    if learner.ranks == 1:
        import torch

        torch.set_num_threads(learner.threads_of_rank)
        with bar:
            for progress in stage.run(stage.rank_type(stage.spec), batches):
                report(progress)
        return
    import ray

    from deploy.cluster.placement_group import Reservation
    from deploy.cluster.ray_cluster import cluster
    from deploy.driver.named_tasks import named
    from learner.supervised.ray_stage import create_stage

    actors = config.actors.model_copy(update={"cpus": 0.0, "gpus": 0.0})
    ranks_only = config.model_copy(update={"actors": actors, "learner": learner})
    sizes = f"{section}.ranks, {section}.threads, {section}.gpus"
    terminal.say(f"starting Ray for {learner.ranks} ranks")
    with (
        bar,
        tempfile.TemporaryDirectory(prefix=f"headway-{section}-") as scratch,
        cluster(ranks_only, Path(scratch), sizes=sizes),
    ):
        driver_node = ray.get_runtime_context().get_node_id()
        reservation = Reservation(
            resource_requests(ranks_only, driver_node=driver_node),
            config.deploy.start_timeout_seconds,
            terminal,
            shared=config.deploy.ray_address != "local",
        )
        group = create_stage(stage, partial(reservation.options, Role.LEARNER))

        async def train() -> None:
            await named(section, group.start())
            await named(section, group.train(batches, report))

        asyncio.run(train())
