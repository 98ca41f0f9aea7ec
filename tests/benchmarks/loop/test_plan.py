"""`headway bench plan`: the runs that it compares, and what it refuses."""

import pytest

from benchmarks.loop.plan_check import RUN_NAME, STUDY, PlanOptions, plan
from headway.errors import InputError


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no runs round1-eta0 or eta0-seed0"):
        plan(PlanOptions(folder=tmp_path / "missing"))


def test_the_record_is_stored_in_the_folder_of_the_comparison(tmp_path):
    (tmp_path / "round1-eta0").mkdir()
    options = PlanOptions(folder=tmp_path)
    assert STUDY.record_file(options, plan(options)) == tmp_path / "plan_check.json"


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
