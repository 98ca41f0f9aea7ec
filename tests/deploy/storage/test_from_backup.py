"""The folder of a run, made anew from its backup on shared storage."""

import shutil

import pytest

from deploy.config.loader import load_recipe
from deploy.errors import InputError
from deploy.storage.recovery import find_checkpoint, from_backup
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import begin_session, resumed_recipe
from queues.errors import LedgerError
from queues.readers.accounting import read_accounting
from tests.deploy.conftest import call_main
from tests.deploy.trained import train


@pytest.fixture
def run(tmp_path):
    """Provide a run of three batches with a checkpoint after two, and its backup."""
    return begin(tmp_path)


def begin(folder, *settings):
    places = [f"deploy.{key}={folder / key}" for key in ("runs_dir", "backup_dir")]
    config = load_recipe("demo", ["name=mine", *places, *settings])
    directory = RunDirectory.of(config)
    with directory.created(config, replace=True):
        pass
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
    made = from_backup(backup, tmp_path / "other")
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


def test_a_folder_that_exists_stays_and_is_named(run, tmp_path):
    directory, backup = run
    with pytest.raises(InputError, match="exists: go on with `headway resume"):
        from_backup(backup, tmp_path / "runs_dir")
    assert directory.config().name == "mine"


def test_what_is_no_backup_is_named(tmp_path):
    with pytest.raises(LedgerError, match="is not the backup of a run"):
        from_backup(tmp_path, tmp_path / "runs")


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
