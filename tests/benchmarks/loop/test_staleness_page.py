"""The page of the study of staleness, as a whole, of a made-up record with gaps and bad news."""

import json
from pathlib import Path

import pytest

from benchmarks.loop.staleness_conclusions import conclude
from benchmarks.loop.staleness_page import brief, page, table, write
from tests.benchmarks.loop.study_record import record

GOLDEN = Path(__file__).parent / "staleness_page.txt"


@pytest.fixture
def study():
    """Return a study with one seed of the map, a failed run, and cells that are missing."""
    study = record(
        bounds=("0", "2", "8", "inf"), corrections=("none", "tis"), of_first=[("2", "none")]
    )
    study["arms"] = [arm for arm in study["arms"] if (arm["kind"], arm["seed"]) != ("tis", 2)]
    study["failed"] = [{"kind": "tis", "name": "8", "seed": 2, "why": "it ended with exit code 1"}]
    study["arms"][0]["heldout"] = {"scored": 1990, "failed": 10}
    study["arms"][1]["kl"] = None
    return study


def test_the_page_of_a_record_is_as_it_was_read_and_approved(study):
    """`python -m tests.benchmarks.loop.test_staleness_page` writes the file; read it."""
    assert page(study, "study") == GOLDEN.read_text()


def test_the_page_follows_from_the_runs_alone(study):
    assert page(study | conclude(study)) == page(study | {"cells": [], "sentences": ["wrong"]})


def test_the_terminal_shows_figures_conclusions_doubts_and_failures_of_a_stored_record_too(study):
    lines = table(study | conclude(study)).splitlines()
    assert table(json.loads(json.dumps(study | conclude(study)))).splitlines() == lines
    assert lines[0].split()[:2] == ["η", "correction"]
    assert [line.split()[:2] for line in lines[1:8]] == [
        ["0", "cispo"], ["2", "cispo"], ["2", "none"], ["8", "cispo"], ["8", "none"], ["8", "tis"],
        ["no", "bound"],
    ]  # fmt: skip
    assert "left out: seed 2, η = 8 tis: it ended with exit code 1" in lines
    assert "held-out score, η = 0 cispo, seed 0: 0.686 (1990 of 2000, 10 failed)" in lines


def test_other_pages_show_a_row_for_each_bound_of_a_stored_record(study):
    stored = json.loads(json.dumps(study | conclude(study)))
    lines = brief(stored).splitlines()
    assert lines[3] == (
        "| 2 | 95.3 [93.5, 97.1] | 1.25 | 0.980 | admission | 0.683 [0.680, 0.686] | 3 of 3 | "
        "87 [83, 90] |"
    )
    assert [line.split()[1] for line in lines[:-2]] == ["η", "---", "0", "2", "8", "no"]
    assert lines[-1] == (
        "Scores are held-out ones after 100 batches, means of 3 seed(s) with 95 % intervals; the "
        "target is a score of 0.647. Without a bound as many batches are live as with η = 16."
    )


def test_page_and_pictures_stand_beside_the_record(study, tmp_path):
    write(study | conclude(study), tmp_path)
    written = (tmp_path / "staleness.md").read_text()
    for picture in tmp_path.glob("*.svg"):
        assert f"]({picture.name})" in written
    assert written.count("](staleness_") == len([*tmp_path.glob("*.svg")]) == 7


if __name__ == "__main__":
    GOLDEN.write_text(page(study.__wrapped__(), "study"))
