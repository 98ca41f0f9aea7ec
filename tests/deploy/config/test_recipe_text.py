"""A recipe that is written as TOML is read as the same recipe."""

import json

import pytest

from deploy.config.devices import for_this_machine
from deploy.config.loader import SHIPPED_RECIPES, load_recipe, preset_names, short_text
from deploy.config.recipe_text import recipe_text, toml_value
from tests.deploy.conftest import call_main

SHIPPED = sorted(path.stem for path in SHIPPED_RECIPES.glob("*.toml"))


def read_again(text, folder):
    file = folder / "again.toml"
    file.write_text(text)
    return load_recipe(str(file))


@pytest.mark.parametrize("name", [*SHIPPED, *preset_names()])
def test_every_recipe_is_read_as_it_was_written_whole_and_in_short(name, tmp_path):
    config = load_recipe(name)
    assert read_again(recipe_text(config), tmp_path) == config
    completed = for_this_machine(config)
    short = short_text(completed)
    assert for_this_machine(read_again(short, tmp_path)) == completed
    assert len(short) < len(recipe_text(completed)) / 2


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (["preset=vapo", "learner.positive_nll=0.0"], "positive_nll = 0.0"),
        (["learner.advantage=gae", "learner.critic.learning_rate=1e-6"], "learning_rate = 1e-06"),
    ],
)
def test_a_default_value_is_kept_in_short_where_something_else_would_take_its_place(
    settings, kept, tmp_path
):
    config = for_this_machine(load_recipe("demo", settings))
    assert kept in short_text(config)
    assert for_this_machine(read_again(short_text(config), tmp_path)) == config


def test_texts_of_all_kinds_tables_and_numbers_are_read_as_they_were_written(tmp_path):
    options = {
        "quoted": 'a "b" \\ \'c\'', "lines": "a\nb\tc\r\x00\x1f\x7f", "letters": "η − 🎲",
        "a key.with parts": [1, 2.5, 1e-12, 10**12, True, []], "": {"deep": {"er": [{"x": 1}]}},
    }  # fmt: skip
    config = load_recipe("demo")
    prompts = config.prompts.model_copy(update={"source_options": options})
    written = config.model_copy(update={"prompts": prompts})
    assert read_again(recipe_text(written), tmp_path).prompts.source_options == options


def test_a_value_is_one_line():
    assert toml_value({"k": 4, "names": ["a", "b"], "none": {}}) == (
        '{ k = 4, names = ["a", "b"], none = {} }'
    )


def test_validate_prints_what_differs_all_keys_or_json(tmp_path):
    said = ["validate", "demo", "--set", "steps=7", "--set", "queues.max_staleness=2"]
    printed = call_main(said, tmp_path)
    (tmp_path / "mine.toml").write_text(printed.stdout)
    assert load_recipe(str(tmp_path / "mine.toml")) == load_recipe("demo", ["steps=7"])
    assert "max_staleness" not in printed.stdout
    everything = call_main(["validate", "mine.toml", "--all"], tmp_path).stdout
    assert "steps = 7" in everything
    assert "# window is not set" in everything
    as_json = call_main(["validate", "mine.toml", "--json"], tmp_path)
    assert json.loads(as_json.stdout)["queues"]["max_staleness"] == 2
