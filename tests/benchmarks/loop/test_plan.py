"""`headway bench plan`: the runs that it compares, and what it refuses."""

import pytest

from benchmarks.loop.plan_check import RUN_NAME, STUDY
from deploy.errors import InputError


def test_a_folder_without_runs_is_refused(tmp_path):
    options = STUDY.parse([str(tmp_path / "missing"), "--out", str(tmp_path / "out.json")])
    with pytest.raises(InputError, match="has no runs round1-eta0 or eta0-seed0"):
        STUDY.run(options)


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
