"""The page of a report: what it plots, what it says, and that it needs nothing but itself."""

import io
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.observability.samples import Sample
from deploy.report.plots import PLOTS, WINDOW, PlottedRun, figure_of, smooth, throughput, waiting
from deploy.report.report import MOST, notes, page, report
from deploy.report.timeline import build
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Record
from headway.errors import InputError
from learner.diagnostics.batch_report import TrainedBatch
from queues.readers.group_history import History
from queues.readers.selection_bias import Fate, compare
from tests.deploy.run_rows import batch_row, weight_update

FETCHED = Path(__file__).parents[3] / ".chromium"
LIBRARIES = FETCHED / "usr" / "lib"
CHROMIUM = shutil.which(str(LIBRARIES / "chromium" / "chromium")) or shutil.which("chromium")
PHONE = 390
"""Pixels."""


ORIGINS = ("fresh", "crossed", "stale")
FIGURES = {
    "rollouts_trained": 8, "tokens_trained": 80, "optimizer_steps": 1, "loss": -0.5,
    "grad_norm": 1.5, "entropy_mean": 2.0, "learning_rate": 1e-4, "lag_mean": 0.5, "max_lag": 1,
    "lag_histogram": {"0": 40, "1": 40}, "ess": 0.9, "response_length_mean": 10.0,
    "multi_version_rollouts": 0,
    **{f"{kind}_{origin}": 0 for kind in ("tokens", "mismatch", "kl") for origin in ORIGINS},
}  # fmt: skip
SWAP = weight_update(
    1, 10.0, staged=None, started=None, finished=0.5, pause_seconds=0.1, load_seconds=0.05,
    resume_seconds=0.05,
)  # fmt: skip


def batch(version, *, session=1.0, waited=1.0, took=4.0, late=0.0, **more):
    """Return a batch that began `took` seconds after the one before, and `late` seconds later."""
    parts = {"task": 0.25 * version, "style": None if version else 1.0}
    own = {"session_started_at": session, "reward_mean": 0.25 * version, "reward_parts": parts}
    begin, stepped = 100.0 + took * version + late, took - 0.5 - waited
    row = batch_row(version, begin, waited=waited, stepped=stepped, **FIGURES | own | more)
    return TrainedBatch.from_dict(row)


def shown(label="mine", *, batches=3, swaps=(SWAP,), fates=(), colour="#1f6fb4"):
    record = Record(label, 5, 2, started_at=0.0)
    record.batches = [batch(version) for version in range(batches)]
    record.swaps = list(swaps)
    record.heldout = [{"version": v, "score": s, "size": 9} for v, s in ((0, 0.5), (2, None))]
    return PlottedRun(label, record, compare(fates), colour, {"steps": f"{batches} of 5"})


def plot(title):
    [titled] = [plot for plot in PLOTS if plot.title == title]
    return titled


def lines(title, *runs):
    """Return the lines of a plot: label, x, y."""
    return [
        (line.get_label(), list(line.get_xdata()), list(line.get_ydata()))
        for axes in figure_of(plot(title), runs).axes
        for line in axes.get_lines()
    ]


def test_throughput_leaves_out_the_pause_between_two_sessions():
    rows = [batch(0), batch(1), batch(50, session=2.0), batch(51, session=2.0)]
    assert throughput(rows) == [(4.0, 2.0), (8.0, 2.0)]


def test_throughput_begins_where_its_mean_is_over_a_whole_window():
    rows = [batch(version, took=0.5 + version / 10) for version in range(WINDOW + 4)]
    rows += [batch(50 + version, session=2.0) for version in range(WINDOW - 1)]
    points = throughput(rows)
    assert len(points) == 4
    assert points[0][0] == pytest.approx(
        rows[WINDOW].times.step_finished_at - rows[0].times.step_finished_at
    )


def test_waiting_is_a_share_of_the_time_of_its_batches():
    assert waiting([batch(0, waited=0.0), batch(1, waited=3.0)]) == [(0, 0.0), (1, 37.5)]


def test_a_mean_goes_back_no_further_than_its_width():
    assert smooth([3.0, 1.0, 5.0], 2) == [3.0, 2.0, 3.0]


def test_reward_shows_every_batch_and_the_scores_that_there_are():
    assert lines("Reward", shown()) == [
        ("training", [0, 1, 2], [0.0, 0.25, 0.5]),
        ("held-out, greedy", [0], [0.5]),
    ]


