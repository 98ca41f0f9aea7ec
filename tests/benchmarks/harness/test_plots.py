"""Throughput over measured off-policyness: which measures are shown, their points and bars."""

import pytest

from benchmarks.harness.intervals import interval
from benchmarks.harness.plots import plot_means, plot_tradeoff, save_picture, tradeoffs
from deploy.report.plots import new_figure


def run(speed, lag, ess, kl):
    return {"samples_per_second": speed, "lag_mean": lag, "ess": ess, "kl": kl}


@pytest.mark.parametrize(
    ("stale", "shown"),
    [
        (run(9.0, 1.5, 0.9, 0.01), ["mean lag", "1 − effective", "KL to the"]),
        (run(9.0, 1.5, 0.9, None), ["mean lag", "1 − effective"]),
        (run(9.0, 1.5, 1 - 1e-9, 1e-12), ["mean lag"]),
    ],
)
def test_a_measure_is_shown_where_every_run_has_it_and_bounds_change_it(stale, shown):
    runs = {"0": [run(5.0, 0.0, 1.0, 0.0)], "2": [stale]}
    labels = [measure.label for measure in tradeoffs(runs)]
    assert [label[: len(start)] for label, start in zip(labels, shown, strict=True)] == shown
    assert tradeoffs({"2": [stale]}) == [], "one bound is no comparison"


def test_a_point_is_the_mean_of_the_runs_of_a_bound_and_bars_are_its_interval():
    runs = {
        "0": [run(5.0, 0.0, 1.0, None), run(6.0, 0.0, 1.0, None)],
        "inf": [run(9.0, 1.0, 0.9, None), run(13.0, 2.0, 0.8, None)],
    }
    axes = new_figure(4, 3).subplots()
    plot_tradeoff(axes, runs, tradeoffs(runs)[1])
    line, dots, *_caps = axes.lines
    assert line.get_xydata().tolist() == [[0.0, 5.5], [pytest.approx(0.15), 11.0]]
    assert dots.get_ydata().tolist() == [5.0, 6.0, 9.0, 13.0]
    across, upward = (bars.get_segments() for bars in axes.collections)
    assert across[1][:, 0].tolist() == pytest.approx(interval([0.1, 0.2]))
    assert upward[1][:, 1].tolist() == pytest.approx(interval([9.0, 13.0]))
    assert axes.get_ylim()[1] < 16, "the interval of two seeds does not set the scale"
    assert [text.get_text() for text in axes.texts] == ["η = 0", "no bound"]


def test_one_run_of_each_bound_has_no_bars():
    runs = {"0": [run(5.0, 0.0, 1.0, None)], "2": [run(9.0, 1.0, 0.9, None)]}
    axes = new_figure(4, 3).subplots()
    plot_tradeoff(axes, runs, tradeoffs(runs)[0])
    assert list(axes.collections) == []
    assert axes.get_legend() is None


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_band_is_the_interval_of_several_values_and_axes_are_as_large_as_the_values(count):
    values = {0.0: [1.0] * count, 2.0: [3.0 + index for index in range(count)]}
    axes = new_figure(4, 3).subplots()
    plot_means(axes, values, "measured")
    assert axes.lines[0].get_ydata()[1] == 3 + (count - 1) / 2
    assert [len(dots.get_ydata()) for dots in axes.lines[1:]] == ([2 * count] if count > 1 else [])
    assert axes.get_ylim()[1] < 3 + count
    for band in axes.collections:
        heights = band.get_paths()[0].vertices[:, 1]
        ends = interval(values[2.0])
        assert (heights.min(), heights.max()) == pytest.approx((min(1.0, ends[0]), ends[1]))
    assert len(axes.collections) == (count > 1)


def test_a_picture_is_written_as_png_and_svg(tmp_path):
    save_picture(new_figure(1, 1), tmp_path / "picture")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "picture.svg").read_text()
