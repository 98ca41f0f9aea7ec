"""Room on a cluster is given out to a whole run, or not at all."""

import os
import signal
import time

import pytest
import ray
from ray.util import placement_group_table

from deploy.cluster import placement_group
from deploy.cluster.placement import NODE_LABEL, Node, ResourceRequest
from deploy.cluster.placement_group import Reservation
from deploy.errors import RunFailed
from headway.ray_process import is_placed
from headway.roles import Role
from tests.deploy.driver.contexts import make_terminal

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


def want(role, count, cpus, labels=None, **custom):
    resources = {"CPU": cpus, **custom} if cpus else custom
    return ResourceRequest(role=role, count=count, resources=resources, labels=labels or {})


def states():
    return {entry["state"] for entry in placement_group_table().values()}


def test_processes_work_in_the_room_of_their_own_number():
    here = ray.get_runtime_context().get_node_id()
    shown = make_terminal()
    wanted = [
        want(Role.LEARNER, 1, 0.25, {NODE_LABEL: here}),
        want(Role.ACTOR, 2, 0.25),
        want(Role.REWARD_MODEL, 1, 0, {NODE_LABEL: here}),
    ]
    held = Reservation(wanted, 30.0, shown)
    try:
        options = [held.options(Role.LEARNER, 0), *(held.options(Role.ACTOR, i) for i in range(2))]
        bundles = [option["scheduling_strategy"].placement_group_bundle_index for option in options]
        assert bundles == [0, 1, 2]
        unreserved = {"resources": {}, "label_selector": {NODE_LABEL: here}}
        assert held.options(Role.REWARD_MODEL, 0) == unreserved
        work = ray.remote(num_cpus=0.25)(lambda: os.getpid()).options(**options[2])
        assert ray.get(work.remote(), timeout=60) > 0
        assert shown.console.file.getvalue() == ""
    finally:
        ray.util.remove_placement_group(held.group)


def test_a_process_that_joins_has_a_group_of_its_own_and_gives_it_back(monkeypatch):
    here = ray.get_runtime_context().get_node_id()
    held = Reservation([want(Role.ACTOR, 1, 0.25)], 30.0, make_terminal())
    try:
        assert held.add(Role.ACTOR, 0), "it has what the run began with"
        assert held.lacking(Role.ACTOR, [1], 2) == []
        assert held.add(Role.ACTOR, 1)
        strategy = held.options(Role.ACTOR, 1)["scheduling_strategy"]
        assert strategy.placement_group_bundle_index == 0
        assert strategy.placement_group != held.group
        assert held.node(Role.ACTOR, 1) == here
        [lack] = held.lacking(Role.ACTOR, [*range(1, 100)], 100)
        assert "actors: 98 process(es), each with 0.25 CPU, on the cluster; there is room" in lack
        nodes = [Node(node_id=here, address="here", resources={}, labels={})]
        with monkeypatch.context() as patch:
            patch.setattr(placement_group, "_free_nodes", lambda: nodes)
            for needed, given in ((0.25, [1]), (0.5, [])):
                held._requests[Role.LEARNER] = want(Role.LEARNER, 1, needed)
                held.awaited = {Role.LEARNER}
                assert held.to_give_back(Role.ACTOR, [1, 0]) == given, "of 0 the run cannot"
        held.remove(Role.ACTOR, 1)
        held.remove(Role.ACTOR, 0)
        assert (held.node(Role.ACTOR, 1), held.node(Role.ACTOR, 0)) == (None, here)
    finally:
        ray.util.remove_placement_group(held.group)


def test_a_run_without_resources_names_what_is_free_and_leaves_nothing_behind():
    shown = make_terminal()
    more = ray.cluster_resources()["CPU"] + 1
    with pytest.raises(RunFailed, match=r"no free resources .* = 1.5; free now .*: .*2 CPU"):
        Reservation([want(Role.ACTOR, 2, more / 2)], 1.5, shown, first_report_seconds=0.5)
    waiting = "waiting for free resources on the cluster for 1 s; free now are"
    assert waiting in shown.console.file.getvalue()
    assert "PENDING" not in states()


def test_a_run_that_lost_nodes_begins_with_as_many_processes_as_there_is_room_for():
    cpus = ray.cluster_resources()["CPU"]
    wanted = [want(Role.LEARNER, 1, cpus / 4), want(Role.ACTOR, 9, cpus / 4)]
    held = Reservation(wanted, 30.0, make_terminal(), fewest={Role.ACTOR: 2})
    try:
        waits = [held.waits(Role.ACTOR, number) for number in range(9)]
        assert waits == [False] * 3 + [True] * 6
        assert not held.waits(Role.LEARNER, 0)
        assert not held.add(Role.ACTOR, 3)
    finally:
        ray.util.remove_placement_group(held.group)
    with pytest.raises(RunFailed, match="no free resources"):
        Reservation(wanted, 1.5, make_terminal(), fewest={Role.ACTOR: 4})


def test_an_interrupt_is_heard_while_a_run_waits_for_resources():
    shown = make_terminal()
    shown.say = lambda _: os.kill(os.getpid(), signal.SIGINT)
    began, more = time.monotonic(), ray.cluster_resources()["CPU"] + 1
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Reservation([want(Role.ACTOR, 1, more)], 60.0, shown)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 20
    assert "PENDING" not in states()


def test_a_wait_ends_when_others_release_resources():
    cpus = ray.cluster_resources()["CPU"]
    others = Reservation([want(Role.ACTOR, 1, cpus)], 30.0, make_terminal())
    shown = make_terminal()
    shown.say = lambda _: ray.util.remove_placement_group(others.group)
    held = Reservation([want(Role.ACTOR, 1, cpus)], 60.0, shown)
    assert held.options(Role.ACTOR, 0)
    ray.util.remove_placement_group(held.group)


def test_a_run_that_reserves_nothing_has_no_group():
    before = len(placement_group_table())
    held = Reservation([want(Role.ACTOR, 3, 0)], 1.0, make_terminal())
    assert held.options(Role.ACTOR, 0) == {"resources": {}, "scheduling_strategy": "SPREAD"}
    assert len(placement_group_table()) == before


def test_a_cluster_of_the_runs_own_has_no_group_and_processes_go_where_their_labels_are():
    before = len(placement_group_table())
    wanted = [want(Role.ACTOR, 1, 0.25, {"pool": "generate"}, fast=0.5)]
    held = Reservation(wanted, 1.0, make_terminal(), shared=False)
    options = {"resources": {"fast": 0.5}, "label_selector": {"pool": "generate"}}
    assert held.options(Role.ACTOR, 0) == options
    assert held.add(Role.ACTOR, 1)
    [lack] = held.lacking(Role.ACTOR, [1], 2)
    assert "on nodes labelled pool=generate; no node is" in lack
    held = Reservation([want(Role.ACTOR, 1, 0.25)], 1.0, make_terminal(), shared=False)
    assert held.lacking(Role.ACTOR, [1], 2) == []
    more = int(4 * ray.cluster_resources()["CPU"]) + 1
    assert f"actors: {more} process(es)" in held.lacking(Role.ACTOR, [1], more)[0]
    assert len(placement_group_table()) == before


def test_an_actor_without_free_resources_is_not_placed():
    class Idle:
        async def here(self):
            return True

    more = ray.cluster_resources()["CPU"] + 1
    placed, unplaced = (ray.remote(Idle).options(num_cpus=cpus).remote() for cpus in (0, more))
    assert ray.get(placed.here.remote(), timeout=60)
    assert [is_placed(handle) for handle in (placed, unplaced)] == [True, False]
    ray.kill(placed)
    ray.kill(unplaced)
