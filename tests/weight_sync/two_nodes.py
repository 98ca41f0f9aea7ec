"""A cluster of two nodes on one machine, for `test_object_store`; ends with 0 if all is well.

A program of its own: a process can be connected to one cluster only.
"""

import os
import signal
from dataclasses import replace

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
        (name,) = (n for n in list_named_actors() if n.startswith("headway-downloader-"))
        ray.kill(ray.get_actor(name))

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


def sums(version: int) -> dict[str, float]:
    return {f"t{i}": 2048.0 * version for i in range(BUCKETS)}


def check_memories(engines: list) -> None:
    """Check that a bucket was pulled once for all engines of a node."""
    one, other = ray.get([engine.memories.remote() for engine in engines])
    assert one == other
    assert len(set(one)) == BUCKETS


def play(cluster: Cluster) -> None:
    other = cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    learner = on(here, Learner)
    neighbour = on(here, Engine)
    engines = [on(other.node_id, Engine) for _ in range(2)]

    first = ray.get(learner.publish.remote(1))
    assert ray.get([e.stage.remote(first) for e in [neighbour, *engines]]) == [sums(1)] * 3
    check_memories(engines)

    second = ray.get(learner.publish.remote(2))
    assert ray.get([e.stage.remote(second) for e in engines]) == [sums(2)] * 2
    check_memories(engines)
    assert "version 1 was superseded by 2" in ray.get(engines[0].stage.remote(first))

    bucket, *rest = second.buckets
    broken = replace(second, buckets=(replace(bucket, checksum="0" * 32), *rest))
    assert "its manifest says 00000000" in ray.get(engines[0].stage.remote(broken))

    # A dead downloader leaves staged weights, and is replaced.
    ray.get(engines[0].stage.remote(second))
    ray.get(engines[0].kill_downloader.remote())
    assert ray.get(engines[1].sums.remote()) == sums(2)
    assert ray.get(engines[1].stage.remote(second), timeout=30) == sums(2)

    # A dead learner is an error, and takes nothing with it that was staged.
    third = ray.get(learner.publish.remote(3))
    process = psutil.Process(ray.get(learner.pid.remote()))
    ray.kill(learner)
    process.wait(timeout=60)
    assert ray.get(engines[1].stage.remote(third)).startswith("StagingError: ")
    assert ray.get(engines[1].sums.remote()) == sums(2)

    impatient = on(other.node_id, Engine, IMPATIENT)
    for kind in ("downloader", "uploader"):
        learner = on(here, Learner)
        ray.get(impatient.stage.remote(ray.get(learner.publish.remote(1))))
        second = ray.get(learner.publish.remote(2))
        ray.get(impatient.suspend.remote(kind, second))
        refused = ray.get(impatient.stage.remote(second))
        assert f"cannot be fetched: headway-{kind}-" in refused
        assert ray.get(impatient.stage.remote(second)) == sums(2)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        play(cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
