"""One measurement of a benchmark in a process of its own, so that Ray ends with it.

python -m benchmarks.loop.run_worker RECIPE.json train|actors|learner [RECORDED_RUN]
"""

import asyncio
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from benchmarks.harness.actor_fleet import run_spec, start_fleet
from benchmarks.harness.processes import run_main
from benchmarks.harness.training_runs import BATCHES
from deploy.cluster.ray_cluster import cluster
from deploy.config.run_config import RunConfig
from deploy.driver.feeder import feed
from deploy.errors import RunFailed
from deploy.preflight.inputs import Inputs, load_inputs
from deploy.runtime.console import Terminal
from deploy.session import run
from deploy.storage.jsonl import append_rows
from deploy.storage.run_directory import RunDirectory
from headway import clock
from learner.ranks.ray_group import create_learner
from learner.ranks.spec import LearnerSpec
from queues.broker.broker import Broker
from queues.ray_broker import BrokerClient
from queues.schema import summarize
from queues.storage.ledger_schema import FILE_NAME, JOURNAL_NAME
from weight_sync.ray_broadcaster import create_broadcaster

MARGIN = 2
"""Batches beyond the last measured one, so that the engine is full until then."""
TAKE_SECONDS = 900.0
"""Deadline of a batch."""


async def generate(config: RunConfig, inputs: Inputs, directory: RunDirectory) -> None:
    """Generate for a consumer that takes and acknowledges at once, without training."""
    steps = config.steps + MARGIN
    unbounded = config.queues.model_copy(update={"max_staleness": steps})
    fleet = await start_fleet(config, inputs.model_path, directory.path, unbounded, steps)
    await fleet.publish(0, Path(inputs.model_path))
    feeder = feed(fleet.broker, inputs.prompts.source, config)
    await fleet.serve(consumer=_consume(config, fleet.broker, directory), feeder=feeder)


async def _consume(config: RunConfig, broker: BrokerClient, directory: RunDirectory) -> None:
    """Take batch after batch and write a row for each."""
    for version in range(config.steps):
        batch = await broker.take(version, TAKE_SECONDS)
        if batch is None:
            raise RunFailed(f"no batch came within {TAKE_SECONDS:g} s")
        await broker.ack(version, {})
        row = {"version": version, "step_finished_at": clock.now()}
        groups = [summarize(payload) for payload in batch.payloads]
        row["rollouts_trained"] = sum(group.rollouts for group in groups)
        row["tokens_trained"] = sum(group.tokens for group in groups)
        append_rows(directory.path / BATCHES, [row])


class Replay(Broker):
    """The broker of a finished run, whose ledger answers another learner with recorded batches."""

    def __init__(self, *args: Any, rows: Path, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rows = rows

    async def ack(self, version: int, statistics: Mapping[str, Any], *, epoch: int = 0) -> bool:
        """Write the statistics to a file; the ledger keeps those of the recorded run."""
        with self._rows.open("a") as file:
            file.write(json.dumps({"version": version, **statistics}) + "\n")
        return True

    async def commit_checkpoint(self, version: int, path: str, *, epoch: int = 0) -> None:
        """Do nothing."""


async def train_again(
    config: RunConfig, inputs: Inputs, directory: RunDirectory, recorded: Path
) -> None:
    """Train the recorded batches of a run again, published and saved as usual."""
    shutil.copy(recorded / FILE_NAME, directory.path)
    shutil.copytree(recorded / JOURNAL_NAME, directory.path / JOURNAL_NAME)
    replay = (
        ray.remote(Replay)
        .options(num_cpus=0, max_concurrency=100)
        .remote(
            directory.path,
            config=config.queues,
            spec=run_spec(config, config.steps),
            rows=directory.path / BATCHES,
        )
    )
    broadcaster = create_broadcaster(config.weight_sync.update_fraction, config.actors.count)
    learner = create_learner(
        LearnerSpec(
            config=config.objective,
            model_path=inputs.model_path,
            seed=config.seed,
            steps=config.steps,
            temperature=config.actors.temperature,
            checkpoints=str(directory.checkpoints),
            weight_sync=config.weight_sync,
        )
    )
    async with asyncio.timeout(config.deploy.start_timeout_seconds):
        await learner.start()
    await learner.run(BrokerClient(replay), broadcaster)


def main() -> None:
    recipe, kind, *recorded = sys.argv[1:]
    config = RunConfig.model_validate_json(Path(recipe).read_text())
    inputs = load_inputs(config)
    directory = RunDirectory.of(config)
    with directory.created(config, replace=False):
        if kind == "train":  # checkpoints are scored afterwards
            prompts = replace(inputs.prompts, evaluations=[])
            run(config, replace(inputs, prompts=prompts), directory, Terminal())
            return
        with cluster(config, directory.logs):
            if kind == "actors":
                asyncio.run(generate(config, inputs, directory))
            else:
                asyncio.run(train_again(config, inputs, directory, Path(recorded[0])))


if __name__ == "__main__":
    run_main(main)
