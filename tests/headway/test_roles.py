"""Names of processes: one spelling, from which role and number are read again."""

import pickle

import pytest

from headway.roles import ProcessName, Role, role_of

NAMES = {
    "driver": (Role.DRIVER, None),
    "learner": (Role.LEARNER, None),
    "learner-1": (Role.LEARNER, 1),
    "actor-12": (Role.ACTOR, 12),
    "reward-model": (Role.REWARD_MODEL, None),
}


@pytest.mark.parametrize("text", NAMES)
def test_a_name_is_its_text_and_keeps_role_and_number_on_its_way(text):
    role, number = NAMES[text]
    made = ProcessName(role, number)
    for name in (made, ProcessName.parse(text), pickle.loads(pickle.dumps(made))):
        assert (name, name.role, name.number) == (text, role, number)
    assert role_of(text) is role


@pytest.mark.parametrize("text", ["", "actor-", "actor-x", "weight update", "results queue", "a-1"])
def test_what_is_no_process_has_no_name(text):
    assert ProcessName.parse(text) is None
    assert role_of(text) is None


def test_an_actor_has_the_number_of_its_engine_and_a_role_its_key_in_recipes():
    assert ProcessName(Role.ACTOR, 3).engine_id == "engine-3"
    assert [role.section for role in (Role.LEARNER, Role.ACTOR, Role.REWARD_MODEL)] == [
        "learner", "actors", "reward_model",
    ]  # fmt: skip
