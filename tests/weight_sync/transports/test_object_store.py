"""Two nodes on one machine: what is copied between them, and what survives a death."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weight_sync.errors import StagingError
from weight_sync.manifest import Bucket

ROOT = Path(__file__).parents[3]


pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_engines_of_two_nodes_get_every_value_whoever_dies_or_hangs() -> None:
    command = [sys.executable, ROOT / "tests/weight_sync/two_nodes.py"]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


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
