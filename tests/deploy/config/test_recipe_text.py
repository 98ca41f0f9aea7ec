"""A recipe that is written as TOML is read as the same recipe."""

import json

import pytest

from deploy.config.loader import SHIPPED_RECIPES, load_recipe
from deploy.config.presets import preset_names
from deploy.config.recipe_text import recipe_text, toml_value
from tests.deploy.conftest import call_main

SHIPPED = sorted(path.stem for path in SHIPPED_RECIPES.glob("*.toml"))


def read_again(config, folder):
    file = folder / "again.toml"
    file.write_text(recipe_text(config))
    return load_recipe(str(file))


@pytest.mark.parametrize("name", [*SHIPPED, *preset_names()])
def test_every_recipe_is_read_as_it_was_written(name, tmp_path):
    config = load_recipe(name)
    assert read_again(config, tmp_path) == config


def test_texts_of_all_kinds_tables_and_numbers_are_read_as_they_were_written(tmp_path):
    options = {
        "quoted": 'a "b" \\ \'c\'', "lines": "a\nb\tc\r\x00\x1f\x7f", "letters": "η − 🎲",
        "a key.with parts": [1, 2.5, 1e-12, 10**12, True, []], "": {"deep": {"er": [{"x": 1}]}},
    }  # fmt: skip
    config = load_recipe("demo")
    prompts = config.prompts.model_copy(update={"source_options": options})
    written = config.model_copy(update={"prompts": prompts})
    assert read_again(written, tmp_path).prompts.source_options == options


def test_a_value_is_one_line():
    assert toml_value({"k": 4, "names": ["a", "b"], "none": {}}) == (
        '{ k = 4, names = ["a", "b"], none = {} }'
    )


def test_validate_prints_a_recipe_that_can_be_run_and_json_on_request(tmp_path):
    printed = call_main(["validate", "demo", "--set", "steps=7"], tmp_path)
    (tmp_path / "mine.toml").write_text(printed.stdout)
    assert load_recipe(str(tmp_path / "mine.toml")) == load_recipe("demo", ["steps=7"])
    assert "# window is not set" in printed.stdout
    as_json = call_main(["validate", "mine.toml", "--json"], tmp_path)
    assert json.loads(as_json.stdout)["steps"] == 7
