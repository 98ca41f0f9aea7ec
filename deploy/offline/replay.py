"""`headway replay`: trains recorded batches again and compares the weights with those of the run.

    nearest checkpoint ≤ a ─▶ batches … a−1, again ─▶ batches a … b−1, each compared ─▶ table

One rank runs in this process, where it can be debugged; several run as processes. Nothing is
written into the run's folder. On a CPU the weights are equal bit by bit; GPU kernels may add in
another order each time.
"""

import asyncio
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.engines.model_folder import context_length
from deploy.config.run_config import RunConfig
from deploy.preflight.models import model_path, teacher_paths
from deploy.runtime.console import Terminal
from deploy.runtime.safe_console import print_whole
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import earlier_sessions, last_recipe
from headway.errors import InputError
from headway.user_code import look_in
from learner.config.learner import LearnerConfig
from learner.ranks.spec import LearnerSpec
from queues.broker.batch_queue import CHECKSUM
from queues.readers.accounting import read_batches
from queues.readers.checkpoints import committed_checkpoints
from queues.readers.recorded_batches import RecordedBatches, read_batch

POLL_SECONDS = 0.5
"""Seconds between two requests for the batches that other processes have trained."""

Row = Mapping[str, Any]
Show = Callable[[Row], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """The batches that are trained again, and the checkpoint to begin with."""

    first: int
    """The first batch that is compared."""
    end: int
    """The first batch that is not trained any more."""
    start: int
    """The version that training begins with."""
    checkpoint: Path | None
    """Its folder; None: the initial weights."""


@dataclass(frozen=True, slots=True)
class Basis:
    """Everything that batches of a run are trained again from."""

    directory: RunDirectory
    config: RunConfig
    """The recipe that the last batch was trained with."""
    model: str
    """Folder or hub name of the initial model."""
    plan: Plan
    recorded: Mapping[int, Row]
    """The statistics of every trained batch."""

    def spec(self) -> LearnerSpec:
        """Return the specification of a learner that begins as the run did."""
        config, plan = self.config, self.plan
        return LearnerSpec(
            config=config.objective,
            model_path=self.model,
            teachers=teacher_paths(config),
            seed=config.seed,
            steps=config.steps,
            earlier=earlier_sessions(self.directory, config, last=plan.end - 1),
            temperature=config.actors.temperature,
            context=config.actors.max_model_len or context_length(self.model),
            checkpoint=str(plan.checkpoint) if plan.checkpoint else None,
            version=plan.start,
            last_version=plan.end,
        )


def parse_steps(text: str) -> tuple[int, int]:
    """Parse `--steps`: a:b means the batches a, …, b−1, and a-b the batches a, …, b."""
    match = re.fullmatch(r"(\d+)([:-])(\d+)", text.strip())
    first, end = (int(match[1]), int(match[3]) + (match[2] == "-")) if match else (0, 0)
    if not first < end:
        raise InputError(
            f"--steps {text!r}: write a:b with a below b, as in 10:20, the batches 10 to 19, or "
            "10-19 for the same"
        )
    return first, end


def plan_replay(
    steps: tuple[int, int], recorded: Mapping[int, Row], checkpoints: Mapping[int, Path]
) -> Plan:
    """Choose the checkpoint to begin with, of those by version, for batches that were trained."""
    first, end = steps
    if missing := [version for version in range(first, end) if version not in recorded]:
        known = f"0 to {max(recorded)}" if recorded else "none"
        raise InputError(
            f"--steps {first}:{end}: batch {missing[0]} was not trained; trained are {known}"
        )
    start = max((version for version in checkpoints if version <= first), default=0)
    return Plan(first, end, start, checkpoints.get(start))


def find_basis(
    directory: RunDirectory,
    steps: tuple[int, int],
    *,
    model: str | None = None,
    from_checkpoint: bool = True,
) -> Basis:
    """Find what batches of a run are trained again from; `model` is its initial one, if known.

    Raises InputError if the run is going on, or if batches or weights to begin with are missing.
    """
    directory.lock.check_at_rest()
    recorded = {row["version"]: row for row in read_batches(directory.path)}
    checkpoints = committed_checkpoints(directory.path)
    plan = plan_replay(steps, recorded, checkpoints if from_checkpoint else {})
    config = last_recipe(directory, plan.end - 1) or directory.config()
    look_in(config.deploy.code_dir)
    try:
        model = model or model_path(config)
    except InputError as error:
        kept = ", ".join(map(str, checkpoints)) or "none"
        raise InputError(
            f"the model of the run is needed for its shape and tokenizer, and its weights where no "
            f"checkpoint at or below {plan.first} is left (there are: {kept}): {error}"
        ) from error
    return Basis(directory, config, model, plan, recorded)


def replay(basis: Basis, terminal: Terminal, console: Console) -> bool:
    """Replay batches of a run and print a comparison; return whether all weights are equal."""
    plan, recorded = basis.plan, basis.recorded
    origin = f"checkpoint {plan.start}" if plan.checkpoint else "the initial weights"
    before = f", first the {plan.first - plan.start} before them" if plan.first > plan.start else ""
    terminal.say(f"training batches {plan.first} to {plan.end - 1} again from {origin}{before}")
    pairs = [(recorded[row["version"]], row) for row in train_again(basis, terminal)]
    print_whole(console, table(pair for pair in pairs if pair[0]["version"] >= plan.first))
    verdict = compare(pairs)
    console.print(
        verdict or f"the weights after batches {plan.first} to {plan.end - 1} are those of the run",
        soft_wrap=True,
    )
    return verdict is None


def train_again(basis: Basis, terminal: Terminal) -> list[dict[str, Any]]:
    """Train every batch from the checkpoint on; return their statistics with checksums."""
    plan = basis.plan
    with terminal.bar(plan.end - plan.start, "loading the learner"):

        def show(row: Row) -> None:
            terminal.advance(row["version"] + 1 - plan.start, f"loss {row['loss']:.4f}")

        if basis.config.learner.ranks > 1:
            return asyncio.run(_by_processes(basis, show))
        return _in_this_process(basis, show)


def use_cores_of(config: LearnerConfig) -> None:
    """Have this process compute with the cores and threads of a learner's only rank."""
    import torch

    from headway.cpu_cores import bind_process

    if (cores := config.cores_of_rank(0)) is not None:
        bind_process(cores, "learner.cores")
    torch.set_num_threads(config.threads_of_rank)


def _in_this_process(basis: Basis, show: Show) -> list[dict[str, Any]]:
    """Train with one rank in this thread, on the learner's cores."""
    from learner.ranks.rank import Rank
    from weight_sync.publish.snapshot import Snapshot, wire_dtype

    spec, plan = basis.spec(), basis.plan
    use_cores_of(spec.config)
    rank, snapshot, dtype = Rank(spec), Snapshot(), wire_dtype(basis.config.weight_sync)
    trained = []
    try:
        for version in range(plan.start, plan.end):
            report = rank.update(read_batch(basis.directory.path, version), version)
            checksum = snapshot.take(rank.weights(), dtype).result()
            trained.append({**report.to_dict(), "version": version, CHECKSUM: checksum})
            show(trained[-1])
    finally:
        rank.close()
    return trained


async def _by_processes(basis: Basis, show: Show) -> list[dict[str, Any]]:
    """Train with several ranks as in a run; they write into a temporary folder."""
    import ray

    from deploy.cluster.ray_cluster import cluster
    from deploy.driver.named_tasks import named
    from learner.ranks.ray_group import create_learner
    from queues.ray_broker import BrokerClient
    from weight_sync.ray_broadcaster import create_broadcaster

    config, plan, spec = basis.config, basis.plan, basis.spec()
    sync = config.weight_sync.model_copy(update={"transport": "shared_memory", "folder": None})
    actors = config.actors.model_copy(update={"cpus": 0.0, "gpus": 0.0})
    learner_only = config.model_copy(update={"actors": actors})
    with (
        tempfile.TemporaryDirectory(prefix="headway-replay-") as scratch,
        cluster(learner_only, Path(scratch)),
    ):
        batches = ray.remote(RecordedBatches).options(num_cpus=0).remote(basis.directory.path)
        group = create_learner(
            replace(
                spec,
                config=spec.config.model_copy(update={"checkpoint_every": plan.end + 1}),
                checkpoints=f"{scratch}/checkpoints",
                weight_sync=sync,
            )
        )
        await named("learner", group.start())
        training = named("learner", group.run(BrokerClient(batches), create_broadcaster(1.0, 1)))
        seen = plan.start - 1
        while not training.done():
            await asyncio.wait({training}, timeout=POLL_SECONDS)
            for row in await batches.acknowledged.remote(seen):
                show(row)
                seen = row["version"]
        await training
        trained: list[dict[str, Any]] = await batches.acknowledged.remote()
        return trained


def compare(pairs: Sequence[tuple[Row, Row]]) -> str | None:
    """Describe the first difference in pairs of recorded and recomputed statistics, if any."""
    for recorded, again in pairs:
        if recorded[CHECKSUM] == again[CHECKSUM]:
            continue
        figures = [
            f"{label} {recorded[key]!r} recorded and {again[key]!r} now"
            for key, label in (("loss", "loss"), ("grad_norm", "gradient norm"))
            if recorded[key] != again[key]
        ]
        return (
            f"the weights differ first after batch {recorded['version']}: checksum "
            f"{recorded[CHECKSUM]} recorded and {again[CHECKSUM]} now, "
            f"{' and '.join(figures) or 'with the same loss and gradient norm'}"
        )
    return None


def table(pairs: Iterable[tuple[Row, Row]]) -> Table:
    """Return a table of the batches: version, checksums, losses and gradient norms."""
    shown = Table(
        "version", "recorded", "recomputed", "equal", "loss", "recomputed", "gradient", "recomputed"
    )
    for recorded, again in pairs:
        figures = [
            "–" if row[key] is None else f"{row[key]:.6g}"
            for key in ("loss", "grad_norm")
            for row in (recorded, again)
        ]
        shown.add_row(
            str(recorded["version"] + 1),
            recorded[CHECKSUM],
            again[CHECKSUM],
            "yes" if recorded[CHECKSUM] == again[CHECKSUM] else "NO",
            *figures,
        )
    return shown
