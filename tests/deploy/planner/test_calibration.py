"""Rates are measured again from the rows of a run that was made with them."""

import heapq
import itertools
import math
import random
from dataclasses import asdict, replace

import pytest

from deploy.planner.calibration import LEAST_BATCHES, rates_of, read_rates
from deploy.planner.engine_fit import fit_pauses
from deploy.planner.rates import EngineRates, UpdateRates
from deploy.planner.simulator import SimulatedEngine
from deploy.storage.jsonl import append_rows
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.group_history import GroupTimes
from tests.deploy.leased import train_early
from tests.deploy.run_rows import batch_row, weight_update

TRUE = EngineRates(step_seconds=0.004, rollout_step_seconds=0.0002, turnover_seconds=0.003)
PUT = 0.02


def group_of_one(began, ended, tokens):
    return GroupTimes(
        engine_id="engine-0", accepted_at=ended + PUT, taken_at=ended + PUT + 0.5,
        rollouts=[(began, ended)], tokens=[tokens],
    )  # fmt: skip


def made(count=600, seed=0, *, engine=TRUE, shortest=5, longest=80, batch=None, steps=()):
    """Return groups of one rollout, at most 1, 15 or 29 at once, begun at random.

    Those of a `batch`, of so many, begin together on an empty engine, as with η = 0. The learner
    computes in `steps`.
    """
    edges = [edge for step in steps for edge in step]
    chance, turnover = random.Random(seed), engine.turnover_seconds
    engine = SimulatedEngine("engine-0", engine, free_slots=0)
    groups, now, numbers = [], 0.0, itertools.count(1)
    while len(groups) < count:
        most = 1 + 14 * (len(groups) // 40 % 3)
        begins = now + chance.expovariate(50.0) if len(engine.running) < most else math.inf
        if batch is not None:
            begun = (len(groups) + len(engine.running)) % batch or not engine.running
            begins = now + 0.7 * (not engine.running) if begun else math.inf
        ends = engine.next_end()
        edge = edges[0] if edges else math.inf
        now = min(begins, ends, edge)
        engine.advance(now)
        if now == edge:
            engine.pace = 1 + engine.rates.slowdown * (len(edges) % 2 == 0)
            del edges[0]
            continue
        engine.stalled += turnover / 2
        if ends <= begins:
            *_, (began, tokens) = heapq.heappop(engine.running)
            groups.append(group_of_one(began, now, tokens))
        else:
            tokens = chance.randint(shortest, longest)
            rollout = (engine.token + tokens, next(numbers), engine.token, (now, tokens))
            heapq.heappush(engine.running, rollout)
    return groups


def rows(count):
    """Batches a second apart: half of it waiting, the rest a step of 0.1 s and 1 ms a token."""
    batches, now = [], 0.0
    for version in range(count):
        tokens = 200 + 50 * (version % 3)
        row = batch_row(
            version, now, waited=0.5, stepped=0.1 + 0.001 * tokens, tokens_trained=tokens,
            rollouts_trained=8, lag_mean=1.5, ess=None,
            lag_histogram={"1": tokens // 2, "2": tokens // 2},
        )  # fmt: skip
        batches.append(row)
        now = row["step_finished_at"] + 0.01
    return batches


def measure(rows, swaps=(), groups=None):
    batches = [TrainedBatch.from_dict(row) for row in rows]
    return rates_of(batches, batches, swaps, made() if groups is None else groups)


def swap(version, published, *, pause=0.05, **more):
    return weight_update(
        version, published, staged=0.02, started=0.02, finished=0.02 + pause, **more
    )


def test_an_engine_s_rates_are_found_again():
    measured, true = measure(rows(70)), replace(TRUE, put_seconds=PUT)
    assert measured.explained > 0.98
    assert asdict(measured.rates.engine) == pytest.approx(asdict(true), rel=0.2)
    assert measured.rates.engine.put_seconds == pytest.approx(PUT)


@pytest.mark.parametrize("seed", range(4))
def test_rollouts_of_one_short_length_take_their_time_for_tokens(seed):
    """Where the turnover alone explains their seconds, nothing could be simulated by it."""
    turnover = EngineRates(step_seconds=1e-12, turnover_seconds=0.003)
    measured = measure(rows(70), groups=made(seed=seed, engine=turnover, longest=2, shortest=2))
    assert measured.rates.engine.token_seconds(1) > 0


def test_rates_of_an_engine_that_empties_again_and_again_are_found_again():
    """Its longest rollouts are alone at last, where a token takes little but `step_seconds`."""
    measured = measure(rows(70), groups=made(15 * 64, longest=160, batch=64)).rates.engine
    assert measured.step_seconds == pytest.approx(TRUE.step_seconds, rel=0.1)
    assert measured.rollout_step_seconds == pytest.approx(TRUE.rollout_step_seconds, rel=0.1)
    assert measured.turnover_seconds == pytest.approx(TRUE.turnover_seconds, rel=0.2)


@pytest.mark.parametrize(("slowdown", "exponent"), [(0.0, 1.0), (0.3, 1.0), (0.0, 0.6), (0.5, 0.7)])
def test_what_a_busy_learner_and_few_rollouts_cost_is_found_again(slowdown, exponent):
    batches = rows(70)
    steps = [(row["wait_finished_at"], row["step_finished_at"]) for row in batches]
    engine = replace(TRUE, slowdown=slowdown, exponent=exponent, rollout_step_seconds=0.0008)
    found = measure(batches, groups=made(2400, engine=engine, steps=steps)).rates.engine
    assert found.slowdown == pytest.approx(slowdown, abs=0.1)
    for running in (1, 15, 29, 100):
        seconds = engine.token_seconds(running)
        assert found.token_seconds(running) == pytest.approx(
            seconds, rel=0.1 + 0.2 * (running > 29)
        )


def test_a_pause_is_longer_the_more_rollouts_run():
    groups = [group_of_one(begin, 10.0, 99) for begin in [0.0] * 10 + [5.0] * 20]
    swaps = [swap(1, 1.0, pause=0.1 + 10 * 0.01), swap(2, 6.0, pause=0.1 + 30 * 0.01)]
    fitted = fit_pauses(groups, swaps)
    assert (fitted.pause_seconds, fitted.pause_rollout_seconds) == pytest.approx((0.1, 0.01))
    assert fit_pauses(groups, []) == UpdateRates()


@pytest.mark.parametrize(("ahead", "take"), [(0.0, 0.02), (0.015, 0.005), (0.03, 0.0)])
def test_a_learner_s_rates_are_found_again_though_its_first_batches_are_slow_and_clocks_differ(
    ahead, take
):
    """`ahead` is the clock of the broker, which says when a batch was taken."""
    batches = rows(30)
    late = [{**row, "wait_started_at": row["wait_started_at"] + 9} for row in batches[1:3]]
    taken = [row["wait_finished_at"] - 0.02 + ahead for row in batches]
    groups = [replace(group, taken_at=taken[n % 30]) for n, group in enumerate(made())]
    measured = measure([batches[0], *late, *batches[3:]], groups=groups).rates
    assert asdict(measured.learner) == pytest.approx(
        {
            "batch_seconds": 0.1,
            "token_seconds": 0.001,
            "take_seconds": take,
            "publish_seconds": 0.01,
        }
    )
    assert [own for own, _ in measured.paces] == pytest.approx([1.0] * 25)


def test_rollouts_that_a_batch_leaves_out_count_as_those_that_it_trains():
    """A simulated batch has all that were sampled."""
    halved = [
        {
            **row, "rollouts_trained": 4, "dropped_rollouts": 4,
            "tokens_trained": row["tokens_trained"] // 2,
            "response_length_mean": row["tokens_trained"] / 8,
        }
        for row in rows(30)
    ]  # fmt: skip
    whole, left = measure(rows(30)), measure(halved)
    assert asdict(left.rates.learner) == pytest.approx(asdict(whole.rates.learner))
    assert left.samples_per_second == pytest.approx(whole.samples_per_second)


def test_paces_say_when_either_side_was_slow():
    batches = rows(40)
    for row in batches[20:]:
        row["step_finished_at"] += 0.3 * (row["step_finished_at"] - row["step_started_at"])
    slow = batches[25]["step_finished_at"], batches[30]["step_finished_at"]
    groups = made(1200, engine=replace(TRUE, slowdown=1.0), steps=[slow])
    learner, engines = zip(*measure(batches, groups=groups).rates.paces, strict=True)
    assert len(learner) == 35
    assert learner[30] / learner[5] == pytest.approx(1.3, rel=0.01)
    assert [pace > 1.5 for pace in engines[19:28]] == [False, False, *[True] * 5, False, False]


def test_updates_that_failed_seeded_an_engine_or_are_of_other_batches_are_left_out():
    batches = rows(12)
    begin, end = batches[4]["step_finished_at"], batches[11]["step_finished_at"]
    swaps = [
        swap(1, begin + 0.1),
        swap(2, begin + 0.2, pause=0.15, prepare_seconds=0.01),
        swap(0, begin + 0.3, pause=9.0, seeding=True),
        replace(swap(3, begin + 0.4), error="no", staged_at=None, swap_finished_at=None),
        swap(5, begin - 0.6, pause=0.5),
        swap(12, end + 0.1, pause=9.0),
    ]
    update = measure(batches, swaps).rates.update
    assert update.staging_seconds == pytest.approx(0.025)
    pauses = (update.pause_seconds, update.pause_rollout_seconds)
    assert pauses == pytest.approx((0.05, 0.05)), "of none and two rollouts that ran"


def test_lengths_are_of_the_groups_of_the_batches_after_the_first_ones():
    groups, batches = made(), rows(12)
    begin, end = (batches[version]["step_finished_at"] for version in (4, 11))
    before, mine, after = (
        [tuple(group.tokens) for group in groups if first < group.taken_at <= last]
        for first, last in ((0.0, begin), (begin, end), (end, math.inf))
    )
    assert list(measure(batches, groups=groups).rates.lengths) == mine
    assert all((before, mine, after))


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_run_is_measured_until_nothing_is_left_to_lease(tmp_path, staleness):
    run, steps = RunDirectory(tmp_path), 16
    batches = train_early(run, steps=steps, staleness=staleness)
    last = steps - 1 - (staleness + 1)
    measured = read_rates(run)
    assert (measured.first, measured.last, measured.batches) == (0, last, last + 1)
    assert list(measured.rates.lengths) == [(4 + version,) * 2 for version in range(5, last + 1)]
    seconds = batches[last]["step_finished_at"] - batches[4]["step_finished_at"]
    assert measured.samples_per_second == pytest.approx(2 * (last - 4) / seconds)


def test_a_run_that_leased_everything_early_is_refused(tmp_path):
    run = RunDirectory(tmp_path)
    train_early(run, steps=13, staleness=3)
    message = f"trained 13 batches .* 9 of them before its last group .* at least {LEAST_BATCHES} "
    with pytest.raises(InputError, match=message):
        read_rates(run)


def test_a_run_whose_rollouts_are_removed_is_refused(tmp_path):
    run = RunDirectory(tmp_path)
    train_early(run, steps=16, staleness=0)
    for segment in tmp_path.rglob("*.segment"):
        segment.unlink()
    with pytest.raises(InputError, match=r"of batches 0 to 14, which queues\.keep_rollouts ="):
        read_rates(run)


def test_groups_without_a_signal_are_counted_whether_they_were_dropped_or_trained():
    groups = made()
    dropped = [*groups]
    dropped[::4] = [replace(group, taken_at=group.accepted_at) for group in groups[::4]]
    assert measure(rows(70), groups=dropped).rates.tied_share == pytest.approx(0.25, abs=0.01)
    trained = [{**row, "tied_groups": 2.0, "groups": 8.0} for row in rows(12)]
    assert measure(trained, groups=groups).rates.tied_share == 0.25
    assert measure(rows(12), groups=groups).rates.tied_share == 0.0


def test_the_loss_of_sample_size_is_per_squared_version_of_lag():
    halves = [{**row, "ess": math.exp(-0.2 * (1 + 4) / 2)} for row in rows(12)]
    assert measure(halves).rates.ess_loss == pytest.approx(0.2)
    growing = [
        {**row, "lag_histogram": {str(lag): 8}, "ess": math.exp(-0.01 * lag**2)}
        for lag, row in enumerate(rows(12))
    ]
    assert measure(growing).rates.ess_loss == pytest.approx(0.01)
    fresh = [{**row, "lag_histogram": {"0": 8}, "ess": 1.0} for row in rows(12)]
    assert measure(fresh).rates.ess_loss is None
    assert measure(rows(12)).rates.ess_loss is None


def test_a_run_that_has_hardly_begun_again_is_refused(tmp_path):
    run = RunDirectory(tmp_path)
    train_early(run, steps=1, staleness=0)
    trained = [{**row, "session_started_at": 1.0 + (n > 30)} for n, row in enumerate(rows(40))]
    append_rows(run.path / "metrics.jsonl", trained)
    message = f"has trained 9 batches since it was last started, 9 .* at least {LEAST_BATCHES}"
    with pytest.raises(InputError, match=message):
        read_rates(run)
