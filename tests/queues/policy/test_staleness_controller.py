"""The controller of the window of staleness, in a closed loop with a noisy plant that lags."""

import itertools
import json
import math
import random
import statistics
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queues.policy.staleness_controller import (
    MOST_PATIENCE,
    STATE,
    StalenessController,
    WindowState,
)
from tests.queues.conftest import WAIT, answer, make_broker, make_prompts, opened
from tests.queues.simulated_run import Run, make_state

BATCHES = 4


def closed_loop(controller, *, decay, noise, seed, start, batches):
    """Windows after each batch, where ESS = exp(−decay · lag), times noise, of an older window."""
    chance = random.Random(seed)
    state = WindowState(window=start)
    windows = [start]
    for _ in range(batches):
        lag = windows[-1 - min(windows[-1], len(windows) - 1)]
        ess = min(1.0, math.exp(chance.gauss(-decay * lag, noise)))
        state = controller.next_state(state, ess)
        windows.append(state.window)
    return windows


@given(
    st.integers(0, 2**32), st.integers(0, 8), st.floats(0.3, 0.97),
    st.sampled_from([0.0, 0.01, 0.03, 0.1, 0.3, 1.0]), st.sampled_from([0.0, 0.01, 0.05]),
    st.integers(0, 8),
)  # fmt: skip
def test_the_loop_settles_beside_the_widest_window_that_holds_the_target(
    seed, most, target, decay, noise, start
):
    controller = StalenessController(target=target, most=most, batches=BATCHES)
    windows = closed_loop(
        controller, decay=decay, noise=noise, seed=seed, start=min(start, most), batches=500
    )
    assert all(0 <= window <= most for window in windows)
    steps = [abs(b - a) for a, b in itertools.pairwise(windows)]
    assert max(steps) <= 1, "no jumps, so no oscillation between the ends"
    # Within what the noise of a decision can hide, 4 standard deviations, and one try beyond.
    hidden = 4 * noise / math.sqrt(BATCHES)
    surely = [w for w in range(most + 1) if -decay * w >= math.log(target) + hidden]
    perhaps = [w for w in range(most + 1) if -decay * w >= math.log(target) - hidden]
    tail = windows[250:]
    assert max(surely, default=0) <= min(tail) + 1
    assert max(tail) <= max(perhaps, default=0) + 1


@pytest.mark.parametrize("start", [0, 3, 8])
def test_without_noise_tries_of_a_wider_window_get_rarer_and_the_target_is_held(start):
    controller = StalenessController(target=0.8, most=8, batches=BATCHES)
    windows = closed_loop(controller, decay=0.1, noise=0.0, seed=0, start=start, batches=2000)
    held = 2  # exp(−0.2) > 0.8 > exp(−0.3)
    assert set(windows[100:]) == {held, held + 1}
    tries = [i for i, (a, b) in enumerate(itertools.pairwise(windows)) if b == 3 > a]
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[1:] == sorted(gaps[1:])
    assert windows[1000:].count(held) / 1001 > 0.9
    assert max(gaps) <= BATCHES * MOST_PATIENCE + 16, "but they are never given up"


def test_a_policy_that_settles_gets_its_window_back():
    controller = StalenessController(target=0.8, most=4, batches=1)
    state = controller.state
    for _ in range(100):
        state = controller.next_state(state, 0.5)
    assert (state.window, state.reason) == (0, "ess 0.500 < 0.8")
    for _ in range(100):
        state = controller.next_state(state, 0.9)
    assert (state.window, state.reason) == (4, "ess 0.900 >= 0.8")


def test_after_a_move_as_many_batches_are_ignored_as_were_leased_before_it():
    controller = StalenessController(target=0.8, most=4, batches=2)
    state, windows = controller.state, []
    for _ in range(16):
        state = controller.next_state(state, 0.5)
        windows.append(state.window)
    assert windows == [4] + [3] * 7 + [2] * 6 + [1] * 2


def test_a_batch_without_a_measured_ess_decides_nothing():
    controller = StalenessController(target=0.8, most=4, batches=1)
    state = controller.next_state(controller.state, 0.5)
    assert controller.next_state(state, None) == controller.next_state(state, math.nan) == state


