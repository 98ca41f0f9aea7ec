"""Predictions of a run by its own first batches, beside what happened."""

from collections import Counter
from dataclasses import replace
from typing import Any

from deploy.config.run_config import RunConfig
from deploy.planner.calibration import leased_batches, read_rates, rollouts_of
from deploy.planner.caveats import caveats
from deploy.planner.simulator import lag_figures
from deploy.planner.throughput import (
    counted_steps,
    has_intervals,
    intervals,
    samples_of,
    setting_of_run,
)
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError

EARLY = 20
"""Batches that a run is predicted from."""


def look_back(directory: RunDirectory, config: RunConfig) -> dict[str, Any]:
    """Predict a session from its first EARLY batches; return figures with what they came to.

    Throughput and lag are those of the later batches, until nothing is left to lease, of which no
    more are simulated than for a plan; where there were more, the largest lag is left out, as it
    grows with their number. `seconds` are those of the whole session. Raises InputError if it is
    too short or too large, or cannot be simulated.
    """
    trained, leased = leased_batches(directory)
    later = leased[EARLY:]
    lags: Counter[int] = Counter()
    for batch in later:
        lags.update(batch.report.lag_histogram)
    if len(later) < 2 or not lags or not has_intervals(config):
        raise InputError(
            f"{directory.path} has trained too few batches after the first {EARLY}, or too large "
            "ones to simulate them often"
        )
    simulated = min(len(leased), EARLY + counted_steps(config))
    setting = setting_of_run(config, simulated)
    measured = read_rates(directory, first=EARLY)
    predicted = intervals(replace(setting, warm_up=EARLY), measured.rates, seed=config.seed)
    begun, at = trained[0].times.wait_started_at, leased[EARLY - 1].times.step_finished_at
    left, speeds = samples_of(config) * (len(trained) - EARLY), predicted["samples_per_second"]
    predicted["seconds"] = [at - begun + left / speed for speed in reversed(speeds)]
    seconds = later[-1].times.step_finished_at - at
    happened = {
        "seconds": trained[-1].times.step_finished_at - begun,
        "samples_per_second": sum(rollouts_of(batch.report) for batch in later) / seconds,
        "learner_idle": sum(batch.times.wait_seconds for batch in later) / seconds,
        **lag_figures(lags),
    }
    if simulated < len(leased):
        del happened["lag_max"]
    figures = {
        name: {"predicted": predicted[name], "happened": value} for name, value in happened.items()
    }
    evaluated = config.heldout is not None and config.heldout.every < config.steps
    doubts = caveats(measured, config, bounds=[config.queues.bound], evaluated=evaluated)
    return {"batches": EARLY, "figures": figures, "doubts": doubts}
