"""`headway bench plan`: the runs that it compares, and what it refuses."""

import os

import pytest

from benchmarks.loop.plan_check import RUN_NAME, STUDY, PlanOptions, plan
from headway.errors import InputError


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no runs round1-eta0 or eta0-seed0"):
        plan(PlanOptions(folder=tmp_path / "missing"))


def test_the_newest_comparison_is_taken_and_its_folder_gets_the_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = PlanOptions()
    with pytest.raises(InputError, match="runs/ has no folder of `headway bench async`"):
        plan(options)
    for age, name in enumerate(("bench-staleness-1", "bench-async-2", "other")):
        folder = tmp_path / "runs" / name
        (folder / "round1-eta0").mkdir(parents=True)
        os.utime(folder, (100 + age, 100 + age))
    folder = plan(options)
    assert str(folder) == "runs/bench-async-2"
    assert STUDY.record_file(options, folder) == folder / "plan_check.json"


def test_runs_that_cannot_be_read_are_named_and_a_folder_of_only_such_is_refused(tmp_path, capsys):
    (tmp_path / "eta0-seed0").mkdir()
    with pytest.raises(InputError, match=r"no run in .* can be read, for the reasons above"):
        STUDY.run(PlanOptions(folder=tmp_path))
    assert "eta0-seed0 is left out: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("round2-eta8", ("round2", "8", None)),
        ("eta16-seed3", (None, "16", "seed3")),
        ("cispo-eta8-seed0", None),
        ("etainf-seed0", None),
    ],
)
def test_runs_of_both_benchmarks_are_recognised_by_their_names(name, groups):
    match = RUN_NAME.fullmatch(name)
    assert (match and match.group("round", "eta", "seed")) == groups
