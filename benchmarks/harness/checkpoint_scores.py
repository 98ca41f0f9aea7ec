"""Held-out scores of the checkpoints of finished runs, by Headway's own actors and broker.

    python -m benchmarks.harness.checkpoint_scores RECIPE.json RUN...

Every checkpoint is published as a version of its own, the next one when all problems of the last
are scored, so a score belongs to one version. The last checkpoint of a run is scored on
`heldout.final_size` problems, the others on `heldout.size`, the same ones, greedily. Writes
`scores.json`, score by version, into each run's folder when its last checkpoint is scored. The
initial model, which all runs of a benchmark have in common, is scored once, into
`initial_score.json` of its folder. A recipe is that of one of the runs with a name of its own; only
its actors matter.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from benchmarks.harness.actor_fleet import Fleet, start_fleet
from benchmarks.harness.arms import variant
from benchmarks.harness.subprocesses import child, last_words
from deploy.cluster.ray_cluster import cluster
from deploy.config.run_config import RunConfig
from deploy.errors import DeployError, RunFailed
from deploy.preflight.inputs import Inputs, load_inputs
from queues.ray_broker import BrokerClient

SCORES = "scores.json"
STAGED = {"transport": "shared_memory", "folder": None}
"""How checkpoints reach the actors, whatever the runs have: there is no learner that could send."""
INITIAL = "initial_score.json"
SECONDS = 600.0
"""Deadline of one evaluation."""


def score_runs(base: RunConfig, runs: Sequence[Path], console: Console) -> None:
    """Scores runs that have no scores yet, in a process of its own.

    Args:
        base: The recipe of a benchmark, whose folder the runs are in.
        runs: Their folders.
        console: Told about it.

    Raises:
        RunFailed: It failed; names its log.
    """
    out = base.deploy.runs_dir
    unscored = [run for run in runs if not (run / SCORES).exists()]
    if not unscored and (out / INITIAL).exists():
        return
    console.print(f"{datetime.now():%H:%M:%S}  scoring the checkpoints of {len(unscored)} run(s)")
    recipe, log = out / "scores-recipe.json", out / "scores.log"
    recipe.write_text(variant(base, "scores", weight_sync=STAGED).model_dump_json(indent=2))
    command = [sys.executable, "-m", "benchmarks.harness.checkpoint_scores", recipe, *unscored]
    with log.open("a") as file, child(command, file) as process:
        process.wait()
    if process.returncode:
        raise RunFailed(
            f"scoring ended with exit code {process.returncode}: {last_words(log)}\n"
            f"its log is {log}"
        )


def read_scores(run: Path) -> dict[int, float]:
    """Scores of a run by version, that of the initial model before them."""
    initial = json.loads((run.parent / INITIAL).read_text())
    scores = json.loads((run / SCORES).read_text())
    return {0: initial, **{int(version): score for version, score in scores.items()}}


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Versions of a finished run and their folders, in order."""
    found = (run / "checkpoints").glob("v*")
    return sorted((int(folder.name[1:]), folder) for folder in found)


def score_all(config: RunConfig, inputs: Inputs, runs: list[Path]) -> None:
    """Scores every checkpoint of every run."""
    with tempfile.TemporaryDirectory() as scratch, cluster(config, Path(scratch)):
        asyncio.run(_score_all(config, inputs, runs, Path(scratch)))


async def _score_all(config: RunConfig, inputs: Inputs, runs: list[Path], scratch: Path) -> None:
    versions = 1 + sum(len(checkpoints(run)) for run in runs)
    fleet = await start_fleet(config, inputs, scratch, config.flow, versions)
    await fleet.serve(scores=write_scores(config, inputs, fleet, runs))


async def write_scores(
    config: RunConfig, inputs: Inputs, fleet: Fleet, runs: Sequence[Path]
) -> None:
    """Scores what `score_all` does, with actors that are there; a run's file when all of it is.

    Raises:
        RunFailed: A checkpoint could not be scored; names it.
    """
    start, initial = Path(inputs.model_path), config.deploy.runs_dir / INITIAL
    await fleet.publish(0, start)
    if not initial.exists():
        score = await _score(config, inputs, fleet.broker, 0, start, last=False)
        initial.write_text(json.dumps(score))
    place = 0
    for run in runs:
        scores = {}
        for version, path in (stations := checkpoints(run)):
            place += 1
            await fleet.publish(place, path)
            last = path == stations[-1][1]
            scores[version] = await _score(config, inputs, fleet.broker, place, path, last=last)
            print(f"{run.name} v{version}: {scores[version]:.4f}", flush=True)
        (run / SCORES).write_text(json.dumps(scores) + "\n")


async def _score(
    config: RunConfig, inputs: Inputs, broker: BrokerClient, place: int, model: Path, *, last: bool
) -> float:
    """The score of a model folder that was published as version `place`."""
    if config.heldout is None:
        raise RunFailed(f"{model}: the recipe {config.name} has no [heldout] to score by")
    size = (config.heldout.final_size if last else None) or config.heldout.size
    name = f"greedy@{place}"
    await broker.evaluate(name, inputs.problems[:size], temperature=0.0, min_version=place)
    try:
        async with asyncio.timeout(SECONDS):
            while (found := await broker.evaluation(name, timeout=10.0)) is None:
                pass
    except TimeoutError:
        raise RunFailed(f"{model}: {size} problems took longer than {SECONDS:g} s") from None
    if found.score is None:
        raise RunFailed(f"{model}: each of the {found.count} rollouts failed")
    if not found.lowest_version == found.highest_version == place:
        raise RunFailed(
            f"{model}: scored by versions {found.lowest_version} to {found.highest_version}, "
            f"and not by {place} alone"
        )
    return found.score


def main() -> None:
    recipe, *runs = map(Path, sys.argv[1:])
    config = RunConfig.model_validate_json(recipe.read_text())
    try:
        score_all(config, load_inputs(config), runs)
    except DeployError as error:
        print(f"headway: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
