"""Requests of a run against the nodes of clusters, by tables."""

import pytest

from deploy.cluster.placement import (
    NODE_LABEL,
    Node,
    ResourceRequest,
    lacking,
    resource_requests,
    roles_of,
)
from deploy.config.deploy_config import Placement
from deploy.config.loader import load_recipe
from headway.errors import InputError
from headway.roles import Role

HERE = "head"


def node(name, *, cpus=4.0, gpus=0.0, labels=None, **more):
    resources = {"CPU": cpus, "GPU": gpus, **more}
    labels = {NODE_LABEL: name, **(labels or {})}
    return Node(node_id=name, address=name, resources=resources, labels=labels)


def on_node(name):
    return {NODE_LABEL: name}


def want(role=Role.ACTOR, count=1, *, labels=None, **resources):
    return ResourceRequest(role=role, count=count, resources=resources, labels=labels or {})


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        ([want(count=4, CPU=1.0)], [node("a")]),
        ([want(count=4, CPU=3.0)], [node(name) for name in "abcd"]),
        ([want(CPU=1.0, labels={"pool": "x"})], [node("a"), node("b", labels={"pool": "x"})]),
        ([want(Role.LEARNER, CPU=4.0, labels=on_node("a")), want(CPU=4.0)], [node("a"), node("b")]),
        ([want(count=3, CPU=0.1)], [node("a", cpus=0.3)]),
        ([want(Role.REWARD_MODEL)], [node("a", cpus=0.0)]),
        ([want(CPU=1.0, fast_disk=1.0)], [node("a", fast_disk=2.0)]),
    ],
)
def test_what_fits_lacks_nothing(wanted, nodes):
    assert lacking(wanted, nodes) == []


@pytest.mark.parametrize(
    ("wanted", "nodes", "lack"),
    [
        (
            want(count=3, CPU=3.0),
            [node("a"), node("b", cpus=2.0)],
            "actors: 3 process(es), each with 3 CPU, on the cluster; there is room for 1 (a: 4 CPU"
            "; b: 2 CPU)",
        ),
        (
            want(Role.LEARNER, CPU=1.0, GPU=1.0, labels=on_node("a")),
            [node("a"), node("b", gpus=8.0)],
            "learner: 1 process(es), each with 1 CPU and 1 GPU, on the driver's node; there is "
            "room for 0 (a: 4 CPU, 0 GPU)",
        ),
        (
            want(CPU=1.0, labels={"pool": "x"}),
            [node("a"), node("b", labels={"pool": "y"})],
            "actors: 1 process(es), each with 1 CPU, on nodes labelled pool=x; no node is (labels "
            "are a: none; b: pool=y)",
        ),
        (
            want(fast_disk=1.0),
            [node("a")],
            "actors: 1 process(es), each with 1 fast_disk, on the cluster; there is room for 0 "
            "(a: 0 fast_disk)",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_what_there_is(wanted, nodes, lack):
    assert lacking([wanted], nodes) == [lack]


@pytest.mark.parametrize(
    ("labels", "nodes", "where", "there"),
    [
        ({}, [node("a")], "the cluster", "a"),
        (on_node("a"), [node("a"), node("b", cpus=8.0)], "the driver's node", "a"),
        ({"pool": "x"}, [node("a"), node("b", labels={"pool": "x"})], "nodes labelled pool=x", "b"),
    ],
)
def test_roles_that_fit_alone_may_be_too_much_together_where_they_are_tied(
    labels, nodes, where, there
):
    wanted = [want(role, 1, CPU=3.0, labels=labels) for role in (Role.LEARNER, Role.ACTOR)]
    roles = [
        f"{role}: 1 process(es), each with 3 CPU, on {where}" for role in ("learner", "actors")
    ]
    total = f"together 6 CPU, which do not fit on the nodes that they may be on ({there}: 4 CPU)"
    assert lacking(wanted, nodes) == ["; ".join([*roles, total])]


def test_a_node_hosts_the_roles_that_have_room_on_it():
    wanted = [
        want(Role.LEARNER, CPU=1.0, labels=on_node("a")),
        want(GPU=1.0),
        want(Role.REWARD_MODEL, labels={"pool": "scoring"}),
    ]
    assert roles_of(node("a", gpus=1.0), wanted) == {Role.LEARNER, Role.ACTOR}
    assert roles_of(node("b", gpus=1.0), wanted) == {Role.ACTOR}
    assert roles_of(node("c", labels={"pool": "scoring"}), wanted) == {Role.REWARD_MODEL}


def test_a_recipe_without_placement_keeps_its_processes_at_the_driver():
    config = load_recipe("demo", ["actors.cpus=2", "learner.gpus=1"])
    learner, actors = resource_requests(config, driver_node=HERE)
    assert (learner.role, learner.count, learner.resources["GPU"]) == (Role.LEARNER, 1, 1.0)
    assert (actors.role, actors.count, actors.resources) == (Role.ACTOR, 1, {"CPU": 2.0})
    assert learner.labels == actors.labels == on_node(HERE)


def test_a_role_goes_where_its_labels_and_resources_are():
    settings = (
        "weight_sync.transport=object_store",
        'deploy.placement.actors={labels={"pool"="generate"}, resources={fast=0.5}}',
    )
    config = load_recipe("demo", settings)
    learner, actors = resource_requests(config, driver_node=HERE)
    assert learner.labels == on_node(HERE)
    assert (actors.labels, actors.resources["fast"]) == ({"pool": "generate"}, 0.5)


def test_a_placement_has_no_other_keys():
    with pytest.raises(InputError, match=r"deploy.placement.actors.label: unknown key"):
        load_recipe("demo", ["deploy.placement.actors={label={a='b'}}"])
    assert Placement().labels == {}
