"""Throughput over measured off-policyness: which measures are shown, and their points."""

import pytest

from benchmarks.loop.comparison_report import plot_tradeoff, save_picture, tradeoffs
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


@pytest.mark.parametrize("count", [1, 2])
def test_a_point_is_the_mean_of_the_runs_of_a_bound_and_several_are_dots(count):
    runs = {
        "0": [run(5.0, 0.0, 1.0, None), run(6.0, 0.0, 1.0, None)][:count],
        "inf": [run(9.0, 1.0, 0.9, None), run(13.0, 2.0, 0.8, None)][:count],
    }
    axes = new_figure(4, 3).subplots()
    plot_tradeoff(axes, runs, tradeoffs(runs)[1])
    line, *dots = axes.lines
    assert line.get_ydata().tolist() == ([5.5, 11.0] if count == 2 else [5.0, 9.0])
    assert [same.get_ydata().tolist() for same in dots] == [[5.0, 6.0, 9.0, 13.0]] * (count - 1)
    assert [text.get_text() for text in axes.texts] == ["η = 0", "no bound"]


def test_a_picture_is_written_as_png_and_svg(tmp_path):
    save_picture(new_figure(1, 1), tmp_path / "picture")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "picture.svg").read_text()
