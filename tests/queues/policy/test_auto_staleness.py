"""The controller of `max_staleness = "auto"`: rules, noise, whole runs in simulated time."""

import itertools
import json
import math
import random
from dataclasses import asdict, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.planner.rates import EngineRates, LearnerRates, Rates, UpdateRates, lognormal_lengths
from deploy.planner.simulator import Setting, Simulation, simulate
from queues.config import QueuesConfig, RunSpec
from queues.policy.auto_staleness import (
    STATE,
    AutoStaleness,
    Figures,
    figures_of,
    use_of_deadlines,
)
from tests.queues.conftest import WAIT, answer, make_broker, make_prompts, opened

QUIET = Figures(ess=1.0, idle=0.0, due=0.0, held=0.0, full=0.0, room=0.0)


def controller(most=8, floor=0.9, batches=4):
    return AutoStaleness(floor=floor, most=most, batches=batches)


def at(window, **state):
    """Return a controller with a window that all groups have."""
    auto = controller()
    auto.state = replace(auto.state, window=window, settling=0, **state)
    return auto


def states(auto, figures):
    """States after each batch with these figures."""
    state, after = auto.state, []
    for seen in figures:
        state = auto.next_state(state, seen)
        after.append(state)
    return after


def moves(windows):
    return sum(a != b for a, b in itertools.pairwise(windows))


shares = st.floats(0, 1)


@given(
    st.integers(1, 8), st.integers(1, 5),
    st.lists(
        st.builds(Figures, ess=shares, idle=shares, due=shares, held=shares, full=shares,
                  room=st.floats(0, 20)),
        max_size=200,
    ),
)  # fmt: skip
def test_no_window_is_outside_the_ceiling_whatever_is_measured(most, batches, figures):
    for state in states(controller(most, batches=batches), figures):
        assert 0 <= state.window <= most


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.floats(0.02, 0.98))
def test_under_stationary_noise_moves_become_rare(seed, widening):
    """Every decision asks at random to widen or to narrow: the worst noise there is."""
    chance = random.Random(seed)
    wide, narrow = replace(QUIET, idle=0.5, due=0.5), replace(QUIET, room=1.0)
    auto = controller(most=4, batches=1)
    state, windows = auto.state, []
    while len(windows) < 4000:
        seen = wide if chance.random() < widening else narrow
        for _ in range(state.settling + max(2, state.window + 1)):
            state = auto.next_state(state, seen)
            windows.append(state.window)
    assert moves(windows[2000:4000]) < 2000 / 12
    constant = [s.window for s in states(at(8), [replace(QUIET, room=3.0)] * 300)]
    assert moves(constant) == 5, "8, 6, 4, 2, 1, 0"


@pytest.mark.parametrize(
    ("figures", "window", "limit", "reason"),
    [
        ({"room": 5.9}, 5, "learner", "room: every group was ready 5 versions before it was due"),
        ({"idle": 0.02, "due": 0.02}, 8, "learner", "start"),
        ({"idle": 0.5}, 8, "actors", "start"),
        ({"idle": 0.5, "full": 1.0}, 8, "window", "start"),
        ({"idle": 0.5, "due": 0.3}, 8, "staleness", "start"),
        ({"ess": math.nan}, 8, "learner", "start"),
    ],
)
def test_a_decision_comes_when_the_window_has_turned_over(figures, window, limit, reason):
    rows = {"wait_started_at": 0.0, "wait_finished_at": figures.get("idle", 0.0)}
    rows |= {"step_finished_at": 1.0, "due_seconds": figures.get("due", 0.0)}
    rows |= {"ess": figures.get("ess"), "window_full": figures.get("full", 0.0)}
    seen = figures_of(rows | {"deadline_room": figures.get("room", 0.0)})
    *_, before, after = states(at(8), [seen] * 9)
    assert (before.window, before.limit) == (8, "")
    assert (after.window, after.limit, after.reason) == (window, limit, reason)


def test_the_window_grows_twofold_until_it_was_narrowed_once():
    waiting = replace(QUIET, idle=0.4, due=0.1)
    windows = [state.window for state in states(controller(most=7), [waiting] * 30)]
    assert [*dict.fromkeys(windows)] == [2, 4, 7]
    assert [windows.index(4), windows.index(7)] == [3 + 4 - 1, 7 + 5 + 5 - 1]
    windows = [state.window for state in states(at(2, was_narrowed=True), [waiting] * 30)]
    assert [*dict.fromkeys(windows)] == [2, 3, 4]


