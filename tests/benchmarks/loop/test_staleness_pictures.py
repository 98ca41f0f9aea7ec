"""Pictures of the study of staleness: their data, of which no line goes back."""

from itertools import pairwise
from statistics import fmean

import pytest

from benchmarks.loop.seed_intervals import estimate
from benchmarks.loop.staleness import FULL
from benchmarks.loop.staleness_cells import eta
from benchmarks.loop.staleness_conclusions import conclude
from benchmarks.loop.staleness_pictures import MARKERS, pictures
from deploy.report.plots import new_figure
from tests.benchmarks.loop.study_record import record, run

GRID = [(bound, "none") for bound in ("2", "inf")]


def concluded(**options):
    study = record(**options)
    return study | conclude(study)


def axes_of(name, study):
    axes = new_figure(4, 3).subplots()
    pictures(study)[name](axes, study)
    return axes


def joined(axes):
    """Return the lines that join several points."""
    return [
        line for line in axes.lines if line.get_linestyle() != "None" and len(line.get_xdata()) > 1
    ]


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_no_line_of_any_picture_goes_back(seeds):
    study = concluded(bounds=("0", "2", "8", "inf"), seeds=seeds, of_first=GRID)
    for arm in study["arms"]:  # lag that falls as η grows
        arm["lag_mean"] = 9.0 - arm["lag_mean"]
    names = pictures(study)
    assert [*names] == [
        "throughput", "throughput_by_lag", "lag", "score_by_batches", "score_by_seconds",
        "corrections", "map",
    ]  # fmt: skip
    for name in names:
        for line in joined(axes_of(name, study)):
            xs = [*line.get_xdata()]
            if name != "corrections" or xs != [0, 1]:  # the line of no difference
                assert all(before < after for before, after in pairwise(xs)), name


def test_throughput_has_its_intervals_and_limits():
    axes = axes_of("throughput", concluded())
    assert [text.get_text().strip() for text in axes.texts] == ["admission"] * 3
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "2", "8"]
    [(_, _, bars)] = [container.lines for container in axes.containers]
    value = estimate(run("2", "cispo", seed)["samples_per_second"] for seed in range(3))
    assert bars[0].get_segments()[1][:, 1] == pytest.approx([value.low, value.high])


def test_no_line_joins_the_bound_of_a_run_with_those_that_are_given():
    axes = axes_of("throughput", concluded(bounds=("0", "2", "auto"), corrections=()))
    measured = [[*line.get_xdata()] for line in axes.lines if line.get_marker() == "o"]
    assert measured == [[0, 1], [2]]


def test_throughput_over_lag_is_points_that_no_line_joins():
    bounds = FULL["bounds"]
    axes = axes_of("throughput_by_lag", concluded(bounds=bounds, corrections=()))
    assert joined(axes) == []
    assert [text.get_text() for text in axes.get_legend().texts] == [*map(eta, bounds)]
    points = {(line.get_color(), line.get_marker()) for line in axes.lines}
    assert len({colour for colour, marker in points if marker in MARKERS}) == len(bounds) == 8


def test_scores_have_bands_where_intervals_are_known():
    assert len(axes_of("score_by_seconds", concluded()).collections) == 3
    assert len(axes_of("score_by_seconds", concluded(seeds=(0, 1))).collections) == 0
    [zero, *_] = axes_of("score_by_batches", concluded()).lines
    assert [*zero.get_xdata()] == [0, 25, 50, 75, 100]
    assert zero.get_ydata()[-1] == pytest.approx(run("0", "cispo", 1)["score"])


def test_the_map_shows_means_marks_single_seeds_and_leaves_unknown_cells_empty():
    study = concluded(of_first=[("2", "none")])
    axes = axes_of("map", study)
    shown = {tuple(map(int, text.get_position())): text.get_text() for text in axes.texts}
    assert shown[1, 1] == f"{run('2', 'none', 0)['score']:.2f}*"
    assert shown[1, 0] == f"{fmean(run('2', 'cispo', seed)['score'] for seed in range(3)):.2f}"
    assert (0, 1) not in shown, "η = 0 is trained with the recipe's correction alone"
    assert axes.images[0].get_array().mask[1][0]


def test_a_picture_without_data_is_not_drawn():
    assert [*pictures(concluded(corrections=()))] == [
        "throughput", "throughput_by_lag", "lag", "score_by_batches", "score_by_seconds",
    ]  # fmt: skip
    assert "corrections" not in pictures(concluded(bounds=("2", "8")))
    assert "map" not in pictures(concluded())
    unbounded = concluded(bounds=("inf",), corrections=())
    assert axes_of("lag", unbounded).get_xticklabels()[0].get_text() == "none"
