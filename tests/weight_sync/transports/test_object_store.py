"""Two nodes on one machine: what is copied between them, and what survives a death."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results() -> dict:
    program = Path(__file__).parents[1] / "two_nodes.py"
    done = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def sums(version: int) -> dict[str, float]:
    return {f"t{i}": 2048.0 * version for i in range(3)}


pytestmark = pytest.mark.ray


def test_engines_of_both_nodes_get_every_value(results) -> None:
    assert results["sums"] == [sums(1)] * 3
    assert results["second"] == [sums(2)] * 2


def test_a_bucket_is_pulled_once_for_all_engines_of_a_node(results) -> None:
    for version in ("first", "second"):
        one, other = results[f"{version}_memories"]
        assert one == other
        assert len(set(one)) == 3


def test_a_superseded_version_is_refused_by_name(results) -> None:
    assert "version 1 was superseded by 2" in results["superseded"]


def test_a_corrupted_bucket_is_refused_on_the_other_node(results) -> None:
    assert "its manifest says 00000000" in results["corrupted"]


def test_a_dead_downloader_leaves_staged_weights_and_is_replaced(results) -> None:
    assert results["held_without_downloader"] == sums(2)
    assert results["after_downloader_died"] == sums(2)
    assert results["downloader_recovery_seconds"] < 30


def test_a_dead_learner_is_an_error_and_takes_nothing_staged_with_it(results) -> None:
    assert results["after_learner_died"].startswith("StagingError: ")
    assert results["held_after_learner_died"] == sums(2)
