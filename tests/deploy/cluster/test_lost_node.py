"""The ranks of a learner whose node is lost move to another, on nodes that real Ray loses."""

import io
import time

import pytest
import ray
from ray.cluster_utils import Cluster
from rich.console import Console

from deploy.cluster.placement import ResourceRequest
from deploy.cluster.placement_group import Reservation, staying_nodes
from deploy.runtime.console import Terminal
from headway.roles import Role

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Rank:
    def node(self):
        return ray.get_runtime_context().get_node_id()


def test_ranks_move_from_a_lost_node_once_another_has_room():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        stays, lost = (cluster.add_node(num_cpus=1, labels={"pool": "train"}) for _ in range(2))
        ray.init(cluster.address, logging_level="ERROR")
        wanted = ResourceRequest(
            role=Role.LEARNER, count=2, resources={"CPU": 1.0}, labels={"pool": "train"}
        )
        held = Reservation([wanted], 30.0, Terminal(Console(file=io.StringIO())))

        def nodes():
            """Return the nodes of ranks that are made anew and then ended."""
            actors = [ray.remote(Rank).options(num_cpus=1, **held.options(Role.LEARNER, rank))
                      for rank in range(2)]  # fmt: skip
            ranks = [actor.remote() for actor in actors]
            places = ray.get([rank.node.remote() for rank in ranks], timeout=60)
            for rank in ranks:
                ray.kill(rank)
            return places

        assert sorted(nodes()) == sorted([stays.node_id, lost.node_id])
        assert held.restore(Role.LEARNER), "nothing is lost yet"
        assert not held.awaited
        cluster.remove_node(lost, allow_graceful=False)
        deadline = time.monotonic() + 60
        while lost.node_id in staying_nodes():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert not held.restore(Role.LEARNER), "the node that stays has no room for both"
        assert held.awaited == {Role.LEARNER}
        new = cluster.add_node(num_cpus=1, labels={"pool": "train"})
        while not held.restore(Role.LEARNER):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert sorted(nodes()) == sorted([stays.node_id, new.node_id])
        assert not held.awaited
    finally:
        ray.shutdown()
        cluster.shutdown()
