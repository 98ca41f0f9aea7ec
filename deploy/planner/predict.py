"""What a recipe's throughput and lag will be, for each bound and each split of the devices.

Each combination is a run in simulated time (`deploy.planner.simulator`), beside what the
finite-buffer law says (`deploy.planner.buffer_law`). An engine takes `actors.tensor_parallel_size`
devices, whatever they are, a rank of the learner one. More engines are as fast as one each; more
ranks share a batch's tokens out and gain nothing on what a batch takes besides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp
from statistics import fmean, pstdev

from deploy.config.run_config import RunConfig
from deploy.errors import InputError
from deploy.planner.buffer_law import Phase, batches_per_second
from deploy.planner.rates import LearnerRates, Rates
from deploy.planner.simulator import Outcome, Setting, simulate
from deploy.report.summary import WARM_UP
from queues.policy.admission import Bounds

ROLLOUTS = 20_000
"""Of a simulated run, about."""
FEWEST_STEPS, MOST_STEPS = 20, 60
MOST_SPLITS = 12
MOST_ACTORS = 1024
"""Engines of a simulated run: every one costs each batch some 10 µs, so that a plan of some bounds
takes a minute or two with as many."""
BUSY = 0.05
"""A side that idles less than this share of the time is what limits the throughput."""
AS_GOOD = 0.99
"""Of the largest throughput: a smaller bound that reaches this much is the better choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Rates, and the size of the learner that they are of."""

    rates: Rates
    ranks: int
    ess_loss: float | None = None
    """−ln ESS per squared version of lag (`calibration`); None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """One bound with one split."""

    staleness: int
    actors: int
    ranks: int
    outcome: Outcome
    law: float
    """Samples/s by the finite-buffer law."""
    actors_alone: float
    """Samples/s of these actors if the learner took no time."""
    learner_alone: float
    """Samples/s of this learner if batches were always ready."""
    windowed: bool
    """Whether the window holds fewer batches than the bound would allow."""
    ess: float | None
    """As a fraction; it falls with the square of the lag, since policies drift apart."""

    @property
    def samples_per_second(self) -> float:
        """Predicted."""
        return self.outcome.samples_per_second

    @property
    def limit(self) -> str:
        """What its throughput is limited by: learner, actors, window, or staleness.

        The last two where neither side is always busy: batches wait for rollouts that take long,
        and no others may begin meanwhile.
        """
        if self.outcome.learner_idle < BUSY:
            return "learner"
        if self.samples_per_second > (1 - BUSY) * self.actors_alone:
            return "actors"
        return "window" if self.windowed else "staleness"


def predict(
    config: RunConfig, source: Source, *, bounds: Sequence[int], devices: int
) -> list[Prospect]:
    """Every bound with splits of the devices, by split and then by bound.

    All splits where they are few. Of many some, the recipe's own among them, and then those between
    the best one and the next ones that were tried, until the best one's neighbours were.

    Args:
        config: The recipe; its own bound is left out of account.
        source: How fast everything is.
        bounds: Values of `queues.max_staleness`.
        devices: That actors and learner share.

    Raises:
        InputError: The devices are too few or too many, or the recipe cannot be simulated.
    """
    each, most = config.actors.tensor_parallel_size, most_actors(config, devices)
    found: dict[int, list[Prospect]] = {}
    chosen = some_counts(most, config.actors.count)
    while chosen:
        for actors in chosen:
            ranks = devices - actors * each
            found[actors] = _prospects(config, source, actors, ranks, bounds)
        known = best([prospect for tried in found.values() for prospect in tried])
        chosen = between(sorted(found), known.actors)
    return [prospect for actors in sorted(found) for prospect in found[actors]]


def predict_own(config: RunConfig, source: Source) -> Prospect:
    """The recipe as it is: its own bound, actors and ranks.

    Raises:
        InputError: It cannot be simulated.
    """
    actors, ranks = config.actors.count, config.learner.ranks
    return _prospects(config, source, actors, ranks, [config.queues.max_staleness])[0]


def most_actors(config: RunConfig, devices: int) -> int:
    """Engines that leave the learner a device; each smaller count is a split too.

    Raises:
        InputError: There are none, or more than MOST_ACTORS.
    """
    each = config.actors.tensor_parallel_size
    if devices <= each:
        raise InputError(
            f"{devices} devices are too few: an engine takes {each} "
            f"(actors.tensor_parallel_size) and the learner at least 1"
        )
    most = (devices - 1) // each
    if most > MOST_ACTORS:
        raise InputError(
            f"{devices} devices are too many: they hold up to {most} engines of {each} "
            f"(actors.tensor_parallel_size), and a plan simulates {MOST_ACTORS} at most"
        )
    return most


def some_counts(most: int, own: int) -> list[int]:
    """About MOST_SPLITS of the counts 1 to `most`, with both ends and `own`, if it is one."""
    shown = min(most, MOST_SPLITS)
    even = {1 + round(place * (most - 1) / max(1, shown - 1)) for place in range(shown)}
    return sorted(even | ({own} if own <= most else set()))


