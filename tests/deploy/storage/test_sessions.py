"""A recipe that was edited in the folder of its run: what is noticed, applied and refused."""

import pytest

from deploy.api.training_run import resume
from deploy.config.changes import rule_of
from deploy.config.loader import load_recipe
from deploy.runtime.machine import environment
from deploy.storage.run_directory import RunDirectory
from deploy.storage.sessions import begin_session, earlier_sessions, last_recipe, resumed_recipe
from headway.errors import InputError
from tests.deploy.conftest import call_main
from tests.deploy.trained import create, train


@pytest.fixture
def directory(tmp_path):
    """Provide a run that ended after 2 of 2 steps."""
    config = load_recipe("demo", [f"deploy.runs_dir={tmp_path / 'runs'}", "name=mine", "steps=2"])
    made = create(config)
    row = begin_session(made, made.config(), {"started_at": 1.0}, version=0)
    train(made, [{"loss": 0.5}, {"loss": 0.25}], session=row)
    made.write_summary({"status": "done", "version": 2})
    return made


def edit(directory, *replacements):
    text = directory.recipe_file.read_text()
    for before, after in replacements:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    directory.recipe_file.write_text(text)


def changed(directory, *overrides):
    return list(map(str, resumed_recipe(directory, overrides)[1]))


def go_on(directory, *overrides, version):
    """Begin another session with overrides, as `headway resume --set` does."""
    config, _ = resumed_recipe(directory, overrides)
    directory.store_recipe(config)
    begin(directory, config, version=version)


def begin(directory, config, *, version):
    """Begin a session, as far as the start of its broker."""
    row = begin_session(directory, config, {"started_at": float(version)}, version=version)
    train(directory, [], session=row)


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
    begin(directory, chosen, version=2)
    assert changed(directory) == []
    assert last_recipe(directory, 2).learner.cores == "1"
    edit(directory, ("\n[learner]\n", '\n[learner]\ncores = "0"\n'))
    assert changed(directory) == ['learner.cores: "1" → "0"']


def test_what_a_run_can_go_on_with_is_named_and_is_known_to_the_next_session(directory):
    edit(directory, ("steps = 2\n", "steps = 9\n"))
    edit(directory, ("learning_rate = 0.0003\n", "learning_rate = 1e-5\n"))
    assert changed(directory) == ["learner.learning_rate: 0.0003 → 1e-05", "steps: 2 → 9"]
    go_on(directory, version=2)
    assert changed(directory) == []
    recipes = [last_recipe(directory, version) for version in (0, 1, 2, 5)]
    assert [recipe.steps for recipe in recipes] == [2, 2, 9, 9]
    assert recipes[2] == directory.config()


def test_the_file_of_sessions_is_a_copy_of_what_the_ledger_has(directory):
    go_on(directory, "learner.learning_rate=1e-5", version=2)
    file = directory.path / "sessions.jsonl"
    text = file.read_text()
    file.write_text(text.replace("0.0003", "0.0009"))
    assert earlier_sessions(directory, directory.config())[0].config.learning_rate == 3e-4
    go_on(directory, version=2)
    assert file.read_text().startswith(text)
    file.unlink()
    assert changed(directory, "steps=9") == ["steps: 2 → 9"]


def test_a_session_whose_broker_did_not_start_is_none(directory):
    config, _ = resumed_recipe(directory, ["learner.learning_rate=1e-5"])
    begin_session(directory, config, {"started_at": 2.0}, version=2)
    changes = changed(directory, "learner.learning_rate=1e-5")
    assert changes == ["learner.learning_rate: 0.0003 → 1e-05"]
    assert earlier_sessions(directory, directory.config()) == ()


def test_what_is_set_is_kept_in_the_recipe_and_recorded_by_session(directory):
    go_on(directory, "steps=9", "learner.learning_rate=1e-5", version=2)
    go_on(directory, "learner.learning_rate=2e-5", "learner.ranks=2", version=4)
    go_on(directory, version=5)
    go_on(directory, "learner.learning_rate=2e-5", version=6)
    assert [row["changes"] for row in directory.rows("sessions.jsonl")] == [
        [],
        ["learner.learning_rate: 0.0003 → 1e-05", "steps: 2 → 9"],
        ["learner.learning_rate: 1e-05 → 2e-05", "learner.ranks: 1 → 2"],
        [],
        [],
    ]
    config = directory.config()
    assert (config.steps, config.learner.learning_rate, config.learner.ranks) == (9, 2e-5, 2)


def test_batches_of_earlier_sessions_keep_what_they_were_trained_with(directory):
    go_on(directory, "steps=9", "learner.learning_rate=1e-5", version=2)
    go_on(directory, "learner.learning_rate=2e-5", "learner.microbatch_tokens=99", version=4)
    config = directory.config()
    first, second = earlier_sessions(directory, config)
    assert (first.end, first.steps, first.config.learning_rate) == (2, 2, 3e-4)
    assert (second.end, second.steps, second.config.learning_rate) == (4, 9, 1e-5)
    assert first.config.microbatch_tokens == 99
    assert second.config == config.objective.model_copy(update={"learning_rate": 1e-5})
    assert [session.end for session in earlier_sessions(directory, config, last=3)] == [2]
    assert earlier_sessions(directory, config, last=1) == ()


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("seed = 0", "seed = 1", "seed: 0 → 1: its ledger has prompts"),
        ("group_size = 8", "group_size = 4", "prompts.group_size: 8 → 4: its ledger has prompts"),
        ("{ cap_high = 5.0 }", "{ cap_high = 4.0 }", "learner.loss_options.cap_high: 5.0 → 4.0"),
        ("max_staleness = 2", "max_staleness = 1", "queues.max_staleness: 2 → 1: it can only be"),
        ("steps = 2\n", "steps = 1\n", "steps: 2 → 1: a run can be made longer"),
    ],
)
def test_what_a_run_cannot_go_on_with_is_refused_with_a_way_out(directory, before, after, named):
    edit(directory, (before, after))
    with pytest.raises(InputError) as refused:
        resumed_recipe(directory, [])
    for words in (named, f"headway run {directory.recipe_file} --set name=", "what can change is"):
        assert words in str(refused.value)


