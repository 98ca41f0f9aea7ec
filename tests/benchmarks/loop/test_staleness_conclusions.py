"""Conclusions of the study of staleness from made-up runs: limits, intervals, words, doubts."""

import re
from statistics import geometric_mean

import pytest

from benchmarks.loop.seed_intervals import estimate_ratio
from benchmarks.loop.staleness_cells import interpolated, limit
from benchmarks.loop.staleness_conclusions import conclude
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


def test_generation_limits_no_bound_that_a_larger_one_outruns():
    study = record(bounds=("0", "2", "8", "auto"), corrections=())
    for arm in study["arms"]:
        arm.update(learner_idle=0.3, actors_idle=0.01)
        arm["samples_per_second"] = {"0": 60, "2": 99, "8": 100, "auto": 94}[arm["name"]]
    limits = [found["limit"] for found in conclude(study)["cells"]]
    assert limits == ["admission", "generation", "generation", "admission"], "auto may be any"


def test_ratios_and_differences_are_taken_within_a_seed():
    study = record(bounds=("0", "8"), corrections=(), seeds=(0, 1, 2, 3))
    ratios = [
        run("8", "cispo", seed)["samples_per_second"]
        / run("0", "cispo", seed)["samples_per_second"]
        for seed in range(4)
    ]
    value = cell(conclude(study), "8")["speedup"]
    assert value.mean == pytest.approx(geometric_mean(ratios))
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


@pytest.mark.parametrize(("at", "score"), [(0.0, 0.1), (5.0, 0.3), (10.0, 0.5), (90.0, 0.9)])
def test_a_score_between_two_points_lies_between_theirs_and_behind_the_last_is_its_own(at, score):
    assert interpolated([(0.0, 0.1), (10.0, 0.5), (80.0, 0.9)], at) == pytest.approx(score)


def test_the_target_is_nine_tenths_of_what_synchronous_training_gains_unless_it_is_given():
    zero = run("0", "cispo", 0)["score"]
    own = concluded(seeds=(0,))
    assert own["target_score"] == pytest.approx(0.3 + 0.9 * (zero - 0.3))
    assert cell(own, "8", "none")["seconds_to_target"] is None
    given = concluded(seeds=(0,), target=0.95)
    assert given["sentences"][-1] == "No bound reaches a score of 0.950 on every seed."
    assert concluded(bounds=("2", "8"))["target_score"] is None
    low = concluded(corrections=(), bounds=("0", "2", "auto"), target=0.2)["sentences"][-1]
    assert low == "A score of 0.200 is reached first with η = 0, after 0 [0, 0] s.", "at the start"


def test_a_bound_that_the_run_sets_stands_beside_the_best_of_the_others():
    study = concluded(bounds=("auto", "8", "0", "2"), corrections=(), target=0.5)
    assert [found["bound"] for found in study["cells"]] == ["0", "2", "8", "auto"]
    times = {found["bound"]: found["seconds_of_seeds"] for found in study["cells"]}
    means = {found["bound"]: found["seconds_to_target"].mean for found in study["cells"]}
    assert min(means, key=means.get) == "8"
    zero, own = (
        estimate_ratio(times["8"][seed] / times[other][seed] for seed in range(3)).text(".2f")
        for other in ("0", "auto")
    )
    assert re.fullmatch(
        rf"A score of 0\.500 is reached first with η = 8, after \d+ \[\d+, \d+\] s, "
        rf"{re.escape(zero)} of the time of η = 0\. With a bound set by the run it takes "
        rf"\d+ \[\d+, \d+\] s; the best takes {re.escape(own)} of that\.",
        study["sentences"][-1],
    )
    [line] = [line for line in study["sentences"] if "sets its bound" in line]
    assert "lets groups be 6.0 [6.0, 6.0] versions old, moved 1.0 [1.0, 1.0] times" in line