def test_a_state_outlives_its_process_and_keeps_to_a_smaller_bound():
    controller = StalenessController(target=0.8, most=4, batches=3)
    state = controller.next_state(controller.next_state(controller.state, 0.5), 0.6)
    recorded = json.loads(json.dumps({STATE: asdict(state)}))
    controller.restore(recorded)
    assert controller.state == state
    narrower = StalenessController(target=0.8, most=2, batches=3)
    narrower.restore(recorded)
    assert narrower.state.window == 2


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", ["wait", "drop", "mask"])
def test_in_a_run_whose_engines_outrun_the_learner_the_target_is_held(seed, policy):
    chance, target = random.Random(seed), 0.75

    def ess(lags):
        mean = statistics.fmean(lags) if lags else 0.0
        return math.exp(chance.gauss(-0.2 * mean, 0.03))

    state = make_state(4, 4, 400, 1, policy=policy)
    state.controller = StalenessController(target=target, most=4, batches=BATCHES)
    run = Run(state, seed, 0.1, ess=ess)
    run.free, run.delay = {"engine-0": 80}, {"engine-0": 0.05}
    run.run()
    windows = [row["staleness_window"] for row in run.statistics]
    assert max(abs(b - a) for a, b in itertools.pairwise(windows)) == 1
    assert statistics.fmean(row["ess"] for row in run.statistics[:20]) < target, (
        "without it, too stale"
    )
    assert statistics.fmean(row["ess"] for row in run.statistics[100:]) > 0.97 * target
    moves = sum(a != b for a, b in itertools.pairwise(windows[100:]))
    assert moves < 45, "of 300 batches: tries of a wider window, there and back"
    often = max(set(windows[100:]), key=windows[100:].count)
    beside = sum(abs(window - often) <= 1 for window in windows[100:])
    assert beside > 0.8 * 300, "it stays beside one window"


# --- through the broker


async def train(broker, version, ess):
    """One batch of 2 groups; start and deadline of the last group that was leased for it."""
    await broker.serving("a", version)
    while (await broker.status()).depth["ready"] < 2:
        (lease,) = await broker.lease("a", 2, WAIT)
        await broker.put("a", answer(lease))
    await broker.take(version, WAIT)
    await broker.ack(version, {"ess": ess})
    return lease.start_version, lease.deadline_version


async def test_the_decisions_are_with_the_batches_in_the_status_and_known_to_the_next_broker(
    tmp_path,
):
    settings = {
        "ess_target": 0.8, "ess_batches": 1, "max_staleness": 2, "steps": 12,
        "patience_seconds": 0.0,
    }  # fmt: skip

    async with opened(make_broker(tmp_path, **settings)) as broker:
        await broker.issue(make_prompts(24), cursor="24")
        assert await train(broker, 0, None) == (0, 2)
        assert await train(broker, 1, 0.5) == (1, 3)
        status = await broker.status()
        assert status.staleness_window == 1
        assert status.window == 4, "two batches"
        windows = [batch.statistics["staleness_window"] for batch in status.batches]
        assert windows == [2, 1]
        controller = status.batches[-1].statistics["window_controller"]
        assert (controller["settling"], controller["reason"]) == (3, "ess 0.500 < 0.8")
    async with opened(make_broker(tmp_path, **settings)) as broker:
        assert (await broker.status()).staleness_window == 1
        for version in (2, 3, 4):
            assert await train(broker, version, 0.5) == (version, version + 1)
            assert (await broker.status()).staleness_window == 1, "it settles"
        await train(broker, 5, 0.5)
        assert (await broker.status()).staleness_window == 0
        assert await train(broker, 6, 0.5) == (6, 6), "synchronous training"
        assert (await broker.accounting()).balanced


async def test_a_controller_may_be_switched_off_and_on_between_sessions(tmp_path):
    on = {"ess_target": 0.8, "ess_batches": 1, "max_staleness": 2, "steps": 9}

    async with opened(make_broker(tmp_path, **on)) as broker:
        await broker.issue(make_prompts(18), cursor="18")
        await train(broker, 0, 0.5)
        assert (await broker.status()).staleness_window == 1
    async with opened(make_broker(tmp_path, **(on | {"ess_target": None}))) as broker:
        status = await broker.status()
        assert status.staleness_window == 2
        await train(broker, 1, 0.5)
        assert "window_controller" not in (await broker.status()).batches[-1].statistics
    async with opened(make_broker(tmp_path, **on)) as broker:
        assert (await broker.status()).staleness_window == 2
