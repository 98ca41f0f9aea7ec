"""Conclusions of the study of staleness from made-up runs: limits, intervals, words, doubts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loop.staleness_conclusions import conclude, interpolated, limit
from tests.benchmarks.loop.study_record import record, run


def concluded(**options):
    return conclude(record(**options))


def cell(conclusions, bound, correction="cispo"):
    """Return one cell."""
    chosen = (bound, correction)
    [found] = [c for c in conclusions["cells"] if (c["bound"], c["correction"]) == chosen]
    return found


@pytest.mark.parametrize(
    ("learner_idle", "actors_idle", "pauses", "name"),
    [
        (0.04, 0.04, 0.5, "learner"),
        (0.05, 0.04, 0.5, "generation"),
        (0.30, 0.20, 0.05, "updates"),
        (0.30, 0.20, 0.04, "admission"),
    ],
)
def test_the_limit_is_the_first_part_that_never_waits(learner_idle, actors_idle, pauses, name):
    assert limit(learner_idle, actors_idle, pauses) == name


def test_ratios_and_differences_are_taken_within_a_seed():
    study = record(bounds=("0", "8"), corrections=(), seeds=(0, 1, 2, 3))
    ratios = [
        run("8", "cispo", seed)["samples_per_second"]
        / run("0", "cispo", seed)["samples_per_second"]
        for seed in range(4)
    ]
    value = cell(conclude(study), "8")["speedup"]
    assert value.mean == pytest.approx(sum(ratios) / 4)
    assert value.low < value.mean < value.high
    loss = cell(conclude(study), "8")["score_less_synchronous"]
    losses = [
        run("8", "cispo", seed)["score"] - run("0", "cispo", seed)["score"] for seed in range(4)
    ]
    assert loss.mean == pytest.approx(sum(losses) / 4)
    assert loss.low < min(losses) < max(losses) < 0, "an interval of four is wide"
    study["arms"] = [arm for arm in study["arms"] if (arm["name"], arm["seed"]) != ("0", 3)]
    assert cell(conclude(study), "8")["speedup"].seeds == 3, "a seed without η = 0 is left out"
    assert cell(conclude(study), "8")["score"].seeds == 4
    assert cell(conclude(study), "0")["speedup"] is None, "η = 0 is not compared with itself"


def test_equal_time_is_the_longest_that_every_run_has_trained():
    study = concluded(bounds=("0", "2"), corrections=(), seeds=(0, 1, 2))
    assert study["equal_seconds"] == pytest.approx(run("2", "cispo", 0)["curve"][-1][0])
    assert cell(study, "2")["score_in_time_less_synchronous"].low > 0, "it trains more batches"
    assert cell(study, "2")["score_less_synchronous"].mean < 0, "stale ones"


@given(at=st.floats(0, 100))
def test_a_score_between_two_points_lies_between_theirs(at):
    curve = [(0.0, 0.1), (10.0, 0.5), (40.0, 0.3), (80.0, 0.9)]
    assert 0.1 <= interpolated(curve, at) <= 0.9
    for seconds, score in curve:
        assert interpolated(curve, seconds) == pytest.approx(score)


def test_the_target_is_nine_tenths_of_what_synchronous_training_gains_unless_it_is_given():
    zero = run("0", "cispo", 0)["score"]
    own = concluded(seeds=(0,))
    assert own["target_score"] == pytest.approx(0.3 + 0.9 * (zero - 0.3))
    assert cell(own, "8", "none")["seconds_to_target"] is None
    given = concluded(seeds=(0,), target=0.95)
    assert given["sentences"][-1] == "No bound reaches a score of 0.950 on every seed."
    assert concluded(bounds=("2", "8"))["target_score"] is None


def test_quantiles_of_lag_are_those_of_the_tokens():
    eight = cell(concluded(), "8")
    assert [eight[f"lag_p{part}"].mean for part in (5, 50, 95)] == [0, 4, 8]
    assert (eight["batches_in_engines"].mean, eight["batches_ready"].mean) == (5, 4)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ((0.1, 0.11, 0.12), "the score is higher than with η = 0: +0.110 [+0.085, +0.135]"),
        ((-0.1, -0.11, -0.12), "the score is lower than with η = 0: -0.110 [-0.135, -0.085]"),
        ((-0.1, 0.11, 0.0), "no difference in score to η = 0 was seen: +0.003 [-0.258, +0.264]"),
        ((-0.1, -0.11), "a difference in score to η = 0 may be chance, of 2 seed(s): -0.105"),
    ],
)
def test_a_difference_is_claimed_where_its_interval_does_not_hold_zero(scores, words):
    study = record(bounds=("0", "2"), corrections=(), seeds=range(len(scores)))
    zero = {arm["seed"]: arm["score"] for arm in study["arms"] if arm["name"] == "0"}
    for arm in study["arms"]:
        if arm["name"] == "2":
            arm["score"] = zero[arm["seed"]] + scores[arm["seed"]]
    assert (
        f"After the same 100 batches {words} with η = 2 and cispo." in conclude(study)["sentences"]
    )


def test_lag_that_does_not_grow_is_said_with_its_reason():
    study = record(bounds=("0", "4", "8"), corrections=())
    for arm in study["arms"]:
        if arm["name"] == "8":
            arm.update(lag_mean=1.5, learner_idle=0.01)
    [line] = [line for line in conclude(study)["sentences"] if "does not grow" in line]
    assert line == (
        "Mean lag does not grow from η = 4 (2.50) to η = 8 (1.50), where the learner always has a "
        "batch, and groups that are ready wait for it."
    )


def test_what_a_first_picture_cannot_tell_is_said():
    study = record(seeds=(0,), corrections=())
    for arm in study["arms"]:
        arm.update(batches=12, scored=[50] * 5)
        arm["curve"] = [[seconds, 0.5 + seconds / 1e4] for seconds, _ in arm["curve"]]
    assert conclude(study)["doubts"] == [
        "Of 1 seed(s) no interval is known, and any difference may be chance: give --seeds with 3 "
        "or more.",
        "With η = 0 the score moved by +0.020, less than twice its standard error of 0.100: 100 "
        "batches are too few to compare scores.",
        "With η = 2, η = 8 fewer batches were measured than 5 times those that may be live, so "
        "that lag and throughput are still those of the beginning.",
    ]
    assert concluded()["doubts"] == []
    assert concluded(of_first=[("2", "none")])["doubts"] == [
        "Figures without an interval are of fewer than three seeds, and may be chance."
    ]
    assert concluded(bounds=("2", "8"), corrections=())["doubts"] == [
        "Without η = 0 and another bound nothing can be compared."
    ]


def test_nothing_is_concluded_without_runs():
    assert conclude(record() | {"arms": []}) == {}
