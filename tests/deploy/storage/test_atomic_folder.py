"""A folder that appears as a whole: never half of one, never two commands at once."""

import os
import stat
from pathlib import Path

import pytest

from deploy.storage.atomic_folder import ORIGIN_FILE, atomic_folder, in_use
from headway.errors import InputError


def make(folder, text="new", *, replace=False, ends=None):
    with atomic_folder(folder, replace=replace) as partial:
        (partial / "model").mkdir()
        (partial / "model" / "weights").write_text(text)
        assert not (folder / "model" / "half").exists()
        if ends is not None:
            raise ends


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / "v1.2-rm"


def written(folder):
    return (folder / "model" / "weights").read_text()


def names(folder):
    return [path.name for path in folder.parent.iterdir()]


def test_what_was_written_appears_and_nothing_else_is_left(folder):
    make(folder)
    assert written(folder) == "new"
    assert names(folder) == ["v1.2-rm"]


def test_everything_is_durable_before_it_appears_and_then_its_name_is(folder, monkeypatch):
    synced, sync = [], os.fsync

    def record(descriptor):
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, folder.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    make(folder)
    *before, last = synced
    assert sorted(before) == [(".v1.2-rm.partial", False), ("model", False), ("weights", False)]
    assert last == ("runs", True)


def test_what_is_replaced_goes_as_a_whole(folder):
    make(folder, "old")
    (folder / "model-7").mkdir()
    make(folder, "new", replace=True)
    assert written(folder) == "new"
    assert names(folder) == ["v1.2-rm"]
    assert [path.name for path in folder.iterdir()] == ["model"]


@pytest.mark.parametrize("ends", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_a_block_that_ends_early_leaves_what_was_there(folder, ends):
    with pytest.raises(type(ends)):
        make(folder, ends=ends)
    assert names(folder) == []
    make(folder, "old")
    with pytest.raises(type(ends)):
        make(folder, replace=True, ends=ends)
    assert written(folder) == "old"
    assert names(folder) == ["v1.2-rm"]


def test_what_exists_is_kept_unless_asked(folder):
    make(folder, "old")
    with pytest.raises(InputError, match="--replace"):
        make(folder)
    assert written(folder) == "old"
    assert names(folder) == ["v1.2-rm"]


def test_what_a_killed_command_left_is_swept_away(folder):
    partial = folder.parent / ".v1.2-rm.partial"
    (partial / "model-0").mkdir(parents=True)
    (partial / "half").write_text("half")
    make(folder)
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_two_at_once_are_refused(folder):
    with atomic_folder(folder, replace=False) as partial:
        (partial / "mine").write_text("mine")
        with pytest.raises(InputError, match="another command is making"):
            make(folder)
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_one_that_a_run_uses_is_not_replaced_and_one_that_is_replaced_is_not_used(folder):
    make(folder, "old")
    (folder / ORIGIN_FILE).write_text("{}")
    with in_use([folder, folder.with_name("none")]), in_use([folder]):
        with pytest.raises(InputError, match="is in use by another command"):
            make(folder, replace=True)
        assert names(folder) == ["v1.2-rm"]
    with atomic_folder(folder, replace=True) as partial:
        (partial / ORIGIN_FILE).write_text("{}")
        with pytest.raises(InputError, match="another command is replacing"), in_use([folder]):
            pass
    assert names(folder) == ["v1.2-rm"]
    assert [path.name for path in folder.iterdir()] == [ORIGIN_FILE]


def test_one_that_is_being_made_is_not_used_and_one_that_nobody_makes_may_be_missing(folder):
    with (
        atomic_folder(folder, replace=False),
        pytest.raises(InputError, match="another command is making"),
        in_use([folder]),
    ):
        pass
    with in_use([folder.with_name("none")]):
        pass


@pytest.mark.parametrize(("private", "mode"), [(True, 0o700), (False, 0o755)])
def test_a_private_one_is_read_by_its_owner_alone(folder, private, mode):
    before = os.umask(0o022)
    try:
        with atomic_folder(folder, replace=False, private=private):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == mode
