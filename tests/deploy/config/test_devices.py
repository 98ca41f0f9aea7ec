"""Recipes that say nothing of GPUs, on machines with some."""

import json
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError

import pytest

from deploy.config import devices
from deploy.config.devices import for_this_machine, visible_gpus
from deploy.config.run_config import RunConfig
from deploy.preflight.machine_checks import check_gpus
from deploy.storage.run_directory import RunDirectory
from headway.errors import InputError


def recipe(actors=None, learner=None, **more):
    sections = {
        "name": "mine", "steps": 2, "model": {"path": "m"}, "prompts": {"source": "files"},
        "actors": {"reward": ["exact_match"], **(actors or {})}, "learner": learner or {},
    }  # fmt: skip
    return RunConfig.model_validate(sections | more)


@pytest.mark.parametrize(
    ("available", "settings", "expected"),
    [
        (0, {}, (0, 0)),
        (2, {}, (1, 1)),
        (8, {"actors": {"count": 6}, "learner": {"ranks": 2}}, (1, 1)),
        (8, {"actors": {"count": 2, "tensor_parallel_size": 2}, "learner": {"ranks": 4}}, (1, 2)),
        (1, {}, (0.5, 0.5)),
        (1, {"actors": {"count": 2}}, (0, 0)),
        (8, {"actors": {"gpus": 0}}, (0, 0)),
        (8, {"learner": {"gpus": 1}}, (1, 0)),
        (8, {"actors": {"engine": "scripted"}}, (0, 0)),
        (8, {"deploy": {"ray_address": "auto"}}, (0, 0)),
    ],
)
def test_a_recipe_that_names_no_gpus_takes_those_of_the_machine(available, settings, expected):
    config = for_this_machine(recipe(**settings), gpus=available)
    assert (config.learner.gpus, config.actors.gpus) == expected


def test_the_gpus_that_a_run_took_are_in_its_recipe():
    config = for_this_machine(recipe(), gpus=1)
    stored = type(config).model_validate_json(json.dumps(config.model_dump(mode="json")))
    assert for_this_machine(stored, gpus=8).actors.gpus == 0.5
    assert stored.actors.gpu_memory_share == pytest.approx(0.45)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"learner": {"gpus": 1}}, ("bfloat16", "bfloat16")),
        ({}, ("float32", "auto")),
        ({"learner": {"gpus": 1, "dtype": "float32"}}, ("float32", "auto")),
        ({"learner": {"gpus": 1}, "actors": {"dtype": "float32"}}, ("float32", "float32")),
        ({"learner": {"gpus": 1, "zero_stage": 0}}, ("float32", "auto")),
        ({"learner": {"gpus": 1}, "model": {"tiny": {"characters": "ab"}}}, ("float32", "auto")),
    ],
)
def test_gpus_compute_in_bfloat16_unless_the_recipe_names_a_dtype(settings, expected):
    config = for_this_machine(recipe(**settings), gpus=0)
    assert (config.learner.dtype, config.actors.dtype) == expected


@pytest.mark.parametrize(
    ("settings", "stored", "kilobytes", "expected"),
    [
        ({}, "bfloat16", 200_000, "bfloat16"),
        ({}, "bfloat16", 0, "bfloat16"),
        ({}, "bfloat16", 90_000, "float32"),
        ({}, "float16", 200_000, "float32"),
        ({}, "float32", 200_000, "float32"),
        ({}, None, 200_000, "float32"),
        ({"learner": {"zero_stage": 0}}, "bfloat16", 200_000, "float32"),
        ({"learner": {"gpus": 1}}, "float16", 1, "bfloat16"),
        ({"learner": {"gpus": 1, "zero_stage": 0}}, "bfloat16", 1, "float32"),
        ({"actors": {"dtype": "bfloat16"}}, "float32", 1, "bfloat16"),
        ({"actors": {"dtype": "auto"}}, "bfloat16", 200_000, "bfloat16"),
        ({"model": {"tiny": {"characters": "ab"}}}, None, 0, "float32"),
    ],
)
def test_an_automatic_dtype_is_resolved_for_learner_and_engines_alike(
    settings, stored, kilobytes, expected, tmp_path
):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": stored}))
    if kilobytes:
        with (tmp_path / "model.safetensors").open("wb") as file:
            file.truncate(1000 * kilobytes)
    settings = {"model": {"path": str(tmp_path)}, **settings}
    settings["learner"] = {"dtype": "auto", **settings.get("learner", {})}
    config = for_this_machine(recipe(**settings), gpus=0)
    assert (config.learner.dtype, config.actors.dtype) == (expected, expected)