def test_ess_below_its_floor_narrows_the_window_as_far_as_it_is_below():
    fitting = 8 * math.sqrt(math.log(0.9) / math.log(0.7))
    assert 4 < fitting < 4.5
    windows = [state.window for state in states(at(8), [replace(QUIET, ess=0.7)] * 60)]
    assert [*dict.fromkeys(windows)] == [8, 4, 2, 1, 0]
    assert [windows.index(w) for w in (4, 2)] == [3, 3 + 9 + 4], "below 0.81 four batches tell"
    little = [replace(QUIET, ess=0.89)] * 8
    *_, before, after = states(at(8, was_narrowed=True), little)
    assert (before.window, after.window) == (8, 7), "else eight"
    assert (after.limit, after.reason) == ("ess", "ess 0.890 < 0.9")


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"due": 0.1}, "due: learner idle 40%, 10% for groups that were due"),
        ({"held": 1.0}, "full: learner idle 40%, and the window, not the engines, is full"),
    ],
)
def test_a_learner_that_waits_for_the_window_gets_a_wider_one_at_once(figures, reason):
    auto = at(2, patience=32, moved=-1, was_narrowed=True)
    after = states(auto, [replace(QUIET, idle=0.4, **figures)] * 8)[-1]
    assert (after.window, after.reason, after.limit) == (3, reason, "staleness")


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_a_window_whose_ess_was_too_low_is_tried_ever_more_rarely(seed):
    """Others are taken at once; ESS is noisy, with batches far below the mean."""
    chance, auto, windows = random.Random(seed), controller(batches=4), []
    state = auto.state
    for _ in range(4000):
        ess = math.exp(-0.012 * state.window**2 * chance.gammavariate(0.5, 2))
        state = auto.next_state(state, replace(QUIET, ess=ess, idle=0.5, held=1.0))
        windows.append(state.window)
    assert moves(windows[:300]) < 16
    assert moves(windows[2000:]) < 40
    assert 1.2 < sum(windows) / 4000 < 3.2, "exp(-0.012 · 3²) = 0.9"


def test_the_room_is_what_every_group_could_have_been_due_earlier():
    ready = [(7, 4, 1.0), (7, 5, 2.0), (8, 5, 3.0), (9, 5, 4.5)]
    at = {"version": 6, "groups_per_batch": 2}
    use = use_of_deadlines(ready, 2, **at, has_waited=True)
    assert use == {"deadline_room": 2.0, "due_seconds": 2.5}, "one batch of others behind it"
    undue = use_of_deadlines(ready, 2, **at, has_waited=False)
    assert undue == use | {"due_seconds": 0.0}, "what came later was not waited for"
    alone = use_of_deadlines(ready[:2], 2, **at, has_waited=True)
    assert alone == {"deadline_room": 1.0, "due_seconds": 0.0}


def test_a_batch_without_times_changes_nothing_and_a_state_outlives_its_process():
    auto = controller()
    assert auto.after({"ess": 0.5})[STATE] == asdict(auto.state)
    state = states(at(8), [replace(QUIET, room=3.0)] * 20)[-1]
    recorded = json.loads(json.dumps({STATE: asdict(state)}))
    auto.restore(recorded)
    assert auto.state == state
    lower = controller(most=3)
    lower.restore(recorded)
    assert (state.window, lower.state.window) == (6, 3)


# --- whole runs in simulated time

B, G = 8, 4
STEPS = 200


