"""Figures of runs that comparisons share, by hand."""

import pytest

from benchmarks.harness.checkpoint_scores import learning
from benchmarks.loop.async_gain import ALL_CORES, conclude, draw
from benchmarks.loop.comparison_report import group, medians_table
from benchmarks.loop.run_figures import mean_count, off_policyness, training
from deploy.report.summary import WARM_UP
from deploy.report.timeline import overlaps

BATCHES = WARM_UP + 4


def row(version=0, **changes):
    """Return the statistics of a batch whose tokens the trained version sampled."""
    return {
        "version": version, "weights_checksum": "", "tokens_trained": 10,
        "lag_histogram": {"0": 10}, "ess": 1.0, "kl": 0.0, "reward_mean": 0.5, **changes,
    }  # fmt: skip


def rows(seconds=2.0, rollouts=10, tokens=200):
    """Return long warm-up batches, then equal ones: half a second of waiting, one of training."""
    ends = [100.0 * (step + 1) for step in range(WARM_UP)]
    ends += [ends[-1] + seconds * (step + 1) for step in range(BATCHES - WARM_UP)]
    return [
        row(
            version,
            wait_started_at=end - 1.5,
            wait_finished_at=end - 1.0,
            step_started_at=end - 1.0,
            step_finished_at=end,
            rollouts_trained=rollouts,
            tokens_trained=tokens,
            lag_histogram={"1": 1, "2": 1},
        )
        for version, end in enumerate(ends)
    ]


def test_the_warm_up_is_left_out_of_every_figure():
    figures = training(rows(), actors_idle=0.25)
    expected = {
        "samples_per_second": 5.0, "tokens_per_second": 100.0, "tokens_per_rollout": 20.0,
        "learner_idle": 0.5 / 2.0, "actors_idle": 0.25, "lag_mean": 1.5, "lag_max": 2,
        "ess": 1.0, "reward_mean": 0.5,
    }  # fmt: skip
    assert {key: figures[key] for key in expected} == pytest.approx(expected)
    assert len(figures["raw"]["step_finished_at"]) == BATCHES


def test_lags_and_kl_are_means_over_tokens():
    stale = row(lag_histogram={"1": 9, "3": 1}, ess=0.5, kl=0.02)
    unknown = row(lag_histogram={}, ess=0.75, kl=None)
    assert off_policyness([row(), stale, unknown]) == {
        "lag_mean": 12 / 20, "lag_max": 3, "lags": {"0": 0.5, "1": 0.45, "3": 0.05}, "ess": 0.75,
        "kl": 0.01, "cut": None,
    }  # fmt: skip
    assert off_policyness([row(kl=None)])["kl"] is None


def test_the_share_that_is_cut_is_the_largest_of_a_loss_and_its_correction():
    batches = [
        row(fractions={"capped": 0.1, "masked": share, "not_finite": 1.0, "rejected": None})
        for share in (0.0, 0.4)
    ]
    assert off_policyness(batches)["cut"] == pytest.approx(0.2)


def test_a_mean_count_is_over_the_time_between_two_moments():
    assert mean_count(overlaps([(0.0, 4.0), (9.0, 12.0), (5.0, None)]), 2.0, 10.0) == 8 / 8
    assert mean_count(overlaps([(0.0, 1.0), (11.0, 12.0)]), 2.0, 10.0) == 0.0


@pytest.mark.parametrize(
    ("target", "seconds"),
    [(0.3, 2.0), (0.5, 2.0), (0.6, 3.0), (0.7, 4.0), (0.95, None)],
    ids=["below the first", "at the first", "between", "at the second", "never"],
)
def test_a_version_is_scored_at_the_end_of_its_step_and_a_target_reached_in_between(
    target, seconds
):
    times = {"wait_started_at": 0.0}
    batches = [row(version, **times, step_finished_at=version + 1) for version in range(5)]
    scores = {4: 0.7, 2: 0.5, 5: 0.6}
    rows = {v: {"score": score, "scored": 8, "failed": 0} for v, score in scores.items()}
    result = learning(batches, rows, target)
    assert result["curve"] == [(2, 0.5), (4, 0.7), (5, 0.6)]
    assert (result["versions"], result["scored"]) == ([2, 4, 5], [8, 8, 8])
    assert (result["score"], result["seconds"]) == (0.6, 5)
    assert result["seconds_to_target"] == (seconds and pytest.approx(seconds))
    rows[5]["final"] = {"score": 0.65, "scored": 20, "failed": 4}
    result = learning(batches, rows, target)
    assert (result["score"], result["heldout"]) == (0.65, {"scored": 20, "failed": 4})
    assert result["curve"][-1] == (5, 0.6), "of the same problems as the other points"


def arms_of_round(number, speed):
    """Return the arms of a round whose limit is 8 samples/s."""
    figures = {
        "kind": "bound", "seed": number, "learner_idle": 0.0, "actors_idle": 0.0, "lag_mean": 0.0,
        "lag_max": 0, "ess": 1.0, "tokens_per_rollout": 1.0,
    }  # fmt: skip
    return [
        {**figures, "name": name, "samples_per_second": x, "ratio_to_limit": x / 8}
        for name, x in (("10", 2 * speed), ("2", speed))
    ]


def test_medians_are_taken_over_rounds_and_ratios_within_a_round():
    arms = [arm for number, x in enumerate((4.0, 1.0, 2.0)) for arm in arms_of_round(number, x)]
    limit = {"samples_per_second": 8.0, "actors": {"samples_per_second": 10.0}}
    limit["learner"] = {"samples_per_second": 8.0}
    medians = conclude({"arms": arms, "limits": [limit] * 3})["medians"]
    assert list(medians["arms"]) == ["2", "10"], "by size"
    shown = medians["arms"]["10"]
    assert (shown["samples_per_second"], shown["ratio_to_limit"]) == (4.0, 0.5)
    assert medians["limits"] == {"actors": 10.0, "learner": 8.0, "samples_per_second": 8.0}


def test_the_picture_of_what_asynchrony_gains_stands_beside_its_limits(tmp_path):
    arms = [arm for number in range(3) for arm in arms_of_round(number, 4.0 + number)]
    limit = {"samples_per_second": 8.0, "actors": {"samples_per_second": 10.0}}
    limit["learner"] = {"samples_per_second": 8.0}
    record = {"arms": [*arms, {**arms[0], "kind": ALL_CORES}], "limits": [limit]}
    draw(record | conclude(record), tmp_path)
    assert (tmp_path / "async_gain.png").stat().st_size > 1000
    assert "split devices" in (tmp_path / "async_gain.svg").read_text()


def test_a_row_of_fewer_seeds_names_their_number_and_a_missing_figure_is_a_dash():
    runs = [
        {"kind": "bound", "name": name, "seed": seed, "score": score}
        for name, seed, score in (("8", 0, 0.5), ("0", 0, 0.25), ("0", 1, None))
    ]
    columns = {"score": ("score", "{:.2f}")}
    text = medians_table("η", group(runs, "bound"), columns, seeds=2)
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["8", "(1", "seed(s))", "0.50"],
        ["0", "–"],
    ]