@pytest.mark.parametrize(
    ("settings", "learner", "expected"),
    [
        ({"zero_stage": 1}, {}, "bfloat16"),
        ({}, {}, "float32"),
        ({"zero_stage": 1}, {"gpus": 1}, "bfloat16"),
        ({"zero_stage": 1, "dtype": "float32"}, {"gpus": 1}, "float32"),
    ],
)
def test_an_automatic_dtype_of_supervised_training_follows_the_model_that_it_begins_with(
    settings, learner, expected, tmp_path
):
    for name in ("bfloat16", "float32"):
        (tmp_path / name).mkdir()
        description = {"model_type": "llama", "dtype": name}
        (tmp_path / name / "config.json").write_text(json.dumps(description))
    section = {"dtype": "auto", **settings}
    ranked = {"pairs": "p", "path": str(tmp_path / "bfloat16"), **section}
    for own, sections in (
        ("bfloat16", {"sft": {"demonstrations": "d", **section}, "reward_model": {**ranked}}),
        ("float32", {"reward_model": ranked}),
    ):
        sections |= {"model": {"path": str(tmp_path / own)}, "actors": {"dtype": "float32"}}
        config = for_this_machine(recipe(learner=learner, **sections), gpus=0)
        assert {config.reward_model.dtype, (config.sft or config.reward_model).dtype} == {expected}
        assert (config.learner.dtype, config.actors.dtype) == ("float32", "float32")


@pytest.mark.parametrize("section", ["learner", "sft", "reward_model"])
def test_an_automatic_dtype_of_a_model_that_cannot_be_read_is_refused(section, tmp_path):
    needed = {"sft": {"demonstrations": "d"}, "reward_model": {"pairs": "p"}}
    sections = {section: {"dtype": "auto", "zero_stage": 1, **needed.get(section, {})}}
    sections["model"] = {"path": str(tmp_path)}
    with pytest.raises(InputError, match=rf'^{section}.dtype = "auto": model .*; or name a dtype'):
        for_this_machine(recipe(**sections), gpus=0)


def test_an_automatic_dtype_is_resolved_when_a_run_is_resumed(tmp_path):
    directory = RunDirectory(tmp_path / "mine")
    directory.path.mkdir()
    directory.store_recipe(recipe(learner={"gpus": 1}, actors={"gpus": 1}))
    config = directory.config(["learner.dtype=auto"])
    assert (config.learner.dtype, config.actors.dtype) == ("bfloat16", "bfloat16")


@pytest.fixture
def vllm(monkeypatch):
    """Let vLLM for GPUs be installed, and no variable hide any."""
    monkeypatch.setattr(devices, "distribution", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_those_of_the_driver_that_are_visible(vllm, tmp_path, monkeypatch):
    assert visible_gpus(tmp_path / "none") == 0
    for name in ("0000:3b:00.0", "0000:5e:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert visible_gpus(tmp_path) == 1
    for nothing in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
        assert visible_gpus(tmp_path) == 0


def test_no_gpu_is_taken_where_vllm_is_built_for_cpus(vllm, tmp_path, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    (tmp_path / "0000:3b:00.0").mkdir()
    monkeypatch.setattr(devices, "distribution", missing)
    assert visible_gpus(tmp_path) == 0


def test_a_recipe_for_which_there_are_too_few_gpus_is_refused_with_what_to_set():
    config = for_this_machine(recipe({"count": 3}), gpus=2)
    for refused in (config, recipe({"count": 3, "gpus": 0})):
        with pytest.raises(InputError, match=r"machine has 2: .* would take 1 and 3; set learner"):
            check_gpus(refused, 2)
    check_gpus(config, 0)
    check_gpus(for_this_machine(recipe(), gpus=2), 2)


@pytest.mark.parametrize("address", ["local", "auto"])
@pytest.mark.parametrize("learner", [None, 0, 0.5, 1])
@pytest.mark.parametrize("actors", [None, 0, 0.5, 1])
def test_gpus_of_one_side_are_refused_until_those_of_the_other_are_named(actors, learner, address):
    given = [{} if gpus is None else {"gpus": gpus} for gpus in (actors, learner)]
    config = recipe(given[0], learner=given[1], deploy={"ray_address": address})
    one_sided = (actors is None and learner) or (learner is None and actors)
    expected = r"is not set beside \w+\.gpus = \S+; set it, such as to 1" if one_sided else None
    with pytest.raises(InputError, match=expected) if expected else nullcontext():
        check_gpus(config, 0)


@pytest.mark.parametrize(
    ("settings", "threads"),
    [
        ({"learner": {"gpus": 1, "offload_optimizer": True}}, 32),
        ({"learner": {"gpus": 1, "offload_optimizer": True, "ranks": 8}}, 4),
        ({"learner": {"gpus": 1, "offload_optimizer": True, "ranks": 128}}, 1),
        ({"learner": {"gpus": 1, "offload_optimizer": True, "threads": 3}}, 3),
        ({"learner": {"gpus": 1}}, None),
        ({"learner": {"offload_optimizer": True}}, None),
        (
            {"learner": {"gpus": 1, "offload_optimizer": True}, "deploy": {"ray_address": "auto"}},
            None,
        ),
    ],
)
def test_an_optimizer_on_the_cpu_steps_on_half_of_the_cores(settings, threads):
    assert for_this_machine(recipe(**settings), gpus=0, cores=64).learner.threads == threads
