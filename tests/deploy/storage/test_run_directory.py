"""Run folders: made once, replaced on request, found by name or path."""

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from deploy.config.loader import load_recipe
from deploy.errors import RunFailed
from deploy.runtime import session_process
from deploy.storage.jsonl import append_rows, rewrite_rows
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_lock import RunMissing
from headway.errors import InputError
from headway.file_lock import locked
from tests.deploy.trained import create, train


@pytest.fixture
def config(tmp_path):
    return load_recipe("demo", [f"deploy.runs_dir={tmp_path}", "name=first"])


def test_the_stored_recipe_is_the_resolved_one(config):
    stored = create(config)
    assert stored.config() == config.with_model_names()
    assert [p.name for p in stored.path.parent.iterdir()] == ["first"]


def test_recipe_summary_and_sessions_are_durable(config, monkeypatch):
    synced, sync = [], os.fsync

    def record(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    directory = create(config)
    assert synced == [".recipe.toml.partial", ".first.partial", config.deploy.runs_dir.name]
    synced.clear()
    directory.store_recipe(config)
    directory.write_summary({"status": "done"})
    rewrite_rows(directory.path / "sessions.jsonl", [{"version": 0}])
    files = (".recipe.toml.partial", ".summary.json.partial", ".sessions.jsonl.partial")
    assert synced == [name for file in files for name in (file, "first")]


def test_a_second_run_of_the_same_name_is_refused_and_leaves_the_first_alone(config):
    first = create(config)
    train(first, [{"loss": 1.0}])
    append_rows(first.path / "metrics.jsonl", [{"version": 0}])
    with pytest.raises(InputError, match="a run named 'first' exists"):
        create(config)
    metrics = first.path / "metrics.jsonl"
    assert metrics.read_text() == '{"version": 0}\n'
    create(config, replace=True)
    assert not metrics.exists()


def test_a_run_that_ended_before_it_had_a_result_gives_way(config):
    append_rows(create(config).path / "metrics.jsonl", [])
    assert create(config).rows("metrics.jsonl") == []
    train(create(config), [{"loss": 1.0}])
    with pytest.raises(InputError, match="exists"):
        create(config)


def test_of_records_that_cannot_all_be_written_none_is(config):
    def records():
        yield {"version": 1}
        raise OSError(errno.ENOSPC, "no space")

    directory = create(config)
    append_rows(directory.path / "metrics.jsonl", [{"version": 0}])
    with pytest.raises(OSError, match="no space"):
        append_rows(directory.path / "metrics.jsonl", records())
    append_rows(directory.path / "metrics.jsonl", [{"version": 2}])
    assert directory.rows("metrics.jsonl") == [{"version": 0}, {"version": 2}]


def test_records_of_another_version_are_refused_by_file_and_line(config):
    directory = create(config)
    assert directory.summary("heldout") == {}
    directory.write_summary({"status": "done"})
    with pytest.raises(InputError, match=r"summary.json is damaged: KeyError: 'heldout'"):
        directory.summary("heldout")
    append_rows(directory.path / "metrics.jsonl", [{"version": 0}, {"batch": 1}, []])
    for damaged in (2, 3):
        with pytest.raises(InputError, match=f"metrics.jsonl, line {damaged} is damaged: "):
            directory.rows("metrics.jsonl", lambda row: row["version"])
        rewrite_rows(directory.path / "metrics.jsonl", [{"version": 0}, {"version": 1}, []])


def test_a_run_that_another_command_holds_is_neither_replaced_nor_resumed(config):
    directory = create(config)
    with directory.held():
        holder = rf"is going on in \S+ \(process {os.getpid()} on {socket.gethostname()}\);"
        with pytest.raises(InputError, match=holder):
            create(config, replace=True)
        with pytest.raises(InputError, match="is going on"), RunDirectory(directory.path).held():
            pass
    directory.lock.check_at_rest()


def test_a_run_that_could_not_write_its_end_is_said_to_be_killed(config):
    directory = create(config)
    for _ in range(2):
        with directory.held():
            assert directory.status() == "running"
        assert directory.status() == "killed"
        directory.write_summary({"status": "running"})
    directory.write_summary({"status": "failed"})
    assert directory.status() == "failed"


def test_a_run_to_be_replaced_is_back_if_the_new_one_is_refused_and_gone_otherwise(config):
    append_rows(create(config).path / "metrics.jsonl", [{"version": 0}])
    back = RunDirectory.of(config)
    with pytest.raises(InputError, match="no cores"), back.created(config, replace=True):  # noqa: PT012
        assert back.rows("metrics.jsonl") == []
        raise InputError("no cores")
    assert back.rows("metrics.jsonl") == [{"version": 0}]
    with pytest.raises(RunFailed), back.created(config, replace=True):
        raise RunFailed("a rank died")
    assert back.rows("metrics.jsonl") == []
    assert names(config) == ["first"]


def names(config):
    return [path.name for path in config.deploy.runs_dir.iterdir()]


def test_a_run_that_is_refused_leaves_nothing_not_even_the_folder_of_runs(tmp_path):
    config = load_recipe("demo", [f"deploy.runs_dir={tmp_path / 'new' / 'runs'}"])
    with pytest.raises(InputError), RunDirectory.of(config).created(config, replace=False):
        raise InputError("no cores")
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]


