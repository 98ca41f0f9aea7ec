"""A run on a cluster whose nodes come and go, on one machine.

Prints what happened to the actors, and what the run printed. It is a program of its own because a
process can be connected to one cluster only. Arguments: folder of the run, and the command of the
run, to which the cluster's address is added.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster

SECONDS = 240.0
POOL = {"pool": "generate"}
NODE = [Path(sys.executable).parent / "ray", "start", "--block"]


def places():
    """Return the nodes of the rollout actors that are alive."""
    return sorted(
        actor["Address"]["NodeID"]
        for actor in actors().values()
        if actor["ActorClassName"] == "RolloutActor" and actor["State"] == "ALIVE"
    )


def until(happened, process):
    """Wait until `happened` returns something true; the run has to live."""
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def main() -> None:
    folder, *command = sys.argv[1:]
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "labels": {"pool": "head"}}
    )
    ray.init(address=cluster.address, log_to_driver=False)

    def joins():
        return cluster.add_node(num_cpus=1, labels=POOL)

    def trains():
        file = Path(folder) / "metrics.jsonl"
        rows = file.read_text().count("\n") if file.exists() else 0
        until(lambda: file.exists() and file.read_text().count("\n") >= rows + 2, process)

    try:
        first = subprocess.Popen(
            [*NODE, f"--address={cluster.address}", "--num-cpus=1", "--labels=pool=generate"],
            stdout=subprocess.DEVNULL,
        )
        process = subprocess.Popen(
            [*command, "--set", f"deploy.ray_address={cluster.address}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        steps = []
        until(places, process)
        [first_id] = places()
        trains()
        second = joins()
        until(lambda: places() == sorted([first_id, second.node_id]), process)
        steps.append("an actor joined on the node that joined")
        trains()
        first.terminate()
        until(lambda: places() == [second.node_id], process)
        until(lambda: first.poll() is not None, process)
        assert first_id not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        steps.append("the actor of the node that got SIGTERM left")
        trains()
        third = joins()
        until(lambda: places() == sorted([second.node_id, third.node_id]), process)
        steps.append("it joined again on another node")
        cluster.remove_node(second, allow_graceful=False)
        until(lambda: places() == [third.node_id], process)
        trains()
        steps.append("the run goes on after the loss of a node")
        fourth = joins()
        until(lambda: places() == sorted([third.node_id, fourth.node_id]), process)
        steps.append("the actor of the lost node joined again on another")
        trains()
        os.kill(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=120)
        print(json.dumps({"code": process.returncode, "said": said, "steps": steps}))
    finally:
        first.terminate()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
