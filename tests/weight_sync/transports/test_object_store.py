"""Two nodes on one machine: what is copied between them, and what survives a death."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket

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


@pytest.mark.slow
def test_engines_of_both_nodes_get_every_value(results) -> None:
    assert results["sums"] == [sums(1)] * 3
    assert results["second"] == [sums(2)] * 2


@pytest.mark.slow
def test_a_bucket_is_pulled_once_for_all_engines_of_a_node(results) -> None:
    for version in ("first", "second"):
        one, other = results[f"{version}_memories"]
        assert one == other
        assert len(set(one)) == 3


@pytest.mark.slow
def test_a_superseded_version_is_refused_by_name(results) -> None:
    assert "version 1 was superseded by 2" in results["superseded"]


@pytest.mark.slow
def test_a_corrupted_bucket_is_refused_on_the_other_node(results) -> None:
    assert "its manifest says 00000000" in results["corrupted"]


@pytest.mark.slow
def test_a_dead_downloader_leaves_staged_weights_and_is_replaced(results) -> None:
    assert results["held_without_downloader"] == sums(2)
    assert results["after_downloader_died"] == sums(2)
    assert results["downloader_recovery_seconds"] < 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["downloader", "uploader"])
def test_a_process_that_hangs_fails_one_try_and_is_replaced(results, kind) -> None:
    assert f"cannot be fetched: headway-{kind}-" in results[f"hung_{kind}"]
    assert results[f"after_hung_{kind}"] == sums(2)


@pytest.mark.slow
def test_a_dead_learner_is_an_error_and_takes_nothing_staged_with_it(results) -> None:
    assert results["after_learner_died"].startswith("StagingError: ")
    assert results["held_after_learner_died"] == sums(2)


def test_a_result_is_made_once_for_all_threads_and_dropped_with_its_version() -> None:
    from weight_sync.transports.ray_object_store import OncePerBucket

    dropped, made, go_on = [], [], threading.Event()
    once = OncePerBucket(dropped.append)
    bucket, other = (Bucket(nbytes=n, checksum="0" * 32, location="") for n in (1, 2))

    def make() -> str:
        made.append(1)
        assert go_on.wait(30)
        return "first"

    def fail() -> str:
        raise StagingError("gone")

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(once.get, 1, bucket, make) for _ in range(8)]
        assert once.get(1, other, lambda: "other") == "other"  # nobody waits for another bucket
        go_on.set()
        assert {future.result() for future in asked} == {"first"}
    assert made == [1]
    with pytest.raises(StagingError, match="gone"):
        once.get(2, bucket, fail)
    assert sorted(dropped) == ["first", "other"]
    assert once.get(2, bucket, lambda: "second") == "second"
    with pytest.raises(StagingError, match="version 1 was superseded by 2"):
        once.get(1, bucket, make)
