"""What `make figures` takes again, and what the pages say of it."""

import json
from itertools import product
from types import SimpleNamespace

import pytest

from benchmarks.harness import figures, record
from benchmarks.harness.figure_blocks import made, record_block, summaries_block
from benchmarks.harness.figures import Figure
from benchmarks.loop.staleness_page import page
from deploy.cli.bench import BENCHMARKS
from headway.errors import InputError

TAKEN = {
    "commands": ["headway run demo"],
    "time": "2026-11-28T10:00:00+00:00",
    "commit": "0123456789ab",
    "uncommitted_changes": False,
    "machine": {"cores": 2, "cpu": "A processor", "load_average": [0.25, 1, 1]},
}
SUMMARY = {
    "name": "demo-0",
    "heldout": [{"score": 0.35}, {"score": 0.5}, {"score": 0.9425}],
    "steps": 80,
    "seconds": 159.7,
    "seconds_to_first_step": 31.2,
    "samples_per_second": 133.21,
    "max_lag_trained": 2,
    "max_staleness": 2,
}


def test_figures_of_other_code_or_by_other_commands_are_taken_in_the_order_of_the_list(
    monkeypatch,
):
    monkeypatch.setattr(figures, "code_checksum", lambda *further: "new")
    listed = {name: Figure(minutes=1, bench=name) for name in ("async", "chaos", "queue")}
    index = {
        name: {"code": code, "commands": [f"headway bench {name}"]}
        for name, code in (("chaos", "new"), ("queue", "old"))
    }
    assert figures.chosen(listed, "", index) == ["async", "queue"]
    listed["chaos"] = Figure(minutes=1, bench="chaos --kills 9")
    assert "chaos" in figures.chosen(listed, "", index), "by other commands"
    assert figures.chosen(listed, "queue", index) == ["queue"]
    with pytest.raises(InputError, match="no figure 'chaso'; there are async, chaos, queue; did"):
        figures.chosen(listed, "chaso", index)


def test_a_figure_is_of_other_code_when_a_file_of_its_folder_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    (tmp_path / "example").mkdir()
    figure = Figure(minutes=1, bench="x", folder="example")
    codes = []
    for name, text in (
        *(("a.toml", "1"), ("a.toml", "2"), ("b.py", "x = 1"), ("README.md", "")),
        ("b.py", '"""Of one."""\nx = 1  # one'),
    ):
        (tmp_path / "example" / name).write_text(text)
        codes.append(figure.code())
    assert len(set(codes)) == 3
    assert codes[2] == codes[3] == codes[4], "pages, comments and docstrings train nothing"


def test_what_predicts_a_run_does_not_make_it_another_one(tmp_path, monkeypatch):
    (tmp_path / "deploy" / "planner").mkdir(parents=True)
    for module, name in product((record, figures), ("ROOT", "PREDICTING")):
        folder = tmp_path / "deploy" / "planner" if name == "PREDICTING" else tmp_path
        monkeypatch.setattr(module, name, folder)
    both = [Figure(minutes=1, bench="x", predicts=predicts) for predicts in (False, True)]
    codes = []
    for file in ("planner/a.py", "run.py"):
        (tmp_path / "deploy" / file).write_text("1")
        codes.append([figure.code() for figure in both])
        (tmp_path / "deploy" / file).write_text("2")
        codes.append([figure.code() for figure in both])
    trains, predicts = zip(*codes, strict=True)
    assert trains[0] == trains[1]
    assert len({trains[1], trains[2], trains[3]}) == 3
    assert len(set(predicts)) == 4, "its figures are taken again"


def test_unfinished_runs_go_on_with_the_same_code_and_options_alone(tmp_path, monkeypatch):
    work, went_on = tmp_path / "work" / "x", []

    def run(command, folder, log):
        went_on.append(work.exists())
        work.mkdir(exist_ok=True)
        (work / "x.json").write_text("{}")

    study = SimpleNamespace(continued=True, in_folder=True, file="{name}.json", name="x")
    monkeypatch.setattr(figures, "WORK", work.parent)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "_run", run)
    monkeypatch.setattr(Figure, "study", lambda figure: study)
    for code, bench in (("old", "x"), ("old", "x"), ("new", "x"), ("new", "x --more")):
        monkeypatch.setattr(figures, "code_checksum", lambda *further, code=code: code)
        figures.take("x", Figure(minutes=1, bench=bench))
    assert went_on == [False, True, False, False]
    assert (tmp_path / "x.json").exists()