def between(tried: Sequence[int], middle: int) -> list[int]:
    """Halfway from one of the tried counts to the next ones below and above, where some are left.

    Example:
        >>> between([1, 4, 9, 10], 4)
        [2, 6]
    """
    place = tried.index(middle)
    pairs = pairwise(tried[max(0, place - 1) : place + 2])
    return [(low + high) // 2 for low, high in pairs if high - low > 1]


def best(prospects: Sequence[Prospect]) -> Prospect:
    """The largest throughput, or what reaches AS_GOOD of it with less staleness."""
    most = max(each.samples_per_second for each in prospects)
    as_good = [each for each in prospects if each.samples_per_second >= AS_GOOD * most]
    return min(as_good, key=lambda each: (each.staleness, -each.samples_per_second))


def setting_of(
    config: RunConfig, *, staleness: int, actors: int, steps: int, beyond: int = 0
) -> Setting:
    """A run of the recipe with another bound, other actors and other steps."""
    shaped = config.model_copy(
        update={
            "actors": config.actors.model_copy(update={"count": actors}),
            "queues": config.queues.model_copy(update={"max_staleness": staleness}),
        }
    )
    queues = shaped.flow
    return Setting(
        bounds=Bounds(
            max_staleness=staleness,
            groups_per_batch=config.prompts.groups_per_batch,
            steps=steps,
            most_live=queues.window,
            on_overdue=queues.on_overdue,
        ),
        group_size=config.prompts.group_size,
        baseline=config.actors.greedy_baseline,
        engines=actors,
        slots=config.actors.max_concurrent_rollouts,
        swaps_at_once=(
            max(1, int(config.weight_sync.update_fraction * actors))
            if config.weight_sync.staged
            else 1  # the learner brings a version to one engine after the other
        ),
        patience_seconds=queues.patience_seconds,
        queued_batches=queues.queued_batches,
        most_filtered=queues.max_filtered_batches * config.prompts.groups_per_batch
        if queues.filter_tied
        else None,
        beyond=beyond,
    )


def setting_of_run(config: RunConfig, batches: int) -> Setting:
    """A run of the recipe as it is, of which so many batches end while groups are leased."""
    bound = config.queues.max_staleness
    beyond = bound + 1
    return setting_of(
        config,
        staleness=bound,
        actors=config.actors.count,
        steps=batches + beyond,
        beyond=beyond,
    )


def _prospects(
    config: RunConfig, source: Source, actors: int, ranks: int, bounds: Sequence[int]
) -> list[Prospect]:
    """Every bound with one split; figures are of batches after the window has turned over once."""
    rates = source.rates.at_most(config.actors.max_new_tokens).shuffled(config.seed)
    rates = replace(rates, learner=rates.learner.on(ranks / source.ranks))
    samples = config.prompts.groups_per_batch * config.prompts.group_size
    counted = min(MOST_STEPS, max(FEWEST_STEPS, ROLLOUTS // samples))
    generate = _generation(config, rates, actors, WARM_UP + counted)
    found = []
    for staleness in bounds:
        warm_up, beyond = WARM_UP + min(staleness, MOST_STEPS), staleness + 1
        setting = setting_of(
            config, staleness=staleness, actors=actors, steps=warm_up + counted + beyond
        )
        setting = replace(setting, warm_up=warm_up, beyond=beyond)
        outcome = simulate(setting, rates, seed=config.seed)
        train = _phase(outcome.step_seconds, _besides(rates.learner))
        window = setting.bounds.window(0) / config.prompts.groups_per_batch
        loss = source.ess_loss
        found.append(
            Prospect(
                staleness=staleness,
                actors=actors,
                ranks=ranks,
                outcome=outcome,
                law=samples * batches_per_second(generate, train, live=window),
                actors_alone=samples / generate.seconds,
                learner_alone=samples / train.seconds,
                windowed=window < staleness + 1,
                ess=None if loss is None else exp(-loss * outcome.lag_square_mean),
            )
        )
    return found


def _generation(config: RunConfig, rates: Rates, actors: int, steps: int) -> Phase:
    """The actors' time for a batch, for a learner that takes none and a bound that never holds."""
    setting = setting_of(config, staleness=2 * steps, actors=actors, steps=2 * steps, beyond=steps)
    unbounded = replace(setting, bounds=replace(setting.bounds, most_live=None))
    free = replace(rates, learner=LearnerRates())
    return _phase(simulate(unbounded, free).batch_seconds, 0.0)


def _phase(seconds: Sequence[float], besides: float) -> Phase:
    mean = fmean(seconds) + besides
    if not mean:
        raise InputError("the learner takes no time, or the actors none: there is nothing to plan")
    return Phase(mean, variation=pstdev(seconds) / mean)


def _besides(learner: LearnerRates) -> float:
    """Seconds of a batch in which the learner neither trains nor waits for rollouts."""
    return learner.take_seconds + learner.publish_seconds
