"""Pipelines as they are read: what each stage makes, needs and is called with."""

import pytest

from deploy.config.pipeline import load_pipeline
from headway.errors import InputError

PREFER = 'prefer = { pairs = "lettered_chain_sum" }'


def stage(name, command, more=""):
    return f'[[stages]]\nname = "{name}"\ncommand = "{command}"\nrecipe = "demo"\n{more}\n'


ROAD = (
    f'name = "road"\n[set]\nseed = 3\n{PREFER}\n'
    + stage("warm", "sft")
    + stage("liked", "prefer")
    + stage("marks", "reward-model")
    + stage("policy", "run", "set = { steps = 7, learner.learning_rate = 1e-5 }")
    + stage(
        "again", "run",
        'set = { "sft.name" = "x", "actors.reward_model.paths" = ["x/y", "{marks}"], '
        '"actors.reward" = ["reward_model"], "learner.kl.reference" = "{policy}", '
        '"learner.distillation" = { teachers = [{ path = "{policy}" }] } }',
    )
    + '[scores]\nrecipe = "demo"\nsamples = 4\nset = { heldout.size = 9 }\n'
)  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read(text):
        (tmp_path / "road.toml").write_text(text)
        return load_pipeline(str(tmp_path / "road.toml"), tmp_path / "runs")

    return read


def test_stages_find_what_earlier_ones_make(read, tmp_path):
    pipeline = read(ROAD)
    at = tmp_path / "runs" / "road"
    made = {stage.name: stage.output for stage in pipeline.stages}
    assert made == {
        "warm": at / "road-sft/model",
        "liked": at / "road-prefer/model",
        "marks": at / "road-rm",
        "policy": at / "policy-model",
        "again": at / "again-model",
    }
    needs = {stage.name: stage.needs for stage in pipeline.stages}
    assert needs == {
        "warm": (),
        "liked": ("warm",),
        "marks": ("warm",),
        "policy": ("liked",),
        "again": ("liked", "marks", "policy"),
    }
    by_name = {stage.name: stage.config for stage in pipeline.stages}
    assert by_name["policy"].steps == 7
    assert by_name["policy"].learner.learning_rate == 1e-5
    assert {config.seed for config in by_name.values()} == {3}
    assert by_name["again"].actors.reward_model.paths == (
        "x/y", *(str(at / f"road-rm/model-{i}") for i in (0, 1)),
    )  # fmt: skip
    assert by_name["again"].learner.distillation.teachers[0].path == str(at / "policy-model")
    assert by_name["again"].learner.kl.reference == str(at / "policy-model")
    assert pipeline.scores[:2] == ("--suite", "demo")
    assert "heldout.size=9" in pipeline.scores
    assert pipeline.scores[-2:] == ("--samples", "4")


def test_the_shipped_pipeline_is_valid(tmp_path):
    stages = load_pipeline("demo", tmp_path).stages
    assert [stage.command for stage in stages] == ["sft", "prefer", "reward-model", "run"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "requires the option name"),
        ('name = "a"\nstages = []', "at least 1"),
        ('name = "a b"\n' + stage("x", "sft"), "name"),
        ('name = "a"\n' + stage("x", "train"), "stages.0.command = 'train'"),
        ('name = "a"\nset = 3\n' + stage("x", "sft"), "set = 3"),
        ('name = "a"\n' + stage("x", "sft", "sets = {}"), "stages.0.sets"),
        (
            'name = "a"\n' + stage("x", "sft") + stage("x", "run"),
            "stage 'x': an earlier stage has the same name",
        ),
        ('name = "a"\n' + stage("x", "sft") + stage("y", "sft"), "'x' and 'y' both make"),
        ('name = "a"\n' + stage("x", "prefer"), r"has no section \[prefer\]"),
        ('name = "a"\n' + stage("x", "sft", 'set = { "model.path" = "{y}" }'), "no earlier stage"),
        (
            'name = "a"\n' + stage("x", "sft", "set = { steps = 0 }"),
            "stage 'x': recipe demo:\n.*steps",
        ),
        ('name = "a"\n' + stage("x", "run"), "takes what `headway sft` makes, .* no earlier stage"),
        ('name = "a"\n' + stage("x", "run") + stage("y", "sft"), "stage 'x': its recipe takes"),
        (
            'name = "a"\n' + stage("x", "sft") + stage("y", "run", f"set = {{ {PREFER} }}"),
            "takes what `headway prefer` makes",
        ),
        (
            'name = "a"\n' + stage("x", "sft") + stage("a-sft", "run"),
            "'x' and 'a-sft' both make .*a/a-sft",
        ),
        (
            'name = "a"\n' + stage("x", "sft") + stage("y", "run") + stage("y-model", "run"),
            "'y' and 'y-model' both make .*a/y-model",
        ),
        ('name = "a"\nset = { name = "y" }\n' + stage("x", "sft"), "leave them out of set"),
        (f'name = "{"a" * 101}"\n' + stage("x", "sft"), "at most 100"),
        ('name = "a"\n' + stage("x", "sft").replace('"demo"', '"nowhere"'), "no recipe 'nowhere'"),
        ('name = "a"\n' + stage("x", "sft") + '[scores]\nrecipe = "demo"\nsamples = 0', "samples"),
        ("name = ", "cannot be read"),
    ],
)
def test_a_wrong_pipeline_is_refused_by_one_message(read, text, message):
    with pytest.raises(InputError, match=message):
        read(text)


def test_a_pipeline_that_does_not_exist_is_refused_with_the_shipped_ones(tmp_path):
    with pytest.raises(InputError, match=r"no pipeline 'dmo'.*demo"):
        load_pipeline("dmo", tmp_path)


def test_a_pipeline_does_not_have_the_folder_of_a_run(read, tmp_path):
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/recipe.toml").touch()
    with pytest.raises(InputError, match="runs/a is the folder of a run; choose another name"):
        read('name = "a"\n' + stage("x", "sft"))


def test_keys_within_a_table_are_not_parted_at_their_dots(read):
    more = '[stages.set.actors]\nreward = ["a.b:c"]\nreward_weights = { "a.b:c" = 0.5 }'
    pipeline = read('name = "a"\n' + stage("w", "sft") + stage("x", "run", more))
    assert pipeline.stages[1].config.actors.reward_weights == {"a.b:c": 0.5}
