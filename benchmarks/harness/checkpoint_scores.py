"""Held-out scores of the checkpoints of finished runs, by Headway's own actors and broker.

    python -m benchmarks.harness.checkpoint_scores TEMPERATURE RECIPE.json RUN...

Every checkpoint is published as a version of its own and scored on the first `heldout.size`
problems, at temperature 0 greedily, and the last of a run on the rest of `heldout.final_size` too:
points of a curve are of the same problems, and the last score is of more.
Writes `scores.json` of each run, and `initial_score.json` of their folder.
"""

import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.processes import Progress, run_main, run_with_progress
from benchmarks.harness.record import Record, store
from benchmarks.harness.training_runs import vary
from deploy.config.run_config import RunConfig
from deploy.errors import RunFailed
from deploy.storage.run_record import Score
from queues.records import Prompt

if TYPE_CHECKING:
    from benchmarks.harness.actor_fleet import Fleet
    from deploy.preflight.inputs import Inputs
    from queues.ray_broker import BrokerClient

SCORED = "scored.txt"
"""File in the folder of the runs with a line for each checkpoint scored by the present process."""
SCORES = "scores.json"
INITIAL = "initial_score.json"
RECIPE = "scores-recipe.json"
STAGED = {"transport": "shared_memory", "folder": None}
"""Settings by which checkpoints reach the actors in any case: no learner sends them."""
SECONDS = 600.0
"""Deadline of one evaluation."""


def score_runs(base: RunConfig, runs: Sequence[Path], *, temperature: float = 0.0) -> None:
    """Score the runs that have no scores yet, in another process; raises as `run_with_progress`."""
    out = base.deploy.runs_dir
    unscored = [run for run in runs if not (run / SCORES).exists()]
    if not unscored and (out / INITIAL).exists():
        return
    recipe, scored = out / RECIPE, out / SCORED
    recipe.write_text(vary(base, "scores", weight_sync=STAGED).model_dump_json(indent=2))
    scored.write_text("")
    worker = [sys.executable, "-m", "benchmarks.harness.checkpoint_scores", str(temperature)]
    total = sum(len(checkpoints(run)) for run in unscored) + 1
    title = f"scoring {total} checkpoints, the initial model included"
    progress = Progress(label="scores of checkpoints", title=title, lines=scored, total=total)
    run_with_progress([*worker, recipe, *unscored], out / "scores.log", progress)


def read_scores(run: Path) -> dict[int, Record]:
    """Return the scores of a run by version, with that of the initial model as version 0.

    A `score` is the mean of `scored` rollouts; `failed` others are left out. The last version of a
    run may have them of more problems too, as `final`.
    """
    initial = json.loads((run.parent / INITIAL).read_text())
    scores = json.loads((run / SCORES).read_text())
    return {0: initial, **{int(version): row for version, row in scores.items()}}


def learning(rows: Sequence[Record], scores: Mapping[int, Record], target: float | None) -> Record:
    """Return the held-out scores over seconds of training, the last one, and the target's time.

    `versions` and `scored` are those of the points of `curve`, which are of the same problems;
    `score` and `heldout` are of all final problems. Seconds are from the first wait for a batch to
    the step that made the version.
    """
    began = rows[0]["wait_started_at"]
    ends = {row["version"] + 1: row["step_finished_at"] - began for row in rows}
    versions = sorted(scores)
    curve = [(ends.get(version, 0.0), scores[version]["score"]) for version in versions]
    last = scores[versions[-1]].get("final", scores[versions[-1]])
    return {
        "score": last["score"],
        "seconds": curve[-1][0],
        "seconds_to_target": None if target is None else seconds_to(curve, target),
        "curve": curve,
        "versions": versions,
        "scored": [scores[version]["scored"] for version in versions],
        "heldout": {"scored": last["scored"], "failed": last["failed"]},
    }