def test_reward_is_shown_over_the_seconds_in_which_the_run_trained():
    run = shown(batches=4)
    run.record.batches[2:] = [batch(n, session=2.0, late=1000.0) for n in (2, 3)]
    run.record.heldout.append({"version": 4, "score": 1.0, "size": 9})
    training, heldout, resumed = lines("Reward over time", run)
    assert training == ("training", [0.0, 3.5, 7.5, 11.0], [0.0, 0.25, 0.5, 0.75])
    assert heldout == ("held-out, greedy", [0.0, 15.0], [0.5, 1.0])
    assert resumed[1] == [7.5, 7.5]


def test_a_batch_whose_record_was_dropped_leaves_a_gap():
    run = shown(batches=4)
    del run.record.batches[1]
    training, *_ = lines("Reward over time", run)
    assert training == ("training", [0.0, 3.5, 11.5], [0.0, 0.5, 0.75])


def test_a_resumption_is_marked_where_versions_or_seconds_are_and_nowhere_else():
    run = shown(batches=4)
    run.record.batches[2:] = [batch(n, session=2.0) for n in (2, 3)]
    for title in ("Reward", "Learner idle", "Loss", "Weight updates", "Lag of trained tokens"):
        assert [x for _, x, _ in lines(title, run)].count([2, 2]) == 1, title
    assert [2, 2] not in [x for _, x, _ in lines("Throughput", run)]


@pytest.mark.parametrize(
    ("title", "value"),
    [("Loss", -0.5), ("Gradient norm", 1.5), ("Entropy", 2.0), ("Learning rate", 1e-4)],
)
def test_figures_of_the_optimisation_are_drawn_over_versions(title, value):
    assert lines(title, shown()) == [("mine", [0, 1, 2], [value] * 3)]


def test_parts_of_the_reward_are_drawn_where_there_are_several():
    assert lines("Reward by part", shown()) == [
        ("style", [0], [1.0]),
        ("task", [0, 1, 2], [0.0, 0.25, 0.5]),
    ]
    one = shown()
    one.record.batches = [batch(0, reward_parts={"task": 1.0})]
    assert figure_of(plot("Reward by part"), [one]) is None


def test_divergences_are_drawn_from_every_teacher_and_in_no_other_run():
    run = shown(batches=2)
    assert figure_of(plot("Divergence from teachers"), [run]) is None
    run.record.batches[1:] = [batch(1, teacher_divergence={"a": 0.5, "b": None})]
    drawn = lines("Divergence from teachers", run)
    assert [line for line in drawn if line[1]] == [("a", [1], [0.5])]


def test_runs_that_are_compared_are_named_in_every_plot_of_one_line_a_run():
    labels = [label for label, *_ in lines("Throughput", shown("a"), shown("b"))]
    assert labels == ["a", "b"]


def test_what_was_left_out_stands_beside_what_was_trained():
    fates = [Fate(name="trained", seconds=2.0, reward=1.0), Fate(name="dropped", seconds=6.0)]
    axes = figure_of(plot("Left out, and trained"), [shown(fates=fates)]).axes
    assert [text.get_text() for text in axes[0].get_yticklabels()] == ["trained (1)", "dropped (1)"]
    means = [[float(line.get_xdata()[0]) for line in axis.get_lines()[1::2]] for axis in axes]
    assert means == [[2.0, 6.0], [], [1.0]]


EMPTY = {"Throughput", "Left out, and trained", "Weight updates", "Reward against gold reward",
         "Divergence from teachers"}  # fmt: skip
"""Plots that one batch, no weight update, no gold reward and no teacher leave empty."""


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.title)
@pytest.mark.parametrize("runs", [1, 2])
def test_every_plot_of_a_run_with_a_single_batch_is_drawn_or_left_out(plot, runs):
    few = [shown(f"run {n}", batches=1, swaps=()) for n in range(runs)]
    figure = figure_of(plot, few)
    assert (figure is None) == (plot.title in EMPTY)
    if figure is not None:
        figure.savefig(io.BytesIO())


def whole(*labels):
    """Draw the page of some runs, with every plot."""
    fates = [Fate(name="trained", seconds=2.0), Fate(name="dropped", seconds=6.0)]
    runs = [shown(label, fates=fates) for label in labels]
    timeline = build(
        [batch(0)], [], History(groups=[], acked_at={}, checkpoints={}), groups_per_batch=2
    )
    return page(" · ".join(labels), runs, timeline)


def test_a_page_needs_nothing_from_elsewhere():
    text = whole("mine")
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', text)
    assert len(sources) == len(PLOTS) - 2 + 1  # no gold reward, no teacher, and a timeline
    assert {source.partition(",")[0] for source in sources} == {"data:image/svg+xml;base64"}
    assert "<script" not in text
    assert "url(" not in text


