"""The folder of a run, made anew from its backup on shared storage."""

import shutil

import pytest

from deploy.config.loader import load_recipe
from deploy.storage.repair.backups import find_begun_run, from_backup, named_backup
from deploy.storage.repair.whole_checkpoints import find_checkpoint
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import begin_session, resumed_recipe
from headway.errors import InputError
from queues.errors import LedgerError
from queues.readers.accounting import read_accounting
from queues.storage.backup import CURRENT
from tests.deploy.conftest import call_main
from tests.deploy.trained import create, train


@pytest.fixture
def run(tmp_path):
    """Provide a run of three batches with a checkpoint after two, and its backup."""
    return begin(tmp_path)


def begin(folder, *settings):
    places = [f"deploy.{key}={folder / key}" for key in ("runs_dir", "backup_dir")]
    config = load_recipe("demo", ["name=mine", *places, *settings])
    directory = create(config, replace=True)
    row = begin_session(directory, config, {"started_at": 1.0}, version=0)
    train(directory, [{"loss": 0.5}] * 3, session=row, saved=(2,))
    [backup] = (folder / "backup_dir").iterdir()
    return directory, backup


@pytest.mark.parametrize("apart", [False, True])
def test_a_run_whose_folder_is_lost_is_made_anew_with_its_recipe_and_checkpoints(tmp_path, apart):
    settings = [f"deploy.checkpoint_dir={tmp_path / 'apart'}"] if apart else []
    directory, backup = begin(tmp_path, *settings)
    recipe, accounts = directory.config(), read_accounting(directory.path)
    shutil.rmtree(directory.path)
    made = from_backup(backup, tmp_path / "other", print)
    assert made.path == tmp_path / "other" / "mine"
    assert made.config().model_dump(exclude={"deploy": {"runs_dir"}}) == recipe.model_dump(
        exclude={"deploy": {"runs_dir"}}
    )
    assert resumed_recipe(made, [])[1] == []
    assert made.backup.resolve() == backup
    assert read_accounting(made.path) == accounts
    version, folder = find_checkpoint(made, print)
    assert (version, (folder / "model.safetensors").read_text()) == (2, "weights 2")
    assert folder.resolve().is_relative_to(tmp_path / "apart" if apart else backup)
    with made.held():
        train(made, [], session=begin_session(made, made.config(), {}, version=3))


def test_a_recipe_finds_its_run_then_its_backup_and_never_one_of_several(tmp_path):
    config = load_recipe("demo", ["name=mine", f"deploy.runs_dir={tmp_path / 'runs_dir'}"])
    assert find_begun_run(config) is None
    backups = tmp_path / "backup_dir"
    config = config.updated(deploy={"backup_dir": backups})
    assert find_begun_run(config) is None
    directory, backup = begin(tmp_path)
    (backups / "mine-and-more-0123abcd").mkdir()
    (backups / "mine-and-more-0123abcd" / CURRENT).write_text("{}")
    (backups / "mine-0123abcd").mkdir()  # its run was killed before it had a broker
    assert find_begun_run(config) == directory.path
    shutil.rmtree(directory.path)
    assert find_begun_run(config) == backup
    (backups / "mine-0123abcd" / CURRENT).write_text("{}")
    with pytest.raises(InputError, match=r"several runs named 'mine': .*mine-0123abcd, .*mine-"):
        find_begun_run(config)


def test_a_folder_that_exists_stays_and_is_named(run, tmp_path):
    directory, backup = run
    with pytest.raises(InputError, match="exists: go on with `headway resume"):
        from_backup(backup, tmp_path / "runs_dir", print)
    with named_backup(directory):
        pass  # it has not been taken over


def test_what_is_no_backup_is_named(tmp_path):
    with pytest.raises(LedgerError, match=r"cannot be read.*No such file"):
        from_backup(tmp_path, tmp_path / "runs", print)
    (tmp_path / CURRENT).write_text('{"ledger": "ledger-1.sqlite"}')
    with pytest.raises(LedgerError, match=r"current\.json is damaged: KeyError\('name'\)"):
        from_backup(tmp_path, tmp_path / "runs", print)


@pytest.mark.parametrize("private", [True, False])
def test_a_folder_made_anew_is_as_private_as_it_was(tmp_path, private):
    directory, backup = begin(tmp_path, f"deploy.private={str(private).lower()}")
    made = from_backup(backup, tmp_path / "other", print)
    for name in (".", "logs"):
        modes = {(run.path / name).stat().st_mode for run in (directory, made)}
        assert len(modes) == 1


def test_of_two_commands_that_make_one_folder_anew_the_second_is_refused(run, tmp_path):
    _, backup = run
    elsewhere = RunDirectory(tmp_path / "other" / "mine")
    with elsewhere.lock.named(), pytest.raises(InputError, match="another command makes"):
        from_backup(backup, tmp_path / "other", print)
    assert from_backup(backup, tmp_path / "other", print).path == elsewhere.path


@pytest.fixture
def lost_and_found(run, tmp_path):
    """Provide a folder whose run went on in another, which saved the next checkpoint."""
    directory, backup = run
    made = from_backup(backup, tmp_path / "other", print)
    with made.held():
        row = begin_session(made, made.config(), {}, version=3)
        train(made, [{"loss": 0.5}], first=3, session=row, saved=(4,))
    return directory, made


def is_whole(made):
    version, folder = find_checkpoint(made, print)
    return (version, (folder / "model.safetensors").read_text()) == (4, "weights 4")


def refused(command, directory, message):
    result = call_main([command, directory.path], directory.path.parent)
    assert result.returncode == 1
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("command", ["resume", "salvage"])
def test_a_folder_that_comes_back_is_refused_and_changes_nothing(lost_and_found, command):
    directory, made = lost_and_found
    refused(command, directory, "is older than its backup, from which the run went on")
    assert is_whole(made)


def test_a_folder_that_comes_back_is_replaced_alone(lost_and_found):
    directory, made = lost_and_found
    config = directory.config()
    create(config, replace=True)
    assert is_whole(made)


@pytest.mark.parametrize("command", ["resume", "salvage"])
def test_damage_names_the_backup_that_has_what_is_lost(run, command):
    directory, backup = run
    directory.ledger.write_bytes(b"no ledger" * 1000)
    refused(command, directory, f"move {directory.path} away, and `headway resume {backup}`")


def test_a_run_that_is_replaced_takes_its_backup_with_it(run, tmp_path):
    _, backup = run
    _, other = begin(tmp_path)
    assert other != backup
    assert not backup.exists()


def test_resume_takes_the_folder_of_a_backup(tmp_path):
    directory, backup = begin(tmp_path, "steps=3")
    shutil.rmtree(directory.path)
    (tmp_path / "other").mkdir()
    done = call_main(["resume", backup, "--set", "model.path=nowhere"], tmp_path / "other")
    assert "other/runs/mine is made anew from its backup" in " ".join(done.stdout.split())
    assert done.returncode == 2, "the model of a run stays"
    again = call_main(["resume", backup], tmp_path / "other")
    assert (again.returncode, "exists: go on with" in again.stderr) == (2, True)
