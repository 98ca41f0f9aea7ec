"""Presets: complete, sourced, and below what a recipe says itself."""

import re

import pytest

from deploy.config.loader import description, load_recipe, preset_names, with_preset
from headway.errors import InputError

PRESETS = {
    "reinforce", "rloo", "grpo", "dr_grpo", "dapo", "cispo", "scalerl", "gspo", "sapo", "areal",
    "ppo_rlhf", "vapo", "reinforce_pp", "remax", "online_dpo", "raft",
}  # fmt: skip


def test_every_preset_of_the_field_is_shipped():
    assert set(preset_names()) == PRESETS


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_gives_an_account_with_its_source(name):
    assert len(description(name)) > 100
    assert re.search(r"arXiv \d{4}\.\d{5}|Williams 1992", description(name))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_alone_is_the_demo_under_it(name):
    config, demo = load_recipe(name), load_recipe("demo")
    assert config.name == config.preset == name
    assert config.warm_start == demo.warm_start
    assert config.prompts == demo.prompts
    assert config.learner.learning_rate == demo.learner.learning_rate


def test_what_a_preset_says_wins_over_the_demo():
    assert load_recipe("demo").queues.max_staleness == 2
    assert load_recipe("areal").queues.max_staleness == 4
    assert load_recipe("scalerl").queues.max_staleness == 8
    assert load_recipe("demo").actors.reward == ("last_answer",)
    assert load_recipe("ppo_rlhf").actors.reward == ("reward_model",)


def test_a_preset_that_is_set_is_the_one_that_is_trained():
    config, dapo = load_recipe("grpo", ["preset=dapo"]), load_recipe("dapo")
    assert (config.name, config.preset) == ("grpo", "dapo")
    assert (config.learner, config.queues) == (dapo.learner, dapo.queues)


def test_a_buffer_in_tokens_takes_the_place_of_a_share():
    overlong = load_recipe("dapo", ["actors.overlong.buffer=16"]).actors.overlong
    assert (overlong.buffer, overlong.share) == (16, None)


def test_what_a_recipe_says_wins():
    recipe = {"preset": "gspo", "learner": {"minibatches": 2, "learning_rate": 1e-5}}
    document = with_preset(recipe)
    assert document["learner"]["minibatches"] == 2
    assert document["learner"]["loss"] == "gspo"
    assert recipe["learner"] == {"minibatches": 2, "learning_rate": 1e-5}


def test_options_go_with_the_choice_they_are_of():
    other = with_preset({"preset": "gspo", "learner": {"loss": "ppo"}})["learner"]
    assert "loss_options" not in other
    assert other["correction_options"] == {"cap": 2.0}
    same = with_preset({"preset": "gspo", "learner": {"loss": "gspo"}})["learner"]
    assert same["loss_options"] == {"clip_low": 3e-4, "clip_high": 4e-4}
    own = with_preset({"preset": "gspo", "learner": {"loss_options": {"clip_low": 0.1}}})["learner"]
    assert own["loss_options"] == {"clip_low": 0.1}


def test_a_critic_is_optimised_like_the_policy_unless_it_says_otherwise():
    same, own = (
        load_recipe("vapo", overrides).learner
        for overrides in ([], ["learner.critic.learning_rate=0.5"])
    )
    assert same.critic.learning_rate == same.learning_rate == 3e-4
    assert same.critic.betas == same.betas == (0.9, 0.99)
    assert own.critic.learning_rate == 0.5
    assert own.critic.betas == own.betas


@pytest.mark.parametrize(
    ("preset", "message"),
    [("gpso", "did you mean 'gspo'"), (3, "preset = 3 is not one of areal"), ("", "not one of")],
)
def test_an_unknown_preset_names_the_nearest(preset, message):
    with pytest.raises(InputError, match=re.escape(message)):
        with_preset({"preset": preset})


def test_the_command_lists_presets_and_shows_one():
    from typer.testing import CliRunner

    from deploy.cli.app import app

    listed = CliRunner().invoke(app, ["presets"]).stdout.splitlines()
    assert [line.split()[0] for line in listed] == preset_names()
    assert "dapo           DAPO (Yu et al. 2025, arXiv 2503.14476)" in listed
    shown = CliRunner().invoke(app, ["presets", "gspo"]).stdout
    assert shown.startswith("# GSPO (Zheng et al. 2025, arXiv 2507.18071).")
    assert 'loss = "gspo"' in shown


def test_presets_whose_papers_say_so_have_a_small_epsilon():
    epsilons = {name: load_recipe(name).learner.epsilon for name in PRESETS}
    small = {"cispo", "scalerl"}
    assert epsilons == {name: 1e-15 if name in small else 1e-8 for name in PRESETS}
