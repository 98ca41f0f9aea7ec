"""Cores of a comparison: what is chosen where a recipe names none, and what is refused."""

import pytest

from benchmarks.harness.cores import all_cores, check_devices, shareable, with_cores
from benchmarks.loop.async_gain import ALL_CORES, AsyncOptions, round_arms
from deploy.config.loader import load_recipe
from headway.errors import InputError
from tests.deploy.conftest import RECIPE


def recipe(actors=None, learner=None, **changes):
    """Return the small recipe with these cores alone; `changes` are keys SECTION__KEY."""
    updates = {"actors": {"cores": actors}, "learner": {"cores": learner}, "deploy": {}}
    for name, value in changes.items():
        section, key = name.split("__")
        updates[section][key] = value
    base = load_recipe(str(RECIPE))
    sections = {name: getattr(base, name).model_copy(update=new) for name, new in updates.items()}
    return base.model_copy(update=sections)


@pytest.mark.parametrize(
    ("config", "available", "actors", "learner"),
    [
        (recipe(), [0, 1], ("0",), "1"),
        (recipe(), [3], ("3",), "3"),
        (recipe(), range(5), ("0,1,2",), "3,4"),
        (recipe(actors__count=2), range(8), ("0,1", "2,3"), "4,5,6,7"),
        (recipe(learner__ranks=3), range(8), ("0,1,2,3,4",), "5,6,7"),
        (recipe(learner__ranks=4), [0, 1], ("0",), "1"),
        (recipe(actors__count=3), range(4), ("0", "1", "2"), "3"),
        (recipe(learner="0"), [0, 1, 2], ("1,2",), "0"),
        (recipe(actors=("0",)), [0, 1, 2], ("0",), "1,2"),
        (recipe(actors=("0",)), [0], ("0",), "0"),
        (recipe(actors=("0",), learner="0"), [0, 1], ("0",), "0"),
    ],
)
def test_cores_that_a_recipe_leaves_open_are_those_that_nobody_else_has(
    config, available, actors, learner
):
    chosen = with_cores(config, available)
    assert (chosen.actors.cores, chosen.learner.cores) == (actors, learner)
    assert chosen.learner.cores_of_rank(0), "every rank has a core"


@pytest.mark.parametrize(
    "config",
    [
        recipe(actors__gpus=1.0, learner__gpus=1.0),
        recipe(actors__tensor_parallel_size=2),
        recipe(deploy__ray_address="10.0.0.1:6379"),
    ],
    ids=["GPUs", "several workers of an engine", "another cluster"],
)
def test_cores_are_chosen_only_for_engines_on_cores_of_this_machine(config):
    assert with_cores(config, [0, 1]) == config


@pytest.mark.parametrize(
    ("ranks", "cores"), [(1, "0,1,2,3,4"), (2, "1,2,3,4"), (5, "0,1,2,3,4"), (8, "0,1,2,3,4")]
)
def test_ranks_share_as_many_cores_as_go_round(ranks, cores):
    assert shareable(range(5), ranks) == cores


def test_engines_and_ranks_take_turns_on_all_cores_of_both():
    config = recipe(("0-3",), "4-6", learner__ranks=3)
    split, together = round_arms(config, AsyncOptions(bounds=(0,)), 1)
    assert (split.name, together.name) == ("0", ALL_CORES)
    assert together.config.actors.cores == ("0-3,4-6",)
    assert together.config.learner.cores == "1,2,3,4,5,6"
    on_gpus = recipe(actors__gpus=1.0, learner__gpus=1.0)
    arms = round_arms(on_gpus, AsyncOptions(bounds=(0, 2)), 2)
    assert [arm.name for arm in arms] == ["2", "0"], "every other round backwards"


def test_a_comparison_needs_equal_cores_or_gpus():
    check_devices(recipe(actors__gpus=1.0, learner__gpus=1.0))
    check_devices(recipe(("0",), "1"))
    assert all_cores(recipe(("0", "2-3"), "1")) == "0,2-3,1"
    with pytest.raises(InputError, match=r"needs actors\.cores and learner\.cores"):
        check_devices(recipe(actors__gpus=1.0))