def test_no_time_to_the_target_is_claimed_where_a_seed_does_not_reach_it():
    study = record(bounds=("0", "2", "8"), corrections=(), target=0.66)
    slow = next(arm for arm in study["arms"] if arm["name"] == "8")
    slow["curve"] = [[seconds, 0.6] for seconds, _ in slow["curve"]]
    conclusions = conclude(study)
    eight = cell(conclusions, "8")
    assert (eight["reached"], eight["seconds_to_target"], eight["batches_to_target"]) == (
        "2 of 3", None, None,
    )  # fmt: skip
    assert cell(conclusions, "2")["reached"] == "3 of 3"
    assert conclusions["sentences"][-1].endswith(" Not on every seed: η = 8 (2 of 3).")


def test_predictions_are_judged_at_the_bound_where_they_are_worst():
    [line] = [line for line in concluded(corrections=())["sentences"] if "From the rates" in line]
    assert line == (
        "From the rates of the run with η = 2, samples per second are predicted within 10.0 % "
        "(worst with η = 0), and mean lag within 2.20 versions (worst with η = 8), in the mean "
        "over seeds. Throughput of one run is off by up to 10 %."
    )


def test_lags_are_quantiles_over_tokens_and_the_largest_of_all_seeds():
    study = record()
    next(arm for arm in study["arms"] if arm["name"] == "8")["lag_max"] = 9
    eight = cell(conclude(study), "8")
    assert [eight[f"lag_p{part}"].mean for part in (5, 50, 95)] == [0, 4, 8]
    assert eight["lag_max"] == 9
    assert (eight["batches_in_engines"].mean, eight["batches_ready"].mean) == (5, 4)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (
            (0.1, 0.11, 0.12),
            "the score is higher than with η = 0, each at 95 %: +0.110 [+0.085, +0.135]",
        ),
        (
            (-0.1, -0.11, -0.12),
            "the score is lower than with η = 0, each at 95 %: -0.110 [-0.135, -0.085]",
        ),
        (
            (-0.1, 0.11, 0.0),
            "it is open whether the score differs from that with η = 0, and by how much: "
            "+0.003 [-0.258, +0.264]",
        ),
        (
            (-0.1, -0.11),
            "a difference in score to that with η = 0 may be chance, of 2 seed(s): -0.105",
        ),
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
        "Mean lag does not grow from η = 4 (2.50 [2.50, 2.50]) to η = 8 (1.50 [1.50, 1.50]), where "
        "the learner always has a batch, and groups that are ready wait for it."
    )
    study["arms"][0]["lag_mean"] = 0.1
    for arm in study["arms"]:
        if arm["name"] == "8":
            arm["lag_mean"] = 2.5 + arm["seed"] / 10
    unclear = [line for line in conclude(study)["sentences"] if "does not grow" in line]
    assert unclear == [], "it may have grown by more"


def test_a_correction_is_compared_with_none_at_the_same_bound():
    study = concluded(corrections=("none", "tis"))
    differences = [
        run("8", "tis", seed)["score"] - run("8", "none", seed)["score"] for seed in range(3)
    ]
    value = cell(study, "8", "tis")["score_less_uncorrected"]
    assert value.mean == pytest.approx(sum(differences) / 3)
    assert cell(study, "8", "none")["score_less_uncorrected"] is None
    assert cell(study, "2")["score_less_uncorrected"] is None
    [line] = [line for line in study["sentences"] if "without correction" in line]
    assert "it is open whether the score differs from that without correction" in line


