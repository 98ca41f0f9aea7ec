"""Processes that hold weights may open a file for each bucket, whatever limit they begin with."""

import subprocess
import sys

import pytest

STARTS = """
import asyncio, contextlib, os, types
from actors.ray_actor import RolloutActor
from learner.ranks.ray_rank import RankActor
from weight_sync.transports.ray_object_store import Downloader, Uploader

async def begin(kind, *arguments):
    with contextlib.suppress(AttributeError):  # there is nothing that it could load
        await kind.start(types.SimpleNamespace(_state=str), *arguments)

starts = {
    "uploader": Uploader,
    "downloader": lambda: Downloader(1.0),
    "actor": lambda: asyncio.run(begin(RolloutActor)),
    "rank": lambda: asyncio.run(begin(RankActor, None)),
}
"""
VERSIONS = """
from weight_sync.buckets import Piece
from weight_sync.transports.sealed_memory import seal

def hold():
    held = [seal(1, [Piece(0, memoryview(b"x"))]) for _ in range(300)]
    print(len(held), "buckets", flush=True)

"""
EACH = """
for name, start in starts.items():
    if os.fork():
        os.wait()
        continue
    print(name, end=" ")
    start()
    hold()
    break
"""


def with_limits(soft: int, hard: int, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["prlimit", f"--nofile={soft}:{hard}", sys.executable, "-c", script],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_process_that_holds_weights_raises_its_limit_as_it_starts() -> None:
    done = with_limits(256, 512, f"{STARTS}\n{VERSIONS}\n{EACH}")
    expected = [f"{process} 300 buckets" for process in ("uploader", "downloader", "actor", "rank")]
    assert done.stdout.splitlines() == expected, done.stderr


def test_a_limit_that_nobody_can_raise_is_named_with_what_helps() -> None:
    done = with_limits(256, 256, f"{VERSIONS}\nhold()")
    assert (
        "this process may open 256 files (ulimit -Hn), too few for the buckets of two versions of "
        "the weights: raise the limit (LimitNOFILE= of systemd, /etc/security/limits.conf, "
        "--ulimit nofile= of docker) on every node, before `ray start`"
    ) in done.stderr
