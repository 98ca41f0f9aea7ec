"""Simulated runs against arithmetic by hand, and what holds of every one of them."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from deploy.planner.rates import EngineRates, LearnerRates, Rates, UpdateRates, lognormal_lengths
from deploy.planner.simulator import Setting, SimulatedEngine, simulate
from deploy.report.summary import WARM_UP
from headway.errors import InputError
from queues.config import QueuesConfig, RunSpec

STEPS = 25


def setting(
    staleness, *, steps=STEPS, batch=1, size=1, baseline=False, engines=1, slots=1,
    swaps_at_once=1, patience_seconds=0.0, **queues,
):  # fmt: skip
    return Setting(
        queues=QueuesConfig(max_staleness=staleness, patience_seconds=patience_seconds, **queues),
        spec=RunSpec(
            groups_per_batch=batch, group_size=size, steps=steps, greedy_baseline=baseline
        ),
        engines=engines, slots=slots, swaps_at_once=swaps_at_once,
    )  # fmt: skip


def rates(*, lengths=((100,),), train=0.5, step=0.01, **more):
    return Rates(
        engine=EngineRates(step_seconds=step),
        learner=LearnerRates(batch_seconds=train),
        lengths=lengths,
        **more,
    )


def test_synchronous_phases_take_turns():
    outcome = simulate(setting(0), rates())
    assert outcome.samples_per_second == pytest.approx(1 / 1.5)
    assert outcome.learner_idle == pytest.approx(1.0 / 1.5)
    assert outcome.actors_idle == pytest.approx(0.5 / 1.5)
    lags = (outcome.lag_mean, outcome.lag_square_mean, outcome.lag_p95, outcome.lag_max)
    assert lags == (0, 0, 0, 0)


def test_with_one_batch_of_staleness_the_slower_side_decides():
    by_actors = simulate(setting(1), rates(train=0.5))
    assert by_actors.samples_per_second == pytest.approx(1.0, rel=1e-3)
    assert by_actors.learner_idle == pytest.approx(0.5, rel=1e-2)
    by_learner = simulate(setting(1), rates(train=2.0))
    assert by_learner.samples_per_second == pytest.approx(0.5)
    assert (by_learner.learner_idle, by_learner.lag_max) == (0.0, 1)


def test_an_engine_is_slower_while_the_learner_computes_and_stands_longer_with_more_rollouts():
    slow = replace(rates(train=0.5), engine=EngineRates(step_seconds=0.01, slowdown=1.0))
    speed = simulate(setting(1), slow).samples_per_second
    assert speed == pytest.approx(1 / 1.25, rel=1e-2), "half a second for a quarter of its work"
    paused = rates(train=0.5, update=UpdateRates(pause_seconds=0.1, pause_rollout_seconds=0.2))
    assert simulate(setting(1), paused).samples_per_second == pytest.approx(1 / 1.3, rel=1e-2)


def test_paces_are_those_of_the_batch_whose_rollouts_are_generated():
    paces = [(1.0, 1.0)] * STEPS
    even = simulate(setting(0), rates(paces=paces)).samples_per_second
    for batch, seconds in ((WARM_UP - 1, 0.0), (WARM_UP, 2.0)):
        slow = [*paces[:batch], (1.0, 3.0), *paces[batch + 1 :]]
        speed = simulate(setting(0), rates(paces=slow)).samples_per_second
        measured = STEPS - WARM_UP
        assert measured / speed == pytest.approx(measured / even + seconds)


def test_every_second_of_the_cycle_is_on_the_way_of_a_synchronous_batch():
    slow = rates(update=UpdateRates(staging_seconds=0.25, pause_seconds=0.5))
    slow = replace(
        slow,
        engine=EngineRates(step_seconds=0.01, turnover_seconds=0.2, put_seconds=0.1),
        learner=LearnerRates(
            batch_seconds=0.5, token_seconds=0.001, take_seconds=0.3, publish_seconds=0.4
        ),
    )
    cycle = 0.25 + 0.5 + 0.1 + 1.0 + 0.1 + 0.3 + 0.6 + 0.4
    # The half of the turnover that is at a rollout's end comes after its last token.
    patient = setting(0, patience_seconds=5.0)
    assert simulate(patient, slow).samples_per_second == pytest.approx(1 / cycle)


def test_rollouts_share_an_engine_and_a_group_waits_for_its_last():
    shared = replace(
        rates(lengths=((10, 30),), train=0.0),
        engine=EngineRates(step_seconds=0.01, rollout_step_seconds=0.02),
    )
    # Ten tokens beside another at 0.05 s each, then twenty alone at 0.03 s.
    outcome = simulate(setting(0, size=2, slots=2), shared)
    assert outcome.samples_per_second == pytest.approx(2 / (10 * 0.05 + 20 * 0.03))


def test_a_baseline_takes_room_and_is_not_trained():
    per_token = rates(lengths=((100,), (50,)))
    per_token = replace(per_token, learner=LearnerRates(token_seconds=0.005))
    outcome = simulate(setting(0, slots=2, baseline=True), per_token)
    assert outcome.samples_per_second == pytest.approx(1 / 1.5), "the learner takes 100 tokens"


def test_engines_swap_one_after_another_where_only_one_may():
    update = UpdateRates(pause_seconds=1.0)
    both = {"batch": 2, "engines": 2, "patience_seconds": 9.0}
    together = simulate(setting(0, **both, swaps_at_once=2), rates(update=update))
    in_turn = simulate(setting(0, **both, swaps_at_once=1), rates(update=update))
    assert together.samples_per_second == pytest.approx(2 / 2.5)
    assert in_turn.samples_per_second == pytest.approx(2 / 3.5)


def test_groups_without_a_signal_cost_actors_what_they_took():
    """At η = 0, with half of all groups dropped, a batch of one is generated twice on average."""
    filtered = setting(0, steps=400, filter_tied=True, max_filtered_batches=10)
    outcome = simulate(filtered, rates(tied_share=0.5))
    assert outcome.samples_per_second == pytest.approx(1 / (2 * 1.0 + 0.5), rel=0.1)
    kept = simulate(setting(0, steps=400), rates(tied_share=0.5))
    assert kept.samples_per_second == pytest.approx(1 / 1.5)


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("engines", [1, 3])
def test_no_token_that_is_trained_exceeds_the_bound(staleness, engines):
    lengths = lognormal_lengths(40, 1.5, group_size=4, seed=staleness)
    tailed = rates(lengths=lengths, train=0.3, step=0.01, update=UpdateRates(staging_seconds=0.5))
    wide = setting(staleness, batch=6, size=4, engines=engines, slots=16)
    outcome = simulate(wide, tailed)
    assert outcome.lag_mean <= outcome.lag_p95 <= outcome.lag_max <= staleness
    assert outcome.lag_mean**2 <= outcome.lag_square_mean <= outcome.lag_max * outcome.lag_mean
    assert 0 <= outcome.learner_idle <= 1
    assert 0 <= outcome.actors_idle <= 1
    assert simulate(wide, tailed) == outcome, "the same again"


def test_staleness_buys_throughput_of_long_tails_and_less_with_every_step():
    tailed = rates(lengths=lognormal_lengths(40, 1.2, group_size=4, seed=0), train=0.6)
    speeds = [
        simulate(setting(bound, steps=200, batch=6, size=4, slots=24), tailed).samples_per_second
        for bound in (0, 1, 2, 3, 4)
    ]
    assert speeds == sorted(speeds)
    assert speeds[1] > 1.15 * speeds[0]
    gains = [after - before for before, after in pairwise(speeds)]
    assert gains == sorted(gains, reverse=True)


def test_every_token_of_a_rollout_is_of_the_version_that_was_served_then():
    engine = SimulatedEngine("engine-0", EngineRates(step_seconds=1.0), free_slots=1)
    engine.swaps += [(10.0, 1), (14.0, 2)]
    assert engine.sampled(2.0, 5) == {0: 5}
    assert engine.sampled(7.0, 10) == {0: 3, 1: 4, 2: 3}
    assert engine.sampled(20.0, 2) == {2: 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 6}, "6 steps; at least 7 are needed"),
        ({"on_overdue": "drop"}, 'queues.on_overdue = "drop" cannot be simulated'),
    ],
)
def test_what_cannot_be_simulated_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        simulate(setting(1, **changes), rates())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineRates(step_seconds=-1.0), "step_seconds = -1.0 must be"),
        (lambda: LearnerRates(token_seconds=float("nan")), "token_seconds = nan must be"),
        (lambda: rates(step=0.0), "step_seconds and rollout_step_seconds of an engine are both 0"),
        (lambda: rates(lengths=()), "no rollout's length is known"),
        (lambda: lognormal_lengths(0, 1, group_size=1, seed=0), "lengths of 0 tokens"),
        *(
            (
                partial(EngineRates.of_throughput, one=100, full=full, slots=8),
                "must be at least 100 and at most 800",
            )
            for full in (50, 801)
        ),
    ],
)
def test_rates_that_cannot_be_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_an_engine_of_two_timings_has_both():
    engine = EngineRates.of_throughput(one=100, full=3000, slots=64)
    assert 1 / engine.token_seconds(1) == pytest.approx(100)
    assert 64 / engine.token_seconds(64) == pytest.approx(3000)


def test_drawn_lengths_have_the_mean_and_the_variation_that_were_asked_for():
    drawn = rates(lengths=lognormal_lengths(200, 0.8, group_size=8, seed=1)).to_dict()["lengths"]
    assert drawn["mean"] == pytest.approx(200, rel=0.03)
    assert drawn["variation"] == pytest.approx(0.8, rel=0.1)