def test_what_a_first_picture_cannot_tell_is_said():
    study = record(seeds=(0,), corrections=())
    for arm in study["arms"]:
        arm.update(batches=12, scored=[50] * 5)
        arm["curve"] = [[seconds, 0.5 + seconds / 1e4] for seconds, _ in arm["curve"]]
    assert conclude(study)["doubts"] == [
        "Of 1 seed(s) no interval is known, and any difference may be chance: give --seeds with 3 "
        "or more.",
        "With η = 0 the score moved by +0.020, less than twice a standard error of up to 0.100: "
        "100 batches are too few to compare scores.",
        "With η = 2, η = 8 fewer batches were measured than 5 times those that may be live, so "
        "that lag and throughput are still those of the beginning.",
    ]
    many = (
        "7 differences in score have a 95 % interval each: if nothing differed, 0.4 of them are "
        "still expected to leave out 0, and several at once, since they are to the same runs; the "
        "best of several bounds or corrections looks better than it is. Intervals take scores for "
        "normally distributed, which those near their largest value, or of runs that fail at "
        "times, are not."
    )
    assert concluded()["doubts"] == [many]
    assert concluded(of_first=[("2", "none")])["doubts"] == [
        "What stands in the map alone is of one seed, and may be chance.",
        many,
    ]
    assert concluded(corrections=("none", "tis"))["doubts"][-1] == (
        "Corrections are compared with η = 0 and with none, not with one another."
    )
    assert concluded(bounds=("2", "8"), corrections=())["doubts"] == [
        "Without η = 0 and another bound nothing can be compared."
    ]


def test_a_run_that_failed_has_not_reached_the_target():
    study = record(bounds=("0", "2", "8"), corrections=(), target=0.5)
    study["arms"] = [arm for arm in study["arms"] if (arm["name"], arm["seed"]) != ("8", 2)]
    eight = cell(conclude(study), "8")
    assert (eight["reached"], eight["seconds_to_target"]) == ("2 of 3", None)
    assert "is reached first with η = 2" in conclude(study)["sentences"][-1]


def test_bounds_that_may_be_as_fast_are_named_with_the_best():
    study = record(bounds=("0", "4", "8"), corrections=(), target=0.5)
    for arm in study["arms"]:
        if arm["name"] == "4":
            twin = run("8", "cispo", arm["seed"])["curve"]
            longer = 1.1 - arm["seed"] / 20
            arm["curve"] = [[seconds * longer, score] for seconds, score in twin]
    line = conclude(study)["sentences"][-1]
    assert line.startswith("A score of 0.500 is reached first with η = 8, after ")
    assert "] s (it cannot be told from η = 4), 0." in line


def test_runs_that_fall_below_the_target_again_are_counted():
    study = record(corrections=(), target=0.5)
    run_of_two = next(arm for arm in study["arms"] if arm["name"] == "2")
    run_of_two["curve"][-1][1] = 0.4
    assert (
        "1 of 9 runs that reached the target were below it at a later score: their time is that of "
        "the first crossing."
    ) in conclude(study)["doubts"]


def test_rollouts_of_another_length_are_no_equal_work():
    study = record()
    for arm in study["arms"]:
        if arm["kind"] == "none":
            arm["tokens_per_rollout"] = 20.0
    [line] = [line for line in conclude(study)["doubts"] if "longer or shorter" in line]
    assert line.startswith("With η = 8 and none rollouts are more than 5% longer or shorter than")


def test_scores_beyond_0_and_1_have_no_known_error():
    study = record(seeds=(0,), corrections=())
    study["arms"][0]["curve"][-1][1] = 7.5
    assert (
        "Scores are not within 0 and 1, so that their standard error is not known."
        in conclude(study)["doubts"]
    )


def test_a_bound_without_a_number_has_to_be_measured_as_long_as_its_engines_hold():
    study = record(bounds=("0", "inf", "auto"), corrections=())
    [line] = [line for line in conclude(study)["doubts"] if "fewer batches" in line]
    assert line.startswith("With no bound fewer batches"), "70 of 5 · 17"


def test_runs_of_the_first_seed_alone_do_not_shorten_the_equal_time():
    study = record(of_first=[("2", "none")])
    study["arms"][-1]["curve"] = [[at / 10, score] for at, score in study["arms"][-1]["curve"]]
    assert conclude(study)["equal_seconds"] == concluded()["equal_seconds"]


def test_nothing_is_concluded_without_runs():
    assert conclude(record() | {"arms": []}) == {}
