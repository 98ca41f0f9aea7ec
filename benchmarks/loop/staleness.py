"""Throughput against off-policyness: what each bound costs and gains, and what correction buys.

    headway bench staleness [RECIPE] [--bounds 0,2,inf] [--seeds 0,1,2] [--corrections none,cispo]

Runs from one warm start at every bound, and at the bound of --stale with each correction and as
many groups in the engines as it allows. Checkpoints are scored afterwards, and throughput stands
beside the simulation of `headway plan`. An existing folder of --out is continued.

Without actors.cores and learner.cores in the recipe, the learner gets half of this machine's cores
and the engines share the others. The picture, as PNG and SVG, shows throughput over η and over the
measured mean lag, 1 − effective sample size and KL.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from benchmarks.harness.comparison import Comparison, ScoredOptions, measure_scored, scored_plan
from benchmarks.harness.record import Record
from benchmarks.harness.study import Study, name_of, number, several
from benchmarks.harness.training_runs import Arm, vary
from benchmarks.loop import comparison_report
from benchmarks.loop.comparison_report import BOUND, CORRECTION, UNBOUNDED
from benchmarks.loop.run_figures import read_run
from deploy.config.run_config import RunConfig
from deploy.planner.calibration import LEAST_BATCHES, read_rates
from deploy.planner.rates import Rates
from deploy.planner.throughput import predict_split
from headway.errors import HeadwayError, InputError

CORRECTIONS: Mapping[str, dict[str, Any]] = {
    "none": {"loss": "reinforce"},
    "tis": {"loss": "reinforce", "correction": "tis"},
    "cispo": {"loss": "cispo"},
    "decoupled_ppo": {"loss": "decoupled_ppo"},
}
"""Settings of [learner]; `none` trains stale tokens as if they were new."""
PLAIN = {"correction": "none", "loss_options": {}, "correction_options": {}}
REFERENCE = "2"
"""The bound whose runs the predictions are made from; the largest one where it is not asked for."""


def bound(text: str) -> str:
    """Parse a bound: a whole number, or no bound; raises `typer.BadParameter`."""
    return text if text == UNBOUNDED else str(number(0)(text))


class StalenessOptions(ScoredOptions):
    """Options of `headway bench staleness`."""

    bounds: Annotated[
        Sequence[str], several(bound, f"Values of max_staleness; {UNBOUNDED}: none.")
    ] = ("0", "1", "2", "4", "8", "16", UNBOUNDED)
    corrections: Annotated[
        Sequence[str], several(name_of(CORRECTIONS), "Compared at --stale; '': none.")
    ] = tuple(CORRECTIONS)
    stale: Annotated[int, typer.Option(min=1, help="Bound of the runs with corrections.")] = 8

    @property
    def reference(self) -> str:
        """The bound whose runs the predictions are made from."""
        largest = max(self.bounds, key=lambda bound: bound_in_steps(bound, sys.maxsize))
        return REFERENCE if REFERENCE in self.bounds else largest


def plan(options: StalenessOptions) -> Comparison[StalenessOptions]:
    """Return the runs of every seed; raises `InputError` where they cannot be measured."""
    bounds = sorted(options.bounds, key=lambda bound: bound_in_steps(bound, sys.maxsize))

    def arms_of(base: RunConfig) -> list[Arm]:
        corrections = (correction_arm(base, name, options.stale) for name in options.corrections)
        return [*(bound_arm(base, bound) for bound in bounds), *corrections]

    plan = scored_plan(options, "staleness", arms_of)
    unleased = 1 + (options.stale if options.corrections else 0)
    if plan.base.steps < LEAST_BATCHES + unleased:
        raise InputError(
            f"--steps {plan.base.steps} must be at least {LEAST_BATCHES + unleased}: figures need "
            f"{LEAST_BATCHES} batches, and the last {unleased} of a run are trained when nothing "
            "is leased any more"
        )
    return plan


def bound_in_steps(bound: str, steps: int) -> int:
    """Return `max_staleness` of a bound; a run has no larger lag than its steps."""
    return steps if bound == UNBOUNDED else int(bound)


def unhindered(config: RunConfig, eta: int) -> dict[str, Any]:
    """Return [queues] with a bound, and with room for all the live groups that it allows."""
    return {"max_staleness": eta, "window": (eta + 1) * config.prompts.groups_per_batch}


def bound_arm(base: RunConfig, bound: str) -> Arm:
    """Return the recipe with another bound."""
    queues = unhindered(base, bound_in_steps(bound, base.steps))
    config = vary(base, f"eta{bound}-seed{base.seed}", queues=queues)
    return Arm(name=bound, seed=base.seed, config=config, kind=BOUND)


def correction_arm(base: RunConfig, name: str, eta: int) -> Arm:
    """Return the recipe with another loss, as stale as η allows."""
    queues = unhindered(base, eta)
    rollouts = queues["window"] * base.prompts.group_size
    config = vary(
        base,
        f"{name}-eta{eta}-seed{base.seed}",
        queues={**queues, "allow_uncorrected": True},
        learner={**PLAIN, **CORRECTIONS[name]},
        actors={"max_concurrent_rollouts": -(-rollouts // base.actors.count)},
    )
    return Arm(name=name, seed=base.seed, config=config, kind=CORRECTION)


def measure(plan: Comparison[StalenessOptions]) -> Iterator[Record]:
    for runs in measure_scored(plan, read_arm):
        yield {
            **runs,
            "stale": plan.options.stale,
            "reference": plan.options.reference,
            "predictions": predict_seeds(plan, runs["arms"]),
        }


def read_arm(arm: Arm) -> Record:
    """Return the figures of a run, of its batches before the last lease."""
    return read_run(arm.directory, leased_only=True)


def predict_seeds(plan: Comparison[StalenessOptions], figures: Sequence[Record]) -> list[Record]:
    """Predict the throughput of every measured bound by the rates of its seed's reference run."""
    measured = {(run["name"], run["seed"]) for run in figures if run["kind"] == BOUND}
    every = [arm for arms in plan.arms for arm in arms if arm.kind == BOUND]
    bounds = [arm for arm in every if (arm.name, arm.seed) in measured]
    references = [arm for arm in bounds if arm.name == plan.options.reference]
    try:
        rates_of = {arm.seed: read_rates(arm.directory).rates for arm in references}
        return [predict(arm, rates_of[arm.seed]) for arm in bounds if arm.seed in rates_of]
    except HeadwayError as error:
        print(f"nothing is predicted: {error}", flush=True)
        return []


def predict(arm: Arm, rates: Rates) -> Record:
    """Return the figures of a run that rates of its own ranks predict."""
    queues, actors, ranks = arm.config.queues, arm.config.actors.count, arm.config.learner.ranks
    rates = replace(rates, ranks=ranks)
    [prospect] = predict_split(arm.config, rates, actors, ranks, [queues.max_staleness])
    return {
        "name": arm.name,
        "seed": arm.seed,
        "simulated": prospect.outcome.samples_per_second,
        "lag_mean": prospect.outcome.lag_mean,
        "ess": prospect.ess,
    }


STUDY = Study(
    name="staleness",
    options=StalenessOptions,
    plan=plan,
    in_folder=True,
    continued=True,
    measure=measure,
    conclude=lambda record: {"conclusions": comparison_report.conclude(record)},
    table=comparison_report.table,
    figures=comparison_report.draw,
)
