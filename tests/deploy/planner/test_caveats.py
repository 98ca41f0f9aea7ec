"""Runs whose rates say nothing of a recipe, and what is said of those whose rates are taken."""

import json
import re
from dataclasses import replace

import pytest

from deploy.config.loader import load_recipe
from deploy.config.rules import hardly_trains
from deploy.planner.calibration import Measured
from deploy.planner.caveats import (
    caveats,
    differences,
    refuse_another_model,
    slow_updates,
)
from deploy.planner.plan import PlanInputs, plan
from deploy.planner.rates import EngineRates, LearnerRates, Rates
from headway.errors import InputError
from tests.deploy.trained import create

NOTHING = PlanInputs(
    tokens=None, tokens_variation=1.0, rollout_rate=None, engine_rate=None, train_rate=None, pause=0
)
MEASURED = Measured(
    rates=Rates(engine=EngineRates(step_seconds=0.01), learner=LearnerRates(), lengths=((9,),)),
    first=0, last=19, explained=0.9, samples_per_second=1.0, learner_idle=0.0, lag_mean=0.0,
)  # fmt: skip
"""A run of which there is nothing to keep in mind."""
TINY = {
    "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 320,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
"""The demo's [model.tiny], as `config.json` has it."""


def recipe(*settings):
    return load_recipe("demo", settings)


def with_model(path):
    config = recipe()
    model = config.model.model_copy(update={"path": str(path), "tiny": None})
    return config.model_copy(update={"model": model})


def in_folder(path, description):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(description))
    return with_model(path)


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (
            recipe(),
            recipe("model.tiny.hidden_size=64", "model.tiny.layers=2"),
            r"the run demo trained \[model\.tiny\] with hidden_size = 64, num_hidden_layers = 2, "
            r"and the recipe has \[model\.tiny\] with hidden_size = 128, num_hidden_layers = 3:",
        ),
        (recipe(), with_model("a/b-1.5"), r"trained 'a/b-1\.5', .* has \[model\.tiny\]: "),
        (with_model("a/b-1.5"), with_model("a/b-4"), r"trained 'a/b-4', .* has 'a/b-1\.5': "),
    ],
)
def test_a_run_of_another_model_is_refused_and_both_are_named(ours, theirs, message):
    refuse_another_model(ours, ours)
    with pytest.raises(InputError, match=message):
        refuse_another_model(ours, theirs)


def test_models_that_are_here_are_told_apart_by_their_sizes(tmp_path):
    same = in_folder(tmp_path / "same", {**TINY, "vocab_size": 35})
    within = in_folder(tmp_path / "within", {"vision_config": {}, "text_config": TINY})
    for config in (same, within):
        refuse_another_model(recipe(), config)
        assert "of the same size: rollouts are taken" in differences(recipe(), config)[0]
    wider = in_folder(tmp_path / "wider", {**TINY, "intermediate_size": 640})
    with pytest.raises(InputError, match=r"wider' with intermediate_size = 640, and the recipe"):
        refuse_another_model(same, wider)


def test_another_model_is_refused_before_the_run_is_measured(tmp_path):
    theirs = recipe(f"deploy.runs_dir={tmp_path}", "model.tiny.layers=2")
    run = create(theirs)
    with pytest.raises(InputError, match="num_hidden_layers = 2"):
        plan(recipe(), run=run, given=NOTHING, bounds=[1], devices=2)


@pytest.mark.parametrize(
    ("setting", "note"),
    [
        ("actors.tensor_parallel_size=2", "actors.tensor_parallel_size = 2, in the run 1: engines"),
        ("actors.dtype=auto", "actors.dtype = 'auto', in the run 'float32': engines"),
        ("actors.temperature=0.5", "actors.temperature = 0.5, in the run 1.0: rollouts"),
        ("prompts.source=tiny:sums", "prompts.source = 'tiny:sums', in the run 'lettered"),
        ("prompts.group_size=4", "prompts.group_size = 4, in the run 8: groups"),
        ("learner.microbatch_tokens=64", "learner.microbatch_tokens = 64, in the run 256: the"),
        ("weight_sync.codec=delta", "weight_sync.codec = 'delta', in the run 'full': updates are"),
        ("learner.zero_stage=2", "learner.zero_stage = 2, in the run 1: the learner"),
        ("learner.dtype=bfloat16", "learner.dtype = 'bfloat16', in the run 'float32': the learner"),
        ("actors.max_new_tokens=200", "actors.max_new_tokens = 200, in the run 160: no rollout"),
    ],
)
def test_what_the_rates_depend_on_and_differs_is_one_note_each(setting, note):
    [difference] = differences(recipe(setting), recipe())
    assert difference.startswith(note)


def test_what_the_rates_do_not_depend_on_is_no_note():
    other = ("seed=7", "steps=9", "queues.max_staleness=0", "actors.max_new_tokens=100")
    assert differences(recipe(*other), recipe()) == []


@pytest.mark.parametrize(
    ("bound", "bounds", "message"),
    [
        (0, [0, 1], "the run was synchronous: "),
        (2, [0, 2], None),
    ],
)
def test_rates_of_a_run_whose_sides_took_turns_are_said_to_be_off(bound, bounds, message):
    recorded = recipe(f"queues.max_staleness={bound}")
    notes = caveats(MEASURED, recorded, bounds=bounds, evaluated=False)
    assert len(notes) == (message is not None)
    assert all(re.match(message, note) for note in notes)


def test_what_held_the_engines_up_is_said():
    notes = caveats(replace(MEASURED, explained=0.4), recipe(), bounds=[1], evaluated=True)
    assert ["evaluated while it trained" in notes[0], "explain 40% of" in notes[1]] == [True, True]


@pytest.mark.parametrize(
    ("transport", "receivers", "step", "noted"),
    [
        (
            "object_store",
            4,
            25.0,
            "65.5 GB to 4 node(s) in 83.8 s at deploy.node.network_gbit = 25,",
        ),
        ("object_store", 4, 25.0, 'weight_sync.transport = "nccl" sends it once: 21.0 s'),
        ("filesystem", 4, 25.0, "'filesystem' sends"),
        ("object_store", 4, 90.0, None),
        ("object_store", 1, 25.0, None),
        ("object_store", 0, 1.0, None),
        ("nccl", 4, 25.0, None),
        ("nccl", 4, 20.0, "in 21.0 s"),
    ],
)
def test_updates_that_the_network_sends_for_longer_than_a_batch_is_trained_are_noted(
    transport, receivers, step, noted
):
    folder = ["weight_sync.folder=/shared"] if transport == "filesystem" else []
    settings = [f"weight_sync.transport={transport}", *folder]
    config = load_recipe("gsm8k_qwen32b_8nodes", settings)
    notes = slow_updates(config, 65.5e9, receivers, 128 * 16 / step)
    assert len(notes) == (noted is not None)
    assert all(noted in note for note in notes)


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ([], []),
        (["learner.lora.rank=4"], ["learner.learning_rate = 1e-06: an adapter hardly changes"]),
        (["learner.lora.rank=4", "learner.learning_rate=1e-4"], []),
    ],
)
def test_a_rate_for_whole_weights_is_noted_where_an_adapter_is_trained(settings, noted):
    notes = hardly_trains(load_recipe("demo", ["learner.learning_rate=1e-6", *settings]))
    assert [note[: len(start)] for note, start in zip(notes, noted, strict=True)] == noted