def test_a_block_has_the_commands_the_circumstances_and_a_row_for_each_run():
    text = made(TAKEN) + "\n\n" + summaries_block([SUMMARY])
    assert text.splitlines() == [
        "    headway run demo",
        "",
        "Taken on 2026-11-28 at commit 01234567, on 2 cores (A processor) that had a load of 0.2 "
        "at the start.",
        "",
        "| run | greedy | sampled | batches | seconds | to the first batch | samples/s | lag (η) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| demo-0 | 0.350 → 0.943 | – | 80 | 160 | 31 | 133 | 2 (2) |",
    ]


def test_a_block_says_where_and_for_which_seeds_its_commands_ran_and_of_changed_code():
    lines = made({**TAKEN, "uncommitted_changes": True}, "examples/tools", 5).splitlines()
    assert lines[:2] == ["    cd examples/tools", "    headway run demo"]
    assert "with SEED from 0 to 4 at commit 01234567 with uncommitted changes, on" in lines[3]


def test_a_record_is_shown_with_the_aims_that_it_missed():
    study = SimpleNamespace(
        brief=None, table=lambda record: f"x\n{record['x']}\n", misses=lambda record: ["x"]
    )
    assert record_block(study, {"x": 1}) == "```text\nx\n1\n```\n\n- aim missed: x"
    study.brief, study.misses = (lambda record: f"| {record['x']} |"), lambda record: ()
    assert record_block(study, {"x": 1}) == "| 1 |"


def test_only_blocks_of_a_page_are_written(tmp_path, monkeypatch):
    page = "Before\n<!-- figures: demo -->\nold\n<!-- end of figures -->\nAfter\n"
    summary = tmp_path / "summary.json"
    summary.write_text(json.dumps(SUMMARY))
    figure = Figure(minutes=1, commands=["headway run demo"], files={"demo": str(summary)})
    monkeypatch.setattr(figures, "read_figures", lambda: {"demo": figure})
    monkeypatch.setattr(figures, "read_index", lambda: {"demo": TAKEN})
    filled = figures.filled(page)
    assert filled.startswith("Before\n<!-- figures: demo -->\n\n    headway run demo\n")
    assert filled.endswith("80 | 160 | 31 | 133 | 2 (2) |\n\n<!-- end of figures -->\nAfter\n")
    assert figures.filled(filled) == filled
    with pytest.raises(InputError, match="a page shows 'other', and there are demo"):
        figures.filled(page.replace("demo", "other"))
    monkeypatch.setattr(figures, "read_index", dict)
    assert figures.filled(page) == page, "a figure that is still to be taken"


def test_pages_show_what_is_stored():
    for shown in figures.pages():
        assert figures.filled(shown.read_text()) == shown.read_text(), shown


def test_stored_pages_of_the_study_follow_from_their_records():
    for name, figure in figures.read_figures().items():
        if figure.bench.startswith("staleness ") and name in figures.read_index():
            record = json.loads((figures.RESULTS / f"{name}.json").read_text())
            assert page(record, name) == (figures.RESULTS / f"{name}.md").read_text(), name


def test_every_figure_names_a_benchmark_or_runs_whose_files_are_stored():
    for name, figure in figures.read_figures().items():
        assert bool(figure.bench) != bool(figure.commands), name
        assert not figure.bench or figure.bench.split()[0] in BENCHMARKS, name
        assert bool(figure.commands) == bool(figure.files), name
        assert (figures.ROOT / figure.folder).is_dir(), name


def test_every_benchmark_is_a_figure():
    benches = {
        figure.bench.split()[0] for figure in figures.read_figures().values() if figure.bench
    }
    assert benches == {*BENCHMARKS}
