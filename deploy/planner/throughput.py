"""Throughput and lag of a recipe, predicted for each bound and each split of the devices.

Each combination is a run in simulated time. Each of several engines is as fast as one alone;
several ranks share a batch's tokens and gain nothing on the time that a batch takes besides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp
from time import monotonic
from typing import Any

from deploy.config.run_config import RunConfig
from deploy.planner.rates import LearnerRates, Rates
from deploy.planner.simulator import Outcome, Setting, simulate
from deploy.report.staleness_window import BUSY
from deploy.report.summary import WARM_UP
from headway.errors import InputError
from queues.config import RunSpec

ROLLOUTS = 20_000
"""Approximate number of rollouts in a simulated run."""
FEWEST_STEPS, MOST_STEPS = 20, 60
MOST_SPLITS = 12
PROGRESS_SECONDS = 10.0
MOST_ACTORS = 1024
"""Engines of a simulated run; with this many, a plan of a few bounds takes a minute or two."""
REPLICATES = 39
"""Simulated runs of an interval; a further one is beyond their extremes in 2 of 40 cases."""
FIGURES = (
    "samples_per_second", "learner_idle", "actors_idle",
    "lag_mean", "lag_p50", "lag_p95", "lag_max",
)  # fmt: skip
"""Figures of an outcome that have an interval."""
Interval = list[float]
"""Lower end, median and upper end of a figure, which 95 % of runs are expected in."""
AS_GOOD = 0.99
"""A smaller bound that reaches this share of the largest throughput is the better choice."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """The prediction for one bound with one split."""

    actors: int
    ranks: int
    max_staleness: int
    outcome: Outcome
    ess: float | None
    """Share of the tokens that count; it falls with the square of the lag, as policies drift."""
    limit: str
    """The limit of the throughput: learner, actors, window or staleness."""


def predict(
    config: RunConfig,
    rates: Rates,
    *,
    bounds: Sequence[int],
    devices: int,
    report: Callable[[str], None] = lambda line: None,
) -> list[Prospect]:
    """Predict every bound with splits of the devices, by split and then by bound.

    Few splits are all tried. Of many, about MOST_SPLITS are tried, the recipe's own among them, and
    then those between the best one and its neighbours, until no split beside the best one is left.
    Every PROGRESS_SECONDS `report` gets a line. Raises InputError if the devices are too few or too
    many, or the recipe cannot be simulated.
    """
    prospects: dict[int, list[Prospect]] = {}
    untried = some_counts(most_actors(config, devices), config.actors.count)
    reported = monotonic()
    while untried:
        known = len(prospects) + len(untried)
        for actors in untried:
            ranks = devices - actors * config.actors.tensor_parallel_size
            prospects[actors] = predict_split(config, rates, actors, ranks, bounds)
            if (now := monotonic()) - reported >= PROGRESS_SECONDS:
                report(f"simulated {len(prospects)} of {known} splits of {devices} devices")
                reported = now
        chosen = best([prospect for split in prospects.values() for prospect in split])
        untried = between(sorted(prospects), chosen.actors)
    return [prospect for actors in sorted(prospects) for prospect in prospects[actors]]


def most_actors(config: RunConfig, devices: int) -> int:
    """Return the most engines that leave the learner a device; refuse none, or over MOST_ACTORS."""
    engine_devices = config.actors.tensor_parallel_size
    if devices <= engine_devices:
        raise InputError(
            f"{devices} devices are too few: an engine takes {engine_devices} "
            f"(actors.tensor_parallel_size) and the learner at least 1"
        )
    most = (devices - 1) // engine_devices
    if most > MOST_ACTORS:
        raise InputError(
            f"{devices} devices are too many: they hold up to {most} engines of {engine_devices} "
            f"(actors.tensor_parallel_size), and a plan simulates {MOST_ACTORS} at most"
        )
    return most


def some_counts(most: int, own: int) -> list[int]:
    """Return about MOST_SPLITS of the counts 1 to `most`, with both ends and `own` if in range."""
    shown = min(most, MOST_SPLITS)
    even = {1 + round(index * (most - 1) / max(1, shown - 1)) for index in range(shown)}
    return sorted(even | ({own} if own <= most else set()))


def between(tried: Sequence[int], middle: int) -> list[int]:
    """Return the counts halfway from `middle` to the next tried counts below and above."""
    pairs = [pair for pair in pairwise(tried) if middle in pair]
    return [(low + high) // 2 for low, high in pairs if high - low > 1]


def best(prospects: Sequence[Prospect]) -> Prospect:
    """Return the prospect of the largest throughput, or one within AS_GOOD with less staleness."""
    most = max(prospect.outcome.samples_per_second for prospect in prospects)
    as_good = [p for p in prospects if p.outcome.samples_per_second >= AS_GOOD * most]
    return min(as_good, key=lambda p: (p.max_staleness, -p.outcome.samples_per_second))


def setting_of(config: RunConfig, *, staleness: int, actors: int, last: int) -> Setting:
    """Return the setting of a recipe with a bound and actors, in which `last` batches are trained.

    All of them end while groups are still leased.
    """
    window = {"max_staleness": staleness, "window": config.window(actors), "ess_target": None}
    sync = config.weight_sync  # without staging, engines take a version one after the other
    swaps_at_once = max(1, int(sync.update_fraction * actors)) if sync.staged else 1
    return Setting(
        queues=config.queues.model_copy(update=window),
        spec=RunSpec(
            groups_per_batch=config.prompts.groups_per_batch,
            group_size=config.prompts.group_size,
            steps=last + staleness + 1,
            greedy_baseline=config.actors.greedy_baseline,
        ),
        engines=actors,
        slots=config.actors.max_concurrent_rollouts,
        swaps_at_once=swaps_at_once,
        beyond=staleness + 1,
    )


def setting_of_run(config: RunConfig, batches: int) -> Setting:
    """Return the setting of a recipe as it is, in which so many batches are trained."""
    queues, actors = config.queues, config.actors.count
    setting = setting_of(config, staleness=queues.bound, actors=actors, last=batches)
    if queues.max_staleness != "auto":
        return setting
    own = {"max_staleness": "auto", "ess_target": queues.ess_target}
    return replace(setting, queues=setting.queues.model_copy(update=own))


def counted_steps(config: RunConfig) -> int:
    """Return the number of batches that the figures of a simulated run are taken over."""
    return min(MOST_STEPS, max(FEWEST_STEPS, ROLLOUTS // samples_of(config)))


def samples_of(config: RunConfig) -> int:
    """Return the number of rollouts that a batch trains."""
    return config.prompts.groups_per_batch * config.prompts.group_size


def has_intervals(config: RunConfig) -> bool:
    """Return False for batches so large that REPLICATES simulated runs take minutes."""
    return samples_of(config) * FEWEST_STEPS <= ROLLOUTS


def turned_over(config: RunConfig, staleness: int, actors: int) -> Setting:
    """Return the setting of a recipe whose figures begin when the window has turned over."""
    warm_up = WARM_UP + min(staleness, MOST_STEPS)
    last = warm_up + counted_steps(config)
    setting = setting_of(config, staleness=staleness, actors=actors, last=last)
    return replace(setting, warm_up=warm_up)


def intervals(setting: Setting, rates: Rates, *, seed: int) -> dict[str, Interval]:
    """Return the interval of each of FIGURES, over runs by rates that are drawn from these."""
    outcomes = [
        simulate(setting, rates.resampled(setting.last, drawn), seed=drawn)
        for drawn in range(REPLICATES * seed, REPLICATES * (seed + 1))
    ]
    ordered = {name: sorted(getattr(it, name) for it in outcomes) for name in FIGURES}
    return {name: [it[0], it[REPLICATES // 2], it[-1]] for name, it in ordered.items()}


def split_intervals(
    config: RunConfig, rates: Rates, split: Prospect, bounds: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the intervals of every bound with the split of a prospect, none of large batches."""
    if not has_intervals(config):
        return []
    longest, actors, ranks = config.actors.max_new_tokens, split.actors, split.ranks
    rates = rates.shuffled(longest=longest, seed=config.seed).on_ranks(ranks)
    rows = []
    for bound in bounds:
        figures = intervals(turned_over(config, bound, actors), rates, seed=config.seed)
        rows.append({"actors": actors, "ranks": ranks, "max_staleness": bound, **figures})
    return rows