def seconds_to(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return when a target is reached, interpolated between two points; None where it is not.

    A point is (seconds or batches, score).
    """
    for (before, least), (seconds, score) in pairwise([*curve[:1], *curve]):
        if score >= target:
            rise = score - least
            return before + (seconds - before) * (target - least) / rise if rise else seconds
    return None


def failures(runs: Sequence[Record]) -> list[str]:
    """Return a line for each run whose last score leaves out rollouts that failed."""
    scores = {
        f"{run['name']}, seed {run['seed']}": Score.of(run | run["heldout"])
        for run in runs
        if "heldout" in run
    }
    return [f"held-out score, {name}: {score}" for name, score in scores.items() if score.failed]


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return the versions of a finished run and their folders, in order."""
    folders = (run / "checkpoints").glob("v*")
    return sorted((int(folder.name[1:]), folder) for folder in folders)


async def write_scores(
    config: RunConfig,
    inputs: "Inputs",
    fleet: "Fleet",
    runs: Sequence[Path],
    *,
    temperature: float = 0.0,
    seconds: float = SECONDS,
) -> None:
    """Score every checkpoint with running actors; writes a run's file when all of it is scored.

    A run with a checkpoint that cannot be scored within `seconds` is named and gets no file.

    Raises:
        RunFailed: The initial model cannot be scored.
    """
    start, initial = Path(inputs.model_path), config.deploy.runs_dir / INITIAL
    assert config.heldout is not None
    usual, final = config.heldout.size, config.heldout.final_size or config.heldout.size
    versions = itertools.count(1)

    async def score(version: int, model: Path, first: int, end: int) -> Record:
        problems = inputs.prompts.problems[first:end]
        name = f"{'further' if first else 'score'}@{version}"
        try:
            async with asyncio.timeout(seconds):
                return await _score(fleet.broker, name, version, problems, temperature)
        except TimeoutError:
            raise RunFailed(
                f"{model}: {len(problems)} problems took longer than {seconds:g} s"
            ) from None
        except RunFailed as error:
            raise RunFailed(f"{model}: {error}") from None

    async def score_run(run: Path) -> None:
        scores: dict[int, Record] = {}
        for version, path in (folders := checkpoints(run)):
            await fleet.publish(published := next(versions), path)
            result = scores[version] = await score(published, path, 0, usual)
            if path == folders[-1][1] and final > usual:
                further = await score(published, path, usual, final)
                result = together(result, further)
                scores[version]["final"] = result
            print(f"{run.name} v{version}: {Score.of(result)}", flush=True)
            _note(config, path, result)
        store(scores, run / SCORES)

    await fleet.publish(0, start)
    if not initial.exists():
        store(result := await score(0, start, 0, usual), initial)
        _note(config, start, result)
    for run in runs:
        try:
            await score_run(run)
        except RunFailed as error:
            print(error, flush=True)


def _note(config: RunConfig, model: Path, result: Record) -> None:
    """Add a line to the file of progress."""
    with (config.deploy.runs_dir / SCORED).open("a") as scored:
        scored.write(f"{model} {Score.of(result)}\n")


def together(first: Record, second: Record) -> Record:
    """Return the score of the rollouts of two scores."""
    scored = first["scored"] + second["scored"]
    total = sum(part["score"] * part["scored"] for part in (first, second))
    failed = first["failed"] + second["failed"]
    return {"score": total / scored, "scored": scored, "failed": failed}


async def _score(
    broker: "BrokerClient",
    name: str,
    version: int,
    problems: Sequence[Prompt],
    temperature: float,
) -> Record:
    """Return the score of a published version, and the counts of what it is the mean of."""
    await broker.evaluate(name, problems, temperature=temperature, min_version=version)
    while (result := await broker.evaluation(name, timeout=10.0)) is None:
        pass
    if result.score is None:
        raise RunFailed(f"each of the {result.count} rollouts failed")
    if not result.lowest_version == result.highest_version == version:
        raise RunFailed(
            f"scored by versions {result.lowest_version} to {result.highest_version}, "
            f"and not by {version} alone"
        )
    scored = result.count - result.failed
    return {"score": result.score, "scored": scored, "failed": result.failed}


def main() -> None:
    from benchmarks.harness.actor_fleet import start_fleet
    from deploy.cluster.ray_cluster import cluster
    from deploy.preflight.inputs import load_inputs

    temperature, (recipe, *runs) = float(sys.argv[1]), map(Path, sys.argv[2:])
    config = RunConfig.model_validate_json(recipe.read_text())
    inputs = load_inputs(config)

    async def score_all(scratch: Path) -> None:
        versions = 1 + sum(len(checkpoints(run)) for run in runs)
        fleet = await start_fleet(config, inputs.model_path, scratch, config.flow, versions)
        await fleet.serve(scores=write_scores(config, inputs, fleet, runs, temperature=temperature))

    with tempfile.TemporaryDirectory() as scratch, cluster(config, Path(scratch)):
        asyncio.run(score_all(Path(scratch)))


if __name__ == "__main__":
    run_main(main)
