"""Run folders: made once, replaced on request, found by name or path."""

import pytest

from deploy.config import load_recipe
from deploy.errors import InputError
from deploy.run_directory import RunDirectory


@pytest.fixture
def config(tmp_path):
    return load_recipe("demo", [f"deploy.runs_dir={tmp_path}", "name=first"])


def test_the_stored_recipe_is_the_resolved_one(config):
    stored = RunDirectory.create(config, replace=False)
    assert stored.config() == config
    assert [p.name for p in stored.path.parent.iterdir()] == ["first"]


def test_a_second_run_of_the_same_name_is_refused_and_leaves_the_first_alone(config):
    first = RunDirectory.create(config, replace=False)
    first.append("metrics.jsonl", [{"version": 0}])
    with pytest.raises(InputError, match="a run named 'first' exists"):
        RunDirectory.create(config, replace=False)
    metrics = first.path / "metrics.jsonl"
    assert metrics.read_text() == '{"version": 0}\n'
    RunDirectory.create(config, replace=True)
    assert not metrics.exists()


def test_a_run_that_ended_before_its_first_batch_gives_way(config):
    for version, gives_way in ((0, True), (1, False)):
        RunDirectory.create(config, replace=True).write_summary({"version": version})
        if gives_way:
            assert not RunDirectory.create(config, replace=False).summary_file.exists()
        else:
            with pytest.raises(InputError, match="exists"):
                RunDirectory.create(config, replace=False)


def test_a_run_to_be_replaced_is_back_if_the_new_one_is_discarded_and_gone_once_it_has_begun(
    config,
):
    RunDirectory.create(config, replace=False).append("metrics.jsonl", [{"version": 0}])
    RunDirectory.create(config, replace=True).discard()
    back = RunDirectory.open("first", config.deploy.runs_dir)
    assert back.rows("metrics.jsonl") == [{"version": 0}]
    RunDirectory.create(config, replace=True).settle()
    assert back.rows("metrics.jsonl") == []
    assert [path.name for path in config.deploy.runs_dir.iterdir()] == ["first"]


def test_a_folder_that_is_not_a_run_is_never_replaced(config, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "thesis.txt").write_text("years of work")
    for replace in (False, True):
        with pytest.raises(InputError, match="is not a run folder"):
            RunDirectory.create(config, replace=replace)
    assert (tmp_path / "first" / "thesis.txt").exists()


def test_a_run_is_found_by_name_and_by_path_and_a_missing_one_lists_what_there_is(config, tmp_path):
    made = RunDirectory.create(config, replace=False)
    assert RunDirectory.open("first", tmp_path) == made
    assert RunDirectory.open(str(made.path)) == made
    with pytest.raises(InputError, match=r"runs in .*: first"):
        RunDirectory.open("second", tmp_path)


def test_a_runs_folder_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    config = load_recipe("demo", [f"deploy.runs_dir={tmp_path / 'file'}"])
    with pytest.raises(InputError, match="cannot be written"):
        RunDirectory.create(config, replace=False)
