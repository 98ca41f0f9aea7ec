"""A recipe that was edited in the folder of its run: what is noticed, applied and refused."""

import pytest

from deploy.config.changes import APPLIED
from deploy.config.loader import load_recipe
from deploy.config.run_config import RunConfig
from deploy.preflight.provenance import environment
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import begin_session, recipe_at, recipe_changes
from tests.deploy.conftest import call_main
from tests.deploy.trained import train


@pytest.fixture
def directory(tmp_path):
    """Provide a run that ended after 2 of 2 steps."""
    config = load_recipe("demo", [f"deploy.runs_dir={tmp_path / 'runs'}", "name=mine", "steps=2"])
    made = RunDirectory.of(config)
    made.create(config, replace=False)
    begin_session(made, made.config(), {"started_at": 1.0}, version=0)
    train(made, [{"loss": 0.5}, {"loss": 0.25}])
    made.write_summary({"status": "done", "version": 2})
    return made


def edit(directory, *replacements):
    text = directory.recipe_file.read_text()
    for before, after in replacements:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    directory.recipe_file.write_text(text)


def changed(directory):
    return list(map(str, recipe_changes(directory, directory.config())))


def test_a_recipe_that_was_not_edited_or_only_moved_has_no_changes(directory, tmp_path):
    assert changed(directory) == []
    edit(directory, ("steps = 2\n", "steps = 2  # as before\n"))
    assert changed(directory) == []
    directory.path.parent.rename(tmp_path / "elsewhere")
    assert changed(RunDirectory(tmp_path / "elsewhere" / "mine")) == []


def test_cores_that_were_chosen_for_the_machine_are_no_edit_and_are_replayed(directory):
    edit(directory, ('cores = "1"\n', ""))
    config = directory.config()
    chosen = config.model_copy(update={"learner": config.learner.model_copy(update={"cores": "1"})})
    begin_session(directory, chosen, {"started_at": 2.0}, version=2)
    assert changed(directory) == []
    assert recipe_at(directory, 2).learner.cores == "1"
    edit(directory, ("\n[learner]\n", '\n[learner]\ncores = "0"\n'))
    assert changed(directory) == ['learner.cores = "0", was "1"']


def test_what_a_run_can_go_on_with_is_named_and_is_known_to_the_next_session(directory):
    edit(directory, ("steps = 2\n", "steps = 9\n"))
    edit(directory, ("learning_rate = 0.0003\n", "learning_rate = 1e-5\n"))
    assert changed(directory) == ["learner.learning_rate = 1e-05, was 0.0003", "steps = 9, was 2"]
    begin_session(directory, directory.config(), {"started_at": 2.0}, version=2)
    assert changed(directory) == []
    recipes = [recipe_at(directory, version) for version in (0, 1, 2, 5)]
    assert [recipe.steps for recipe in recipes] == [2, 2, 9, 9]
    assert recipes[2] == directory.config()


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("seed = 0", "seed = 1", "seed = 1, was 0"),
        ("group_size = 8", "group_size = 4", "prompts.group_size = 4, was 8"),
        ("# ess_target is not set", "ess_target = 0.5", "queues.ess_target = 0.5, was none"),
        ("{ cap_high = 5.0 }", "{ cap_high = 4.0 }", "learner.loss_options.cap_high = 4.0, was 5"),
        ("steps = 2\n", "steps = 1\n", "steps = 1, was 2: a run can be made longer"),
    ],
)
def test_what_a_run_cannot_go_on_with_is_refused_with_a_way_out(directory, before, after, named):
    edit(directory, (before, after))
    refused = call_main(["resume", "mine"], directory.path.parents[1])
    assert refused.returncode == 2
    assert named in refused.stderr
    assert f"headway run {directory.recipe_file} --set name=" in refused.stderr
    assert "learner.learning_rate" in refused.stderr


def test_a_run_that_is_done_says_how_many_steps_it_has_trained(directory):
    resumed = call_main(["resume", "mine"], directory.path.parents[1])
    assert "mine is done: 2 of 2 steps are trained" in resumed.stdout
    assert f"raise steps in {directory.recipe_file}" in resumed.stdout


def test_a_run_that_is_done_and_asks_for_more_is_not_called_done(directory):
    edit(directory, ("steps = 2\n", "steps = 75\n"))
    resumed = call_main(["resume", "mine"], directory.path.parents[1])  # no warm start is there
    assert "steps = 75, was 2" in resumed.stdout
    assert "is done" not in resumed.stdout
    assert "75 of 75" not in resumed.stdout + resumed.stderr


def test_a_recipe_that_was_edited_into_nonsense_is_refused_by_key(directory):
    edit(directory, ("group_size = 8", "grup_size = 8"))
    refused = call_main(["resume", "mine"], directory.path.parents[1])
    assert refused.returncode == 2
    assert "prompts.grup_size: unknown key; did you mean 'group_size'?" in refused.stderr


def test_settings_that_a_run_goes_on_with_exist():
    for name in APPLIED:
        model = RunConfig
        for part in name.split("."):
            assert part in model.model_fields, name
            model = model.model_fields[part].annotation


def test_the_environment_names_program_packages_and_machine():
    found = environment()
    assert found["packages"]["headway-rl"] == found["headway"]
    assert found["machine"]["cpu"]
    assert found["machine"]["memory_gib"] > 0