def setting(staleness, slots, *, full):
    most = 8 if staleness == "auto" else staleness
    window = (most + 1) * B if full else B + max(B, slots // G) + B // 4
    return Setting(
        queues=QueuesConfig(max_staleness=staleness, window=window, patience_seconds=0.02),
        spec=RunSpec(groups_per_batch=B, group_size=G, steps=STEPS + most + 1),
        engines=1, slots=slots, warm_up=10, beyond=most + 1,
    )  # fmt: skip


def rates(ratio, variation):
    """Return those of a learner that takes `ratio` times as long for a batch as the engine.

    Its seconds deviate by a tenth from batch to batch.
    """
    chance = random.Random(2)
    lengths = lognormal_lengths(100, variation, group_size=G, seed=1)
    engine = EngineRates(
        step_seconds=0.002, rollout_step_seconds=0.0003, put_seconds=0.02, turnover_seconds=0.002
    )
    train = ratio * B * G * 100 * engine.token_seconds(64) / 64
    return Rates(
        engine=engine,
        learner=LearnerRates(token_seconds=0.7 * train / (B * G * 100), batch_seconds=0.3 * train),
        update=UpdateRates(staging_seconds=0.1 * train, pause_seconds=0.03 * train),
        lengths=lengths,
        paces=[(max(0.1, chance.gauss(1.0, 0.1)), 1.0) for _ in range(STEPS)],
    )


CASES = {
    "generation": (0.6, 0.2, True),
    "balanced": (1.0, 0.2, False),
    "learner": (1.6, 0.2, True),
    "balanced, long tails": (1.0, 1.5, True),
    "learner, long tails": (1.6, 1.5, False),
}


@cache
def by_bound(case):
    ratio, variation, full = CASES[case]
    return [
        simulate(setting(w, 64, full=full), rates(ratio, variation)).samples_per_second
        for w in range(9)
    ]


def automatic(case, ess_loss=None):
    """Return the outcome of a run, and its windows after each of the last batches."""
    ratio, variation, full = CASES[case]
    own = replace(rates(ratio, variation), ess_loss=ess_loss)
    simulation = Simulation(setting("auto", 64, full=full), own, seed=0)
    outcome = simulation.run()
    rows = [batch.statistics for batch in simulation._broker.batches]
    return outcome, [row["staleness_window"] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_reaches_nearly_the_throughput_of_the_best_bound_in_a_window_that_is_no_wider(case):
    speeds = by_bound(case)
    outcome, windows = automatic(case)
    assert outcome.samples_per_second >= 0.95 * max(speeds)
    assert outcome.lag_max <= 8
    smallest = min(w for w in range(9) if speeds[w] >= 0.98 * max(speeds))
    settled = max(set(windows), key=windows.count)
    assert speeds[settled] >= 0.95 * max(speeds)
    assert settled <= smallest + 2
    assert moves(windows) <= 4, "of the last 100 batches"


def test_the_floor_of_ess_is_kept_whatever_it_costs():
    _, windows = automatic("learner, long tails", ess_loss=0.5)
    assert max(windows[-50:]) <= 1
    assert min(windows[-50:]) == 0


# --- through the broker


async def train(broker, version, start):
    """One batch of 2 groups, whose results are there at once."""
    await broker.serving("a", version)
    while (await broker.status()).depth["ready"] < 2:
        (lease,) = await broker.lease("a", 2, WAIT)
        await broker.put("a", answer(lease))
    await broker.take(version, WAIT)
    times = {"wait_started_at": start, "wait_finished_at": start, "step_finished_at": start + 1}
    await broker.ack(version, {"ess": 1.0, **times})


async def test_moves_are_with_the_batches_counted_by_reason_and_known_to_the_next_broker(tmp_path):
    recipe = {
        "max_staleness": "auto", "staleness_ceiling": 2, "ess_batches": 1, "steps": 12,
        "patience_seconds": 0.0,
    }  # fmt: skip
    async with opened(make_broker(tmp_path, **recipe)) as broker:
        await broker.issue(make_prompts(24), cursor="24")
        for version in range(6):
            await train(broker, version, float(version))
        status = await broker.status()
        assert (status.staleness_window, status.window_moves) == (1, {"room": 1})
        figures = status.batches[-1].statistics
        assert (figures["deadline_room"], figures["due_seconds"]) == (2.0, 0.0)
        assert figures[STATE]["reason"].startswith("room: every group was ready 2 versions")
    async with opened(make_broker(tmp_path, **recipe)) as broker:
        status = await broker.status()
        assert (status.staleness_window, status.window_moves) == (1, {})
        for version in range(6, 11):
            await train(broker, version, float(version))
        assert (await broker.status()).staleness_window == 0
        assert (await broker.accounting()).balanced
