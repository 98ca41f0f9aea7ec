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
from typing import Any

from benchmarks.harness.checkpoint_scores import last_failed, measure_variants, read_scores
from benchmarks.harness.cores import describe_devices
from benchmarks.harness.study import Options, Record, Study, known_names, option, whole_numbers
from benchmarks.harness.training_runs import SCORED, Variant, make_base, vary
from benchmarks.loop import staleness_report
from benchmarks.loop.run_figures import (
    actors_idle,
    curve,
    learning,
    off_policyness,
    tokens_per_rollout,
    window,
)
from benchmarks.loop.staleness_report import UNBOUNDED
from deploy.config.run_config import RunConfig
from deploy.planner.calibration import LEAST_BATCHES, read_rates
from deploy.planner.rates import Rates
from deploy.planner.throughput import predict_split
from deploy.report.report import read_record
from deploy.report.summary import WARM_UP
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


def check(options: Options) -> None:
    """Check the options and the recipe; sets `base`, `variants` by seed, and `reference`.

    Raises:
        InputError: Something cannot be measured.
    """
    asked = whole_numbers(options.bounds, "--bounds", or_else=UNBOUNDED)
    bounds = sorted(asked, key=lambda bound: bound_in_steps(bound, sys.maxsize))
    seeds = [int(seed) for seed in whole_numbers(options.seeds, "--seeds")]
    corrections = known_names(options.corrections, "--corrections", CORRECTIONS)
    if options.stale < 1:
        raise InputError(f"--stale {options.stale} must be at least 1")
    base = make_base(options, "staleness")
    unleased = 1 + (options.stale if corrections else 0)
    if base.steps < LEAST_BATCHES + unleased:
        raise InputError(
            f"--steps {base.steps} must be at least {LEAST_BATCHES + unleased}: figures need "
            f"{LEAST_BATCHES} batches, and the last {unleased} of a run are trained when nothing "
            "is leased any more"
        )
    options.base, options.variants = base, []
    options.reference = REFERENCE if REFERENCE in bounds else bounds[-1]
    for position, seed in enumerate(seeds):
        seeded = base.model_copy(update={"seed": seed})
        variants = [bound_variant(seeded, bound) for bound in bounds]
        variants += [correction_variant(seeded, name, options.stale) for name in corrections]
        options.variants.append(variants if position % 2 == 0 else variants[::-1])


def bound_in_steps(bound: str, steps: int) -> int:
    """Return `max_staleness` of a bound; a run has no larger lag than its steps."""
    return steps if bound == UNBOUNDED else int(bound)


def live_groups(config: RunConfig, eta: int) -> int:
    """Return as many live groups as a bound allows, so that the window does not hold them back."""
    return (eta + 1) * config.prompts.groups_per_batch


def bound_variant(base: RunConfig, bound: str) -> Variant:
    eta = bound_in_steps(bound, base.steps)
    queues = {"max_staleness": eta, "window": live_groups(base, eta)}
    config = vary(base, f"eta{bound}-seed{base.seed}", queues=queues)
    return Variant(bound, base.seed, config, kind="bound")


def correction_variant(base: RunConfig, name: str, eta: int) -> Variant:
    """Return the recipe with another loss, as stale as η allows."""
    live = live_groups(base, eta)
    config = vary(
        base,
        f"{name}-eta{eta}-seed{base.seed}",
        queues={"max_staleness": eta, "window": live, "allow_uncorrected": True},
        learner={**PLAIN, **CORRECTIONS[name]},
        actors={"max_concurrent_rollouts": -(-live * base.prompts.group_size // base.actors.count)},
    )
    return Variant(name, base.seed, config, kind="correction")


def measure(options: Options) -> Iterator[Record]:
    for runs in measure_variants(options, read_variant):
        yield {
            **runs,
            "devices": describe_devices(options.base),
            "stale": options.stale,
            "reference": options.reference,
            "predictions": predict_seeds(options, runs["arms"]),
        }


def read_variant(variant: Variant, target: float) -> Record:
    directory = variant.directory
    batches = [batch.to_dict() for batch in read_record(directory).batches]
    measured = read_rates(directory)
    rows = [row for row in batches if measured.first <= row["version"] <= measured.last]
    begin, end = window(rows)
    scores = curve(batches, read_scores(directory.path))
    tokens = sum(row["tokens_trained"] for row in rows[WARM_UP:])
    return {
        "kind": variant.kind,
        "name": variant.name,
        "seed": variant.seed,
        "environment": variant.environment(),
        "first_version": rows[WARM_UP]["version"],
        "batches": len(rows) - WARM_UP,
        "samples_per_second": measured.samples_per_second,
        "tokens_per_second": tokens / (end - begin),
        "tokens_per_rollout": tokens_per_rollout(rows),
        "learner_idle": measured.learner_idle,
        "actors_idle": actors_idle(directory, rows, len(batches)),
        **off_policyness(rows),
        "lag_max": max(row["max_lag"] for row in batches if row["tokens_trained"]),
        **learning(scores, target),
        "heldout": last_failed(directory.path),
    }


def predict_seeds(options: Options, figures: Sequence[Record]) -> list[Record]:
    """Predict the throughput of every measured bound by the rates of its seed's reference run."""
    measured = {(run["name"], run["seed"]) for run in figures if run["kind"] == "bound"}
    bounds = [
        variant
        for variants in options.variants
        for variant in variants
        if variant.kind == "bound" and (variant.name, variant.seed) in measured
    ]
    predictions = []
    try:
        for reference in (variant for variant in bounds if variant.name == options.reference):
            measured_rates = read_rates(reference.directory).rates
            rates = replace(measured_rates, ranks=options.base.learner.ranks)
            predictions += [
                predict(variant, rates) for variant in bounds if variant.seed == reference.seed
            ]
    except HeadwayError as error:
        print(f"nothing is predicted: {error}", flush=True)
        return []
    return predictions


def predict(variant: Variant, rates: Rates) -> Record:
    config = variant.config
    actors, ranks, bound = config.actors.count, config.learner.ranks, config.queues.max_staleness
    [prospect] = predict_split(config, rates, actors, ranks, [bound])
    return {
        "name": variant.name,
        "seed": variant.seed,
        "simulated": prospect.outcome.samples_per_second,
        "lag_mean": prospect.outcome.lag_mean,
        "ess": prospect.ess,
    }


STUDY = Study(
    name="staleness",
    about=__doc__,
    options=(
        *SCORED,
        option("--bounds", "0,1,2,4,8,16,inf", "of max_staleness"),
        option("--corrections", ",".join(CORRECTIONS), "'' for none of them"),
        option("--stale", 8, "bound of the runs with other corrections"),
        option("--score-every", 25, "steps between scores"),
    ),
    check=check,
    in_folder=True,
    continued=True,
    folder=None,
    file="staleness.json",
    measure=measure,
    conclude=lambda record: {"conclusions": staleness_report.conclude(record)},
    table=staleness_report.table,
    figures=staleness_report.draw,
)
