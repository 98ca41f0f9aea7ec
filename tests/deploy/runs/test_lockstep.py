"""A run with `wait`, killed at any moment and resumed, equals the uninterrupted one, bit by bit."""

import random

import pytest

from queues.readers.accounting import read_accounting, read_batches
from queues.readers.open_run import open_ledger
from tests.deploy.lockstep import GROUPS, STALENESS, STEPS, outcome, play

CRASHES = 16


def check(folder, checksums, expected):
    """Check that a finished run has trained the expected batches, to the same weights."""
    batches, weights = expected
    assert outcome(folder) == batches
    assert checksums == {version: weights[version] for version in checksums}
    assert max(checksums) == STEPS
    recorded = {row["version"] + 1: row["weights_checksum"] for row in read_batches(folder)}
    assert recorded == {version: weights[version] for version in range(1, STEPS + 1)}
    accounts = read_accounting(folder)
    assert (accounts.balanced, accounts.trained_twice) == (True, 0)
    assert accounts.trained == STEPS * GROUPS


def saved_groups(folder):
    """Return the number of groups with saved rollouts but no result yet."""
    with open_ledger(folder) as database:
        return database.execute("SELECT count(*) FROM partials").fetchone()[0]


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """Batches and weights of an uninterrupted run, and its number of moments."""
    folder = tmp_path / "whole"
    checksums, crashes = play(monkeypatch, folder)
    return (outcome(folder), checksums), crashes.count


def test_the_run_runs_ahead_and_filters_so_that_there_is_something_to_lose(whole, tmp_path):
    (batches, checksums), _ = whole
    assert len(set(checksums.values())) == STEPS + 1, "every batch teaches something"
    lags = [
        version - max(versions)
        for version, groups in enumerate(batches)
        for _, _, rollouts in groups
        for _, versions, *_ in rollouts
    ]
    assert set(lags) == {0, 1, STALENESS}
    assert read_accounting(tmp_path / "whole").dropped["filtered"] > 0


def test_a_run_that_is_killed_anywhere_and_resumed_equals_the_uninterrupted_one(
    whole, tmp_path, monkeypatch
):
    expected, moments = whole
    chosen = random.Random(5).sample(range(1, moments), CRASHES)
    folder = tmp_path / "again"
    checksums, crashes = play(monkeypatch, folder, chosen)
    check(folder, checksums, expected)
    assert len(crashes.copies) == CRASHES
    assert sum(map(saved_groups, crashes.copies)) > 0, "some go on with what was saved"
    for copy in crashes.copies:
        checksums, _ = play(monkeypatch, copy)
        check(copy, checksums, expected)


def test_a_run_that_is_killed_again_and_again_equals_the_uninterrupted_one(
    whole, tmp_path, monkeypatch
):
    expected, moments = whole
    draw, folder, sessions = random.Random(7), tmp_path / "mortal", 0
    while True:
        checksums, crashes = play(monkeypatch, folder, {draw.randrange(2, moments // 4)})
        sessions += 1
        if not crashes.copies:
            break
        folder = crashes.copies[0]
        assert sessions < 40, "it gets nowhere"
    check(folder, checksums, expected)
    assert sessions > 4


def test_a_learner_that_dies_anywhere_and_is_made_again_ends_with_the_same_weights(
    whole, tmp_path, monkeypatch
):
    """It dies at every kind of step, four times a run; everything else goes on."""
    expected, _ = whole
    draw = random.Random(11)
    for first in range(1, 7):
        deaths = {first, *draw.sample(range(first + 1, 50), 3)}
        folder = tmp_path / f"mortal-{first}"
        checksums, _ = play(monkeypatch, folder, deaths=deaths)
        check(folder, checksums, expected)
