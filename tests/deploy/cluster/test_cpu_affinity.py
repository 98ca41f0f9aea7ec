"""Which cores engines get: a table."""

import pytest

from actors.config import ActorsConfig
from deploy.cluster.cpu_affinity import (
    actors_on_cores,
    learner_of_stage,
    learner_on_cores,
    share_out,
)
from headway.cpu_cores import parse_cores
from learner.config.supervised import PreferConfig, SftConfig
from tests.deploy.config.test_devices import recipe

TABLE = [
    # engines, cores of the machine, the learner's, what each engine gets
    (2, {0, 1}, set(), ("0", "1")),
    (2, {0, 1, 2, 3}, set(), ("0,1", "2,3")),
    (2, {0, 1, 2, 3}, {0}, ("1", "2,3")),
    (2, {0, 1, 2}, {1}, ("0", "2")),
    (2, {0, 1}, {0}, ("1", "1")),
    (3, {0, 1, 2}, {2}, ("0", "1", "0")),
    (2, {0, 1}, {0, 1}, ("0", "1")),
    (2, {0, 1, 4, 5, 7, 8}, {5}, ("0,1", "4,7,8")),
    (4, {5}, set(), ("5", "5", "5", "5")),
]


@pytest.mark.parametrize(("engines", "there", "taken", "expected"), TABLE)
def test_engines_share_out_what_the_learner_leaves(engines, there, taken, expected):
    assert share_out(engines, there, taken) == expected


@pytest.mark.parametrize("engines", range(1, 12))
@pytest.mark.parametrize("cores", range(1, 12))
def test_every_free_core_is_used_and_none_twice_while_there_are_enough(engines, cores):
    shares = [parse_cores(share) for share in share_out(engines, range(cores), set())]
    assert {core for share in shares for core in share} == set(range(cores))
    if engines <= cores:
        sizes = [len(share) for share in shares]
        assert sum(sizes) == cores
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "actors",
    [
        {"count": 1, "cores": ("3",)},
        {"count": 2, "cores": ("1", "0")},
        {"count": 2, "gpus": 1},
        {"count": 2, "engine": "scripted"},
        {"count": 2, "tensor_parallel_size": 2},
    ],
)
def test_cores_are_left_alone_where_they_are_given_or_not_asked_for(actors):
    config = ActorsConfig(**actors)
    assert actors_on_cores(config, {0, 1, 2, 3}, None) == config


@pytest.mark.parametrize(
    ("actors", "expected"),
    [
        ({"count": 1}, ("1,2,3",)),
        ({"count": 3}, ("1", "2", "3")),
        ({"count": 2, "reward": ["reward_model"], "reward_model": {"cores": "3"}}, ("1", "2")),
        ({"count": 2, "reward": ["last_answer"], "reward_model": {"cores": "3"}}, ("1", "2,3")),
    ],
)
def test_open_cores_are_those_that_the_learner_and_reward_models_that_are_asked_leave(
    actors, expected
):
    assert actors_on_cores(ActorsConfig(**actors), {0, 1, 2, 3}, "0").cores == expected


@pytest.mark.parametrize("cores", ["5-2", "0,5-2"])
def test_a_range_that_runs_backwards_is_refused(cores):
    message = "'5-2' is empty; a range begins with its first core"
    for section in ({"cores": [cores]}, {"reward_model": {"cores": cores}}):
        with pytest.raises(ValueError, match=message):
            ActorsConfig(**section)


@pytest.mark.parametrize(
    ("available", "actors", "learner", "expected"),
    [
        (range(2), {}, {}, "1"),
        (range(16), {}, {}, "8,9,10,11,12,13,14,15"),
        ([0, 2, 4, 6], {}, {}, "4,6"),
        (range(16), {"count": 10}, {}, "10,11,12,13,14,15"),
        (range(10), {}, {"ranks": 2}, "6,7,8,9"),
        (range(1), {}, {}, None),
        (range(2), {"count": 2}, {}, None),
        (range(4), {"cores": ("0",)}, {}, None),
        (range(4), {}, {"threads": 1}, None),
        (range(4), {}, {"gpus": 1}, None),
        (range(4), {"engine": "scripted"}, {}, None),
    ],
)
def test_a_learner_without_cores_takes_half_of_those_that_the_actors_leave(
    available, actors, learner, expected
):
    config = learner_on_cores(recipe(actors, learner), available)
    assert config.learner.cores == expected
    if expected is not None:
        assert config.learner.ranks * config.learner.threads_of_rank == len(expected.split(","))
        engines = actors_on_cores(config.actors, available, config.learner.cores).cores
        assert not set(expected.split(",")) & set(",".join(engines).split(","))


@pytest.mark.parametrize(
    ("learner", "threads", "expected"),
    [({}, None, 8), ({"threads": 3}, None, 3), ({"cores": "4-7"}, None, 4), ({}, 2, 2)],
)
def test_a_warm_start_has_the_threads_of_a_learner_unless_it_names_others(
    learner, threads, expected
):
    section = SftConfig(demonstrations="d.jsonl", threads=threads)
    assert learner_of_stage(recipe({}, learner), section, range(16)).threads_of_rank == expected


def test_the_ranks_of_a_warm_start_share_the_cores_of_a_learner_and_have_its_own_settings():
    section = SftConfig(demonstrations="d.jsonl", ranks=2, zero_stage=3, learning_rate=0.5)
    stage = learner_of_stage(
        recipe({}, {"ranks": 4, "offload_optimizer": True}), section, range(16)
    )
    assert (stage.ranks, stage.zero_stage, stage.learning_rate) == (2, 3, 0.5)
    assert not stage.offload_optimizer
    assert stage.cores_of_rank(1) == [12, 13, 14, 15]
    assert learner_of_stage(recipe({}, {}), section, range(2)).cpus_of_rank == 1


@pytest.mark.parametrize("loss", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_the_loss_of_preferences_is_none_of_a_learner(loss):
    section = PreferConfig(pairs="d.jsonl", loss=loss, loss_options={"beta": 1.0})
    stage = learner_of_stage(recipe({}, {}), section, range(4))
    assert (stage.learning_rate, stage.loss_options) == (1e-6, {})
