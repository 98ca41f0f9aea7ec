"""The timeline of a run: rows to curves and spans, by tables."""

import pytest

from deploy.report.timeline import (
    Span,
    build,
    clip,
    idle_share,
    learner_spans,
    overlaps,
    running_rollouts,
    update_spans,
    window,
)
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.group_history import GroupTimes, History
from tests.deploy.run_rows import batch_row, weight_update


def group(engine="engine-0", accepted=3.0, taken=None, rollouts=((0.0, 2.0),)):
    return GroupTimes(
        engine_id=engine, accepted_at=accepted, taken_at=taken, rollouts=list(rollouts)
    )


def batch(version, start, session=0.0):
    return TrainedBatch.from_dict(batch_row(version, start, session_started_at=session))


def swap(version, published, **changes):
    return weight_update(version, published, prepare_seconds=0.25, **changes)


@pytest.mark.parametrize(
    ("intervals", "curve"),
    [
        ([], []),
        ([(0, 1)], [(0, 1), (1, 0)]),
        ([(0, 2), (1, 3)], [(0, 1), (1, 2), (2, 1), (3, 0)]),
        ([(0, 2), (1, 2), (1, None)], [(0, 1), (1, 3), (2, 1)]),
        ([(0, 1), (1, 2)], [(0, 1), (2, 0)]),
        ([(1, 1)], []),
    ],
    ids=["nothing", "one", "overlapping", "endless", "one after the other", "no duration"],
)
def test_a_curve_counts_the_intervals_that_cover_each_moment(intervals, curve):
    assert overlaps(intervals) == curve


@pytest.mark.parametrize(
    ("begin", "end", "clipped", "idle"),
    [
        (0, 6, [(0, 0), (1, 2), (3, 0), (5, 1), (6, 1)], 3 / 6),
        (2, 4, [(2, 2), (3, 0), (4, 0)], 1 / 2),
        (3, 5, [(3, 0), (5, 0)], 1.0),
        (5, 9, [(5, 1), (9, 1)], 0.0),
    ],
)
def test_idle_is_the_share_of_a_window_at_count_zero(begin, end, clipped, idle):
    curve = [(1, 2), (3, 0), (5, 1)]
    assert clip(curve, begin, end) == clipped
    assert idle_share(curve, begin, end) == pytest.approx(idle)
    assert idle_share([], begin, end) == 1.0, "an engine without any rollout is idle throughout"


def test_rollouts_are_counted_by_engine():
    groups = [
        group("engine-1", accepted=4, taken=6, rollouts=[(0, 4), (1, 3)]),
        group("engine-0", accepted=5, taken=None, rollouts=[(2, 5)]),
    ]
    assert running_rollouts(groups) == {
        "engine-0": [(2, 1), (5, 0)],
        "engine-1": [(0, 1), (1, 2), (3, 1), (4, 0)],
    }


def test_the_learner_waits_steps_publishes_acknowledges_and_saves_in_this_order():
    spans = learner_spans([batch(7, 10.0)], {7: 14.0}, {8: 15.5, 4: 2.0})
    assert spans == [
        Span("wait", 10, 11),
        Span("step", 11, 13),
        Span("publish", 13, 13.5),
        Span("ack", 13.5, 14),
        Span("checkpoint", 14, 15.5),
    ]


def test_an_update_is_staged_and_prepared_gets_its_permit_and_pauses_the_engine():
    failed = swap(2, 5.0, started=None, finished=None, error="lost")
    spans = update_spans([swap(1, 0.0), failed, swap(1, 0.5, engine_id="engine-1")])
    assert spans["engine-0"] == [
        Span("staging", 0, 1),
        Span("prepare", 1, 1.25),
        Span("permit", 1.25, 2),
        Span("pause", 2, 3),
        Span("failed", 5, 6),
    ]
    assert [span.start for span in spans["engine-1"]] == [0.5, 1.5, 1.75, 2.5]


@pytest.mark.parametrize(
    ("trained", "count", "versions"),
    [(30, 10, range(5, 15)), (12, 10, range(2, 12)), (3, 10, range(3)), (0, 10, range(0))],
)
def test_the_window_leaves_the_warm_up_out_where_the_run_is_long_enough(trained, count, versions):
    rows = [batch(version, 4.0 * version) for version in range(trained)]
    assert [batch.version for batch in window(rows, count)] == list(versions)


def test_the_window_does_not_reach_over_a_pause_between_sessions():
    rows = [batch(version, 4.0 * version, session=float(version >= 8)) for version in range(30)]
    assert [batch.version for batch in window(rows, 10)] == [5, 6, 7]


def test_a_timeline_holds_only_what_happened_between_its_first_wait_and_its_last_ack():
    history = History(
        groups=[group(accepted=10.5, taken=11, rollouts=[(0, 3)]), group(rollouts=[(12, 40)])],
        acked_at={3: 14.0},
        checkpoints={},
    )
    swaps = [swap(3, 2.0), swap(4, 10.5), swap(5, 13.0)]
    timeline = build([batch(3, 10.0)], swaps, history, groups_per_batch=2)
    assert (timeline.first, timeline.begin, timeline.end) == (3, 10.0, 14.0)
    assert timeline.actors == {"engine-0": [(10.0, 0), (12, 1), (14.0, 1)]}
    assert timeline.queue == [(10.0, 1), (10.5, 2), (11, 1), (14.0, 1)]
    starts = [span.start for span in timeline.updates["engine-0"]]
    assert starts == [10.5, 11.5, 11.75, 12.5, 13.0]
