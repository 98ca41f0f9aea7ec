"""Placements on clusters of fake nodes with eight GPUs each, which real Ray hands out."""

import io
import itertools

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from rich.console import Console

from deploy.cluster.placement import NODE_LABEL, ResourceRequest, lacking
from deploy.cluster.placement_group import Reservation
from deploy.cluster.ray_cluster import alive_nodes
from deploy.runtime.console import Terminal
from headway.roles import Role

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TENSOR_PARALLEL = (1, 2, 3, 4, 8)
RANKS = (1, 4, 8)
LABELS = ("driver's node", "pools")


@pytest.fixture(scope="module", params=[2, 4], ids="{} nodes".format)
def nodes(request):
    """Yield the nodes of a cluster, half of them in a pool for each role."""
    pools = [{"pool": "generate" if index % 2 else "train"} for index in range(request.param)]
    cluster = Cluster()
    try:
        for pool in pools:
            cluster.add_node(num_cpus=1, num_gpus=8, labels=pool)
        ray.init(cluster.address, logging_level="ERROR")
        yield alive_nodes()
    finally:
        ray.shutdown()
        cluster.shutdown()


def wanted(ranks, engines, gpus_of_engine, labels, nodes):
    learner, actors = {NODE_LABEL: nodes[0].node_id}, {}
    if labels == "pools":
        learner, actors = {"pool": "train"}, {"pool": "generate"}
    return [
        ResourceRequest(role=Role.LEARNER, count=ranks, resources={"GPU": 1.0}, labels=learner),
        ResourceRequest(
            role=Role.ACTOR, count=engines, resources={"GPU": float(gpus_of_engine)}, labels=actors
        ),
    ]


@pytest.mark.parametrize(
    ("gpus", "ranks", "labels"), [*itertools.product(TENSOR_PARALLEL, RANKS, LABELS)]
)
def test_as_many_engines_as_fit_are_ready_within_five_seconds_and_one_more_is_refused(
    nodes, gpus, ranks, labels
):
    most = 0
    while not lacking(wanted(ranks, most + 1, gpus, labels, nodes), nodes):
        most += 1
    others = len(nodes) // 2 if labels == "pools" else len(nodes) - 1
    beside_the_learner = 0 if labels == "pools" else (8 - ranks) // gpus
    assert most == others * (8 // gpus) + beside_the_learner
    held = Reservation(
        wanted(ranks, most, gpus, labels, nodes), 5.0, Terminal(Console(file=io.StringIO()))
    )
    try:
        assert placement_group_table(held.group)["state"] == "CREATED"
    finally:
        ray.util.remove_placement_group(held.group)