@pytest.mark.slow
def test_settings_that_differ_are_listed_when_runs_are_compared():
    recipes = [
        {"name": name, "steps": 9, "learner": {"loss": "cispo", "learning_rate": rate}}
        for name, rate in (("a", 1e-4), ("b", 3e-4))
    ]
    recipes[1]["learner"]["loss_options"] = {"cap_high": 4.0}
    runs = [replace(shown(r["name"]), settings=r) for r in recipes]
    text = page("both", runs, None)
    assert "settings that differ" in text
    assert "<th>learner.learning_rate</th><td>0.0001</td><td>0.0003</td>" in text
    assert "<th>learner.loss_options.cap_high</th><td>none</td><td>4.0</td>" in text
    assert "learner.loss<" not in text
    assert "<th>steps</th><td>9</td>" not in text
    assert "settings that differ" not in page("one", runs[:1], None)


def test_notes_name_resumptions_changed_settings_program_and_machine():
    common = {
        "headway": "0.1.0", "commit": "0123456789abcdef", "packages": {"torch": "2.13"},
        "machine": {"cores": 2, "cpu": "a CPU", "memory_gib": 24.0, "gpus": []},
    }  # fmt: skip
    changes = {0: [], 2: ["steps: 2 → 4"]}
    sessions = [{"version": v, "changes": texts, **common} for v, texts in changes.items()]
    record = shown(batches=2).record
    record.batches += [batch(2, session=2.0)]
    assert notes(record, sessions) == [
        "resumed at version 2 (dotted lines)",
        "from version 2 on: steps: 2 → 4",
        "Headway 0.1.0 (0123456789ab), torch 2.13, on 2 cores of a CPU, 24 GiB, no GPU",
    ]


def test_samples_and_names_are_text_and_never_markup():
    sample = Sample(
        version=3, group_id="g1", prompt_id="<i>", sample_index=0,
        reward=0.5, reward_parts={"task": 0.5},
        tokens=4, lag=1, finish_reason="stop", prompt="2+2=", response="<script>\x1b[2J</script>",
    )  # fmt: skip
    text = page("<b>mine</b>", [shown("<b>mine</b>")], None, [sample])
    assert "<b>" not in text
    assert "&lt;b&gt;mine" in text
    assert "<script" not in text
    assert "&lt;script&gt;\\x1b[2J" in text
    assert "version 3 · g1/0 · &lt;i&gt; · reward 0.5 · 4 tokens · stop · lag 1" in text


def test_a_run_that_trained_nothing_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="has trained no batch yet"):
        report(RunDirectory(tmp_path))
    with pytest.raises(InputError, match=f"compare up to {MOST}"):
        report(RunDirectory(tmp_path), [RunDirectory(tmp_path)] * MOST)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="make test-browser fetches it")
@pytest.mark.parametrize("labels", [("mine",), ("one", "another", "a-third-with-a-longer-name")])
def test_a_browser_shows_every_plot_within_the_width_of_a_phone(labels, tmp_path):
    """Chromium's windows have a least width, so the page is looked at in a frame."""
    probe = (
        "<script>onload = () => { const whole = document.documentElement;"
        " const drawn = [...document.images].filter(each => each.naturalWidth > 0).length;"
        " parent.postMessage(`${whole.scrollWidth} ${drawn}`, '*') }</script>"
    )
    (tmp_path / "page.html").write_text(whole(*labels) + probe)
    (tmp_path / "frame.html").write_text(
        "<script>onmessage = said => document.title = said.data</script>"
        f'<iframe src="page.html" width="{PHONE}" height="900" frameborder="0"></iframe>'
    )
    switches = (
        "headless=new", "no-sandbox", "disable-gpu", "hide-scrollbars",
        "allow-file-access-from-files", "virtual-time-budget=5000",
        f"user-data-dir={tmp_path / 'profile'}", "dump-dom",
    )  # fmt: skip
    frame = (tmp_path / "frame.html").as_uri()
    browser = subprocess.run(
        [CHROMIUM, *(f"--{switch}" for switch in switches), frame],
        env={**os.environ, "LD_LIBRARY_PATH": _libraries()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert f"<title>{PHONE} {len(PLOTS) + 1}</title>" in browser.stdout, browser.stderr[-2000:]


def _libraries():
    system = LIBRARIES / "x86_64-linux-gnu"
    return ":".join(str(path) for path in (system, system / "pulseaudio", LIBRARIES / "chromium"))