def predict_split(
    config: RunConfig, rates: Rates, actors: int, ranks: int, bounds: Sequence[int]
) -> list[Prospect]:
    """Predict every bound with one split, from the batches after the window has turned over."""
    rates = rates.shuffled(longest=config.actors.max_new_tokens, seed=config.seed).on_ranks(ranks)
    # the actors' time for a batch, with a learner that takes none and no bound
    most = WARM_UP + counted_steps(config)
    alone = setting_of(config, staleness=2 * most, actors=actors, last=most)
    alone = replace(alone, queues=alone.queues.model_copy(update={"window": None}))
    actors_alone = simulate(alone, replace(rates, learner=LearnerRates())).samples_per_second
    prospects = []
    for staleness in bounds:
        setting = turned_over(config, staleness, actors)
        outcome = simulate(setting, rates, seed=config.seed)
        if outcome.learner_idle < BUSY:
            limit = "learner"
        elif outcome.samples_per_second > (1 - BUSY) * actors_alone:
            limit = "actors"
        else:
            window = setting.queues.bounds(setting.spec).window(0)
            held = window / config.prompts.groups_per_batch
            limit = "window" if held < staleness + 1 else "staleness"
        loss = rates.ess_loss
        ess = None if loss is None else exp(-loss * outcome.lag_square_mean)
        prospects.append(Prospect(actors, ranks, staleness, outcome, ess, limit))
    return prospects
