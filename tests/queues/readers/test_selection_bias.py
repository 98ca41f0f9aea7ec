"""The report shows what a policy keeps out of training, and nothing where there is nothing."""

import statistics

import pytest

from queues.readers.open_run import open_ledger
from queues.readers.selection_bias import Distribution, Fate, compare, report_bias
from tests.queues.broker.test_overdue import straggle
from tests.queues.conftest import WAIT, answer, begin_work, make_broker, opened
from tests.queues.simulated_run import Run, make_state


def simulated(policy):
    """Fates of a long run with lognormal lengths; true seconds of what was trained and dropped."""
    run = Run(make_state(1, 8, 150, 1, policy=policy), 3, 0.0, fail_rate=0.0, death_rate=0.0)
    run.run()
    trained = {group_id: at for at, batch in enumerate(run.batches) for group_id in batch}
    fates, kept, lost = [], [], []
    for fact in run.results.values():
        if fact.group_id in trained:
            at = trained[fact.group_id]
            name = "late" if at > fact.deadline else "trained"
            fates.append(Fate(name=name, age=at - fact.versions[0], seconds=fact.seconds))
            kept.append(fact.seconds)
    for fact, seconds in run.cut_off:
        fates.append(Fate(name="dropped", age=2, seconds=seconds))
        lost.append(fact.seconds)
    return fates, kept, lost


def test_dropping_favours_short_answers_and_the_report_says_so():
    fates, kept, lost = simulated("drop")
    report = compare(fates)
    assert report.groups["dropped"] == len(lost) > 20
    seconds = {name: report.fates[name]["seconds"] for name in ("trained", "dropped")}
    assert seconds["dropped"].mean > 2 * seconds["trained"].mean
    assert seconds["dropped"].p50 > seconds["trained"].p50
    true_bias = statistics.fmean(kept + lost) / statistics.fmean(kept)
    assert 1.05 < report.bias < true_bias, "a lower bound of what nobody can know"


@pytest.mark.parametrize("policy", ["wait", "mask", "train"])
def test_where_everything_is_trained_the_report_shows_no_bias(policy):
    fates, kept, lost = simulated(policy)
    report = compare(fates)
    assert report.bias == 1.0
    assert report.groups["dropped"] == len(lost) == 0
    assert report.groups["trained"] + report.groups["late"] == len(kept) == 8 * 150
    assert (report.groups["late"] > 0) == (policy != "wait")
    if policy != "wait":
        late, trained = (report.fates[name]["seconds"] for name in ("late", "trained"))
        assert late.mean > 2 * trained.mean, "it is the long ones that are late"


def test_lengths_of_what_waits_are_those_that_were_drawn():
    _, waited, _ = simulated("wait")
    _, kept, lost = simulated("drop")
    drawn = statistics.fmean(kept + lost)
    assert statistics.fmean(waited) == pytest.approx(drawn, rel=0.15)
    assert statistics.fmean(kept) < 0.9 * statistics.fmean(waited)


def test_what_failed_and_what_timed_out_is_compared_with_what_was_trained():
    trained = [Fate(name="trained", seconds=2.0)] * 2
    report = compare(
        [*trained, Fate(name="timeout", seconds=8.0), Fate(name="failed", seconds=4.0)]
    )
    assert (report.groups["timeout"], report.groups["failed"], report.bias) == (1, 1, 2.0)
    assert report.fates["timeout"]["seconds"].mean == 8.0


async def test_the_ledger_tells_groups_that_failed_from_those_that_timed_out(tmp_path):
    async with opened(make_broker(tmp_path, max_attempts=1)) as broker:
        leases = await begin_work(broker, 3, capacity=6)
        for lease, reason in zip(leases, ("reward", "timeout", "timeout"), strict=True):
            await broker.fail("a", lease.group_id, 1, reason=reason, error="raised")
    with open_ledger(tmp_path) as database:
        report = report_bias(database)
    assert (report.groups["failed"], report.groups["timeout"], report.bias) == (1, 2, None)
    assert [report.fates[name]["seconds"].count for name in ("failed", "timeout")] == [1, 2]


def test_distributions_are_those_of_the_nearest_rank():
    assert Distribution.of([]) == Distribution(count=0, mean=None, p50=None, p95=None, max=None)
    assert Distribution.of([4.0]) == Distribution(count=1, mean=4.0, p50=4.0, p95=4.0, max=4.0)
    hundred = Distribution.of(range(100, 0, -1))
    assert hundred == Distribution(count=100, mean=50.5, p50=50, p95=95, max=100)


def test_nothing_trained_has_no_bias():
    assert compare([]).bias is None
    assert compare([Fate(name="dropped", seconds=1.0)]).bias is None


@pytest.mark.parametrize("policy", ["drop", "mask"])
async def test_the_ledger_of_a_run_tells_what_became_of_every_group(tmp_path, policy):
    settings = {"on_overdue": policy, "filter_tied": True, "patience_seconds": 0.0}
    async with opened(make_broker(tmp_path, **settings)) as broker:
        straggler = await straggle(broker)
        await broker.serving("a", 2)
        await broker.ack(1, {"tokens_too_old": 5})
        if policy == "mask":
            await broker.put("a", answer(straggler))
        while (await broker.status()).depth["ready"] < 2:
            (lease,) = await broker.lease("a", 2, WAIT)
            await broker.put("a", answer(lease, tied=lease.prompt.prompt_id == "sums/0/5"))
        await broker.take(2, WAIT)
        await broker.ack(2, {"tokens_too_old": 2})
    with open_ledger(tmp_path) as database:
        report = report_bias(database)
    assert report.tokens_masked == 7
    late, trained = report.fates["late"], report.fates["trained"]
    assert trained["tokens"].mean == 2.0
    assert trained["reward"].mean == 1.5
    if policy == "drop":
        dropped = report.fates["dropped"]
        assert report.groups == {"trained": 6, "late": 0, "dropped": 1, "filtered": 1}
        assert (dropped["age"].max, dropped["seconds"].count, dropped["tokens"].count) == (2, 1, 0)
        assert report.bias > 1.0
    else:
        assert report.groups == {"trained": 5, "late": 1, "dropped": 0, "filtered": 1}
        assert (late["age"].max, late["tokens"].count) == (2, 1)
        assert report.bias == 1.0
    assert trained["age"].max == 1
    assert report.fates["trained"]["age"].count == report.groups["trained"]
