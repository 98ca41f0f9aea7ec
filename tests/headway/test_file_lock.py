"""Locks of files: held by one, tried by many, never those of a file that is gone."""

import os
import threading

import pytest

from headway.file_lock import is_held, locked, take


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def test_one_holds_it_and_others_are_refused_while_it_does(path):
    with locked(path):
        assert is_held(path)
        for shared in (False, True):
            with pytest.raises(BlockingIOError), locked(path, shared=shared, seconds=0):
                pass
    assert path.exists()
    assert not is_held(path)
    with locked(path, shared=True), locked(path, shared=True):
        with pytest.raises(BlockingIOError), locked(path, seconds=0):
            pass
        assert not is_held(path)


def test_one_that_is_only_tested_for_a_moment_is_waited_for(path):
    path.touch()
    with path.open() as tested:
        take(tested.fileno(), shared=True)
        release = threading.Timer(0.02, tested.close)
        release.start()
        with locked(path, seconds=60):
            assert is_held(path)
        release.join()


def test_a_passing_lock_is_made_with_its_folder_and_leaves_no_file(tmp_path):
    with locked(tmp_path / "new" / "lock", passing=True, parents=True):
        assert is_held(tmp_path / "new" / "lock")
    assert [*(tmp_path / "new").iterdir()] == []
    with pytest.raises(FileNotFoundError), locked(tmp_path / "other" / "lock"):
        pass


@pytest.mark.timeout(20)
@pytest.mark.parametrize("target", ["other", "missing/other"])
def test_a_link_is_not_followed_to_make_a_file_elsewhere(tmp_path, target):
    (tmp_path / "lock").symlink_to(tmp_path / target)
    with pytest.raises(OSError, match="symbolic"), locked(tmp_path / "lock", parents=True):
        pass
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("made_anew", [False, True])
def test_whoever_waited_for_a_file_that_is_gone_takes_the_one_that_is_there(path, made_anew):
    inodes, waits = [], threading.Event()

    def wait():
        waits.set()
        with locked(path, seconds=60) as descriptor:
            inodes.append(os.fstat(descriptor).st_ino)

    with locked(path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        waits.wait()
        path.rename(path.with_name("moved"))
        if made_anew:
            path.touch()
    waiting.join(60)
    assert inodes == [path.stat().st_ino]
    assert inodes != [path.with_name("moved").stat().st_ino]
