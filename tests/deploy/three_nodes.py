"""A run on three nodes of one machine with its roles placed by label.

Prints the nodes of the roles, those of the bundles of its placement groups, and the states of those
groups. It is a program of its own because a process can be connected to one cluster only.
Arguments: the command of the run, to which the cluster's address is added.
"""

import json
import subprocess
import sys

import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

POOLS = ("learn", "generate")


def main() -> None:
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "labels": {"pool": "head"}}
    )
    for pool in POOLS:
        cluster.add_node(num_cpus=2, labels={"pool": pool})
    ray.init(address=cluster.address, log_to_driver=False)
    pools = {node["NodeID"]: node["Labels"]["pool"] for node in ray.nodes()}
    command = [*sys.argv[1:], "--set", f"deploy.ray_address={cluster.address}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    places = {
        actor["ActorClassName"]: pools[actor["Address"]["NodeID"]] for actor in actors().values()
    }
    groups = [
        [group["state"], *sorted(pools[node] for node in group["bundles_to_node_id"].values())]
        for group in placement_group_table().values()
    ]
    said = done.stdout + done.stderr
    print(json.dumps({"code": done.returncode, "said": said, "places": places, "groups": groups}))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