def test_a_run_that_sets_its_window_keeps_the_largest_bound_that_it_had(directory):
    auto = "queues.max_staleness=auto"
    with pytest.raises(InputError, match=r"queues.max_staleness: η 2 → 1: it can only be raised"):
        resumed_recipe(directory, [auto, "queues.staleness_ceiling=1"])
    go_on(directory, auto, "queues.staleness_ceiling=4", version=2)
    with pytest.raises(InputError, match=r"queues.staleness_ceiling: 4 → 3: it can only be raised"):
        resumed_recipe(directory, ["queues.staleness_ceiling=3"])
    config, _ = resumed_recipe(directory, ["queues.staleness_ceiling=6"])
    assert config.queues.bound == 6


def test_what_is_set_and_cannot_change_is_refused_by_name_before_anything_is_written(directory):
    before = directory.recipe_file.read_text()
    settings = ["steps=9", "name=other", "learner.betas=[0.5, 0.5]", "deploy.runs_dir=/tmp"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    refused = call_main(["resume", "mine", *arguments], directory.path.parents[1])
    assert refused.returncode == 2
    assert "mine cannot go on with" in refused.stderr
    assert 'name: "mine" → "other": it is the name of the run\'s folder' in refused.stderr
    assert "→ [0.5, 0.5]: it is a constant of the optimizer" in refused.stderr
    assert "deploy.runs_dir: the run is where its folder is" in refused.stderr
    assert "steps: 2" not in refused.stderr
    assert directory.recipe_file.read_text() == before
    assert len(directory.rows("sessions.jsonl")) == 1


def test_from_python_too_it_is_refused_at_once(directory):
    with pytest.raises(InputError, match=r"prompts\.group_size: 8 → 4: its ledger has"):
        resume(str(directory.path), overrides={"prompts": {"group_size": 4}})


def test_a_copy_of_a_run_may_have_the_name_of_its_folder(directory):
    copy = RunDirectory(directory.path.rename(directory.path.with_name("copy")))
    assert changed(copy, "name=copy") == ['name: "mine" → "copy"']
    with pytest.raises(InputError, match="it is the name of the run's folder"):
        changed(copy, "name=other")


def test_a_run_that_is_done_says_how_many_steps_it_has_trained(directory):
    resumed = call_main(["resume", "mine"], directory.path.parents[1])
    assert "mine is done: 2 of 2 steps are trained" in resumed.stdout
    assert f"headway resume {directory.path} --set steps=" in resumed.stdout
    again = call_main(["resume", "mine", "--set", "steps=2"], directory.path.parents[1])
    assert (again.returncode, "is done" in again.stdout) == (0, True)


def test_a_run_that_is_done_and_asks_for_more_is_not_called_done(directory):
    edit(directory, ("steps = 2\n", "steps = 75\n"))
    resumed = call_main(["resume", "mine"], directory.path.parents[1])  # no warm start is there
    assert "steps: 2 → 75" in resumed.stdout
    assert "is done" not in resumed.stdout
    assert "75 of 75" not in resumed.stdout + resumed.stderr


def test_what_is_set_or_edited_into_nonsense_is_answered_with_what_there_is(directory):
    with pytest.raises(InputError, match=r"learner\.lr: unknown key; did you mean 'learning_rate'"):
        resumed_recipe(directory, ["learner.lr=1"])
    edit(directory, ("group_size = 8", "grup_size = 8"))
    with pytest.raises(InputError, match=r"prompts\.grup_size: .* did you mean 'group_size'"):
        resumed_recipe(directory, [])


@pytest.mark.parametrize(
    ("key", "refusal"),
    [
        ("learner.loss_options.cap_high", "the objective"),
        ("learner.kl.coefficient", "the objective"),
        ("learner.critic.clip", "the objective"),
        ("learner.critic.betas", "a constant of the optimizer"),
        ("learner.critic.lora.rank", "the factors of this adapter"),
        ("actors.overlong.buffer", "sampled and scored with it"),
        ("model.tiny.layers", "the weights of the run began with it"),
        ("learner.critic.learning_rate", None),
        ("learner.schedule.kind", None),
        ("deploy.placement.learner.labels.zone", None),
    ],
)
def test_a_key_follows_its_own_rule_else_that_of_the_section_that_declares_it(key, refusal):
    found = rule_of(key).refusal
    assert found is None if refusal is None else refusal in found


def test_the_environment_names_program_packages_and_machine():
    found = environment()
    assert found["packages"]["headway-rl"] == found["headway"]
    assert found["machine"]["cpu"]
    assert found["machine"]["memory_gib"] > 0
