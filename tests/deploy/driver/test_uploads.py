"""Checkpoints at an address: the newest is copied, what fails is said, and the end is not done."""

import asyncio

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from deploy.driver.uploads import Uploads
from deploy.errors import RunFailed
from deploy.storage import remote_folder
from tests.deploy.driver.contexts import make_context, output
from tests.deploy.trained import train


@pytest.fixture
def context(tmp_path, monkeypatch):
    """Make the context of a run with checkpoints of versions 1 and 2, and an empty store."""
    MemoryFileSystem.store.clear()
    monkeypatch.setattr(remote_folder, "FIRST_PAUSE", 0.0)
    made = make_context(tmp_path, checkpoint_address="memory://bucket/runs/")
    train(made.directory, [{}, {}], saved={1, 2})
    yield made
    MemoryFileSystem.store.clear()


def copies():
    """Return the copied versions by the name of the run's folder."""
    versions = {}
    for path in MemoryFileSystem.store:
        _, _, _, run, version, *_ = path.split("/")
        versions.setdefault(run, set()).add(version)
    return versions


def versions():
    """Return the copied versions of the only run."""
    (only,) = copies().values()
    return only


async def follow_until(uploads, reached):
    task = asyncio.create_task(uploads.follow())
    async with asyncio.timeout(30):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    task.cancel()


def test_the_newest_checkpoint_is_copied_and_what_the_run_deletes_is_deleted_there(context):
    uploads = Uploads(context)
    asyncio.run(follow_until(uploads, lambda: "checkpoint 2 is in" in output(context)))
    assert versions() == {"v000002"}
    train(context.directory, [{}], first=2, saved={3})
    asyncio.run(uploads.finish())
    assert versions() == {"v000002", "v000003"}
    for file in (context.directory.checkpoints / "v000002").iterdir():
        file.unlink()
    (context.directory.checkpoints / "v000002").rmdir()
    train(context.directory, [{}], first=3, saved={4})
    asyncio.run(uploads.finish())
    assert versions() == {"v000003", "v000004"}


def test_a_store_that_fails_stops_no_training_and_the_run_is_not_done(context, monkeypatch):
    def refuse(*_, **__):
        raise ConnectionResetError("no route")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "put_file", refuse)
        uploads = Uploads(context)
        asyncio.run(follow_until(uploads, lambda: "it is tried again" in output(context)))
        with pytest.raises(RunFailed, match=r"the last checkpoint is only here: .*no route"):
            asyncio.run(uploads.finish())
    asyncio.run(uploads.finish())
    assert versions() == {"v000002"}


def test_runs_of_one_name_share_no_folder_and_a_resumed_one_goes_on_with_its_own(context, tmp_path):
    settings = {"checkpoint_address": "memory://bucket/runs"}
    (tmp_path / "other").mkdir()
    other = make_context(tmp_path / "other", **settings)
    train(other.directory, [{}], saved={1}, session='{"started_at": 2.0}')
    for made in (context, other, make_context(tmp_path, **settings)):
        asyncio.run(Uploads(made).finish())
    assert sorted(map(sorted, copies().values())) == [["v000001"], ["v000002"]]
    assert all(name.startswith("x-") for name in copies())


def test_without_an_address_nothing_is_copied(tmp_path):
    context = make_context(tmp_path)
    train(context.directory, [{}], saved={1})
    asyncio.run(Uploads(context).follow())
    asyncio.run(Uploads(context).finish())
    assert not MemoryFileSystem.store
