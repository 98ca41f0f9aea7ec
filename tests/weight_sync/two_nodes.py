"""A cluster of two nodes on one machine, for `test_object_store`; prints its results as JSON.

A program of its own: a process can be connected to one cluster only.
"""

import json
import os
import signal
import sys
import time

import psutil
import ray
from ray.cluster_utils import Cluster
from ray.util import list_named_actors
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weight_sync.errors import StagingError
from weight_sync.manifest import Manifest
from weight_sync.publish.staged_publisher import StagedPublisher
from weight_sync.receive.staging import stage
from weight_sync.transports.ray_object_store import ObjectStoreTransport

BUCKETS = 3
IMPATIENT = 12
"""Deadline in seconds of an engine that meets processes which hang."""


class Engine:
    """Stages versions as a receiver does."""

    def __init__(self, timeout: float = 30) -> None:
        self.transport = ObjectStoreTransport(timeout=timeout)
        self.staged = None

    def stage(self, manifest: Manifest) -> dict[str, float] | str:
        """Return the sums of the tensors, or the error if the version is refused."""
        try:
            self.staged = stage(manifest, self.transport)
        except StagingError as error:
            return f"{type(error).__name__}: {error}"
        return self.sums()

    def sums(self) -> dict[str, float]:
        return {name: float(tensor.sum()) for name, tensor in self.staged.tensors()}

    def memories(self) -> list[int]:
        """Return the inode of each staged bucket: processes that share its memory have the same."""
        return [os.stat(bucket.location).st_ino for bucket in self.staged.manifest.buckets]

    def kill_downloader(self) -> None:
        ray.kill(self.downloader())

    def downloader(self) -> ray.actor.ActorHandle:
        (name,) = (n for n in list_named_actors() if n.startswith("headway-downloader-"))
        return ray.get_actor(name)

    def suspend(self, kind: str, manifest: Manifest) -> None:
        """Stop the uploader or downloader that this engine has used for a publisher."""
        publisher = manifest.buckets[0].location.split("/")[2]
        (name,) = (n for n in list_named_actors() if n.startswith(f"headway-{kind}-{publisher}-"))
        pid = ray.get(ray.get_actor(name).__ray_call__.remote(lambda _: os.getpid()))
        os.kill(pid, signal.SIGSTOP)


class Learner:
    """Publishes versions full of their own number."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []
        self.publisher = StagedPublisher(ObjectStoreTransport(), self.manifests.append, 8192)

    def pid(self) -> int:
        return os.getpid()

    def publish(self, version: int) -> Manifest:
        import torch

        tensors = [(f"t{i}", torch.full((2048,), float(version))) for i in range(BUCKETS)]
        self.publisher.publish(version, tensors)
        self.publisher.flush(30)
        return self.manifests[-1]


def on(node: str, kind: type, *arguments: object) -> object:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=strategy).remote(*arguments)


def play(cluster: Cluster) -> dict[str, object]:
    other = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    learner = on(here, Learner)
    neighbour = on(here, Engine)
    engines = [on(other.node_id, Engine) for _ in range(2)]
    results: dict[str, object] = {}

    first = ray.get(learner.publish.remote(1))
    results["sums"] = ray.get([e.stage.remote(first) for e in [neighbour, *engines]])
    results["first_memories"] = ray.get([e.memories.remote() for e in engines])

    second = ray.get(learner.publish.remote(2))
    results["second"] = ray.get([e.stage.remote(second) for e in engines])
    results["second_memories"] = ray.get([e.memories.remote() for e in engines])
    results["superseded"] = ray.get(engines[0].stage.remote(first))

    broken = json.loads(second.to_json())
    broken["buckets"][1]["checksum"] = "0" * 32
    results["corrupted"] = ray.get(engines[0].stage.remote(Manifest.from_json(json.dumps(broken))))

    ray.get(engines[0].stage.remote(second))
    ray.get(engines[0].kill_downloader.remote())
    results["held_without_downloader"] = ray.get(engines[1].sums.remote())
    begin = time.monotonic()
    results["after_downloader_died"] = ray.get(engines[1].stage.remote(second))
    results["downloader_recovery_seconds"] = time.monotonic() - begin

    third = ray.get(learner.publish.remote(3))
    process = psutil.Process(ray.get(learner.pid.remote()))
    ray.kill(learner)
    process.wait(timeout=60)
    results["after_learner_died"] = ray.get(engines[1].stage.remote(third))
    results["held_after_learner_died"] = ray.get(engines[1].sums.remote())

    impatient = on(other.node_id, Engine, IMPATIENT)
    for kind in ("downloader", "uploader"):
        learner = on(here, Learner)
        ray.get(impatient.stage.remote(ray.get(learner.publish.remote(1))))
        second = ray.get(learner.publish.remote(2))
        ray.get(impatient.suspend.remote(kind, second))
        results[f"hung_{kind}"] = ray.get(impatient.stage.remote(second))
        results[f"after_hung_{kind}"] = ray.get(impatient.stage.remote(second))
    return results


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        print(json.dumps(play(cluster)))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
