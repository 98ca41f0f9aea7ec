"""Held-out scores of the checkpoints of finished runs, by Headway's own actors and broker.

    python -m benchmarks.checkpoint_scores RECIPE.json RUN...

Every checkpoint is published as a version of its own, the next one when all problems of the last
are scored, so a score belongs to one version. The last checkpoint of a run is scored on
`heldout.final_size` problems, the others on `heldout.size`, the same ones, greedily. Writes
`scores.json` into each run's folder: score by version. The initial model, which all runs of a
benchmark have in common, is scored once, into `initial_score.json` of its folder. A recipe is that
of one of the runs with a name of its own; only its actors matter.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from benchmarks.arms import variant
from benchmarks.children import child
from benchmarks.fleet import start_fleet
from deploy.cluster import cluster
from deploy.config import RunConfig
from deploy.errors import RunFailed
from deploy.inputs import Inputs, load_inputs
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
    command = [sys.executable, "-m", "benchmarks.checkpoint_scores", recipe, *unscored]
    with log.open("a") as file, child(command, file) as process:
        process.wait()
    if process.returncode:
        raise RunFailed(f"scoring ended with exit code {process.returncode}; its log is {log}")


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
    initial = config.deploy.runs_dir / INITIAL
    stations = [(run, version, path) for run in runs for version, path in checkpoints(run)]
    fleet = await start_fleet(config, inputs, scratch, config.flow, 1 + len(stations))

    async def follow() -> None:
        await fleet.publish(0, Path(inputs.model_path))
        if not initial.exists():
            initial.write_text(json.dumps(await _score(config, inputs, fleet.broker, 0, False)))
        found: dict[Path, dict[int, float]] = {run: {} for run in runs}
        for place, (run, version, path) in enumerate(stations, start=1):
            await fleet.publish(place, path)
            last = (version, path) == checkpoints(run)[-1]
            score = await _score(config, inputs, fleet.broker, place, last)
            found[run][version] = score
            print(f"{run.name} v{version}: {score:.4f}", flush=True)
        for run, scores in found.items():
            (run / SCORES).write_text(json.dumps(scores) + "\n")

    await fleet.serve(scores=follow())


async def _score(
    config: RunConfig, inputs: Inputs, broker: BrokerClient, place: int, last: bool
) -> float:
    assert config.heldout is not None
    size = (config.heldout.final_size if last else None) or config.heldout.size
    name = f"greedy@{place}"
    await broker.evaluate(name, inputs.problems[:size], temperature=0.0, min_version=place)
    async with asyncio.timeout(SECONDS):
        while (found := await broker.evaluation(name, timeout=10.0)) is None:
            pass
    assert found.score is not None, f"every rollout of {name} failed"
    assert found.lowest_version == found.highest_version == place
    return found.score


def main() -> None:
    recipe, *runs = map(Path, sys.argv[1:])
    config = RunConfig.model_validate_json(recipe.read_text())
    score_all(config, load_inputs(config), runs)


if __name__ == "__main__":
    main()