def test_a_run_that_was_being_replaced_when_the_command_was_killed_is_back(config, tmp_path):
    train(create(config), [{"loss": 1.0}])
    (tmp_path / "first").rename(tmp_path / ".first.replaced")
    with pytest.raises(InputError, match="a run named 'first' exists"):
        create(config)
    assert names(config) == ["first"]


def test_a_run_that_was_replaced_is_gone_once_the_new_one_goes_on_after_a_kill(config, tmp_path):
    create(config)
    (tmp_path / ".first.replaced" / "checkpoints").mkdir(parents=True)
    with RunDirectory.of(config).held():
        assert names(config) == ["first"]


def test_a_run_that_is_being_made_is_held_from_its_beginning(config):
    directory = RunDirectory.of(config)
    with directory.created(config, replace=False):
        for replace in (False, True):
            with pytest.raises(InputError, match="is going on"):
                create(config, replace=replace)
        with pytest.raises(InputError, match="is going on"), RunDirectory(directory.path).held():
            pass
        assert directory.rows("metrics.jsonl") == []
    directory.lock.check_at_rest()


def test_a_run_between_two_sessions_of_a_command_is_held_but_for_the_next_of_them(config):
    directory = create(config)
    with locked(directory.path / session_process.PARENT_LOCK):
        with pytest.raises(InputError, match="is going on"), directory.held():
            pass
        with directory.held(is_again=True):
            pass


def test_what_another_has_put_in_the_place_of_a_refused_run_stays(config, tmp_path):
    directory = RunDirectory.of(config)
    with pytest.raises(InputError, match="late"), directory.created(config, replace=False):  # noqa: PT012
        directory.path.rename(tmp_path / "moved")  # by hand
        create(config)
        raise InputError("late")
    assert sorted(names(config)) == ["first", "moved"]


def test_a_run_that_is_gone_is_not_made_by_those_who_would_go_on_with_it(config, tmp_path):
    directory = create(config)
    directory.path.rename(tmp_path / "moved")
    with pytest.raises(RunMissing), directory.held():
        pass
    assert names(config) == ["moved"]


@pytest.mark.parametrize(("private", "mode"), [("true", 0o700), ("false", 0o755)])
def test_a_run_is_private_unless_asked(tmp_path, private, mode):
    before = os.umask(0o022)
    try:
        settings = [f"deploy.runs_dir={tmp_path}", f"deploy.private={private}"]
        directory = create(load_recipe("demo", settings))
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.path.stat().st_mode) == mode


def test_a_folder_that_is_not_a_run_is_never_replaced(config, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "thesis.txt").write_text("years of work")
    for replace in (False, True):
        with pytest.raises(InputError, match="is not a run folder"):
            create(config, replace=replace)
    assert (tmp_path / "first" / "thesis.txt").exists()


def test_a_run_is_found_by_name_and_by_path_and_a_missing_one_lists_what_there_is(config, tmp_path):
    made = create(config)
    assert RunDirectory.open("first", tmp_path).path == made.path
    assert RunDirectory.open(str(made.path)).path == made.path
    with pytest.raises(InputError, match=r"runs in .*: first"):
        RunDirectory.open("second", tmp_path)


def test_a_runs_folder_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    config = load_recipe("demo", [f"deploy.runs_dir={tmp_path / 'file'}"])
    with pytest.raises(InputError, match="cannot be written"):
        create(config)


@pytest.mark.parametrize("private", ["true", "false"])
def test_checkpoints_may_be_on_a_disk_of_their_own_and_go_with_their_run(tmp_path, private):
    disk = tmp_path / "disk" / "saved"
    settings = [f"deploy.runs_dir={tmp_path / 'runs'}", f"deploy.checkpoint_dir={disk}"]
    config = load_recipe("demo", [*settings, "name=first", f"deploy.private={private}"])
    directory = create(config)
    [made] = disk.iterdir()
    assert directory.checkpoints.resolve() == made
    assert made.name.startswith("first-")
    assert bool(stat.S_IMODE(made.stat().st_mode) & 0o077) is (private == "false")
    (made / "v000001").mkdir()
    other = load_recipe("demo", [*settings, "name=other"])
    with pytest.raises(InputError), RunDirectory.of(other).created(other, replace=False):
        raise InputError("nothing was trained")
    assert [path.name for path in disk.iterdir()] == [made.name], "the other one's is deleted"
    again = create(config, replace=True)
    [replaced] = disk.iterdir()
    assert replaced != made
    assert (again.checkpoints.resolve(), list(replaced.iterdir())) == (replaced, [])
