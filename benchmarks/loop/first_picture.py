"""The steps with which all runs of a comparison fit into a time, from one short run."""

import time
from math import floor
from pathlib import Path

from benchmarks.harness.checkpoint_scores import INITIAL, RECIPE, SCORES
from benchmarks.harness.comparison import Comparison, Scored
from benchmarks.harness.training_runs import BATCHES, Arm, TrainingRuns
from deploy.planner.calibration import LEAST_BATCHES
from deploy.report.summary import WARM_UP
from headway.errors import InputError

SCORES_OF_RUN = 5
"""Checkpoints of each run that are scored."""
SAFE = 0.9
"""Share of the time that is planned."""


def fitted_steps(plan: Comparison[Scored], arm: Arm, seconds: float, least: int) -> int:
    """Return the steps of every run with which all of them, and their scores, take some seconds.

    Trains and scores the slowest arm for a few steps first, which counts. More steps than the
    recipe has are never returned. Times are those of files, as an interrupted comparison goes on.

    Raises:
        InputError: The time is too short for `least` steps.
        RunFailed: The arm failed.
    """
    began, folder = time.time(), plan.folder
    short = arm.config.model_copy(update={"name": "short-run", "steps": LEAST_BATCHES})
    arm = Arm(name=arm.name, kind=arm.kind, title="short run", config=short)
    plan.make_warm_start()
    if not arm.is_finished():
        TrainingRuns(1).run(arm)
    plan.score([arm])
    rows = arm.directory.rows(BATCHES)
    begun, done = _written(arm.file(".environment.json")), _written(arm.directory.summary_file)
    called, ready = _written(folder / RECIPE), _written(folder / INITIAL)
    scored = _written(arm.directory.path / SCORES)
    trained = rows[-1]["step_finished_at"] - rows[0]["wait_started_at"]
    step = (rows[-1]["step_finished_at"] - rows[WARM_UP - 1]["step_finished_at"]) / (
        len(rows) - WARM_UP
    )
    runs, parts = sum(map(len, plan.arms)), sum(map(bool, plan.arms))
    start, score = done - begun - trained, scored - max(called, ready)
    fixed = runs * (start + SCORES_OF_RUN * score) + parts * max(0.0, ready - called)
    left = SAFE * (seconds - (time.time() - began)) - fixed
    steps: int = min(plan.base.steps, floor(left / (runs * step)))
    if steps < least:
        needed = (runs * step * least + fixed) / SAFE + time.time() - began
        raise InputError(
            f"{runs} runs of {max(steps, 0)} steps fit into --minutes {seconds / 60:g}, and "
            f"figures need {least}: give --minutes {needed / 60 + 1:.0f}, or fewer --bounds"
        )
    print(f"{steps} steps of {step:.2f} s at most: {runs} runs fit into {seconds / 60:g} min")
    return steps


def _written(file: Path) -> float:
    """Return when a file was written, in seconds of the epoch."""
    return file.stat().st_mtime
