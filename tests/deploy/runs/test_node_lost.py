"""A run on three nodes that loses the broker's, with its disk, and goes on from its backup."""

import contextlib
import shutil

import psutil
import pytest

from learner.diagnostics.trained_log import VARIABLE
from queues.runtime import clock
from tests.deploy.runs.test_broker_dies import rows
from tests.deploy.runs.test_learner_dies import Going

BACKUP_SECONDS = 2.0
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]


@contextlib.contextmanager
def three_nodes():
    """Start three nodes of Ray with the labels head, learn and generate."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "labels": {"pool": "head"}}
    )
    try:
        for pool in ("learn", "generate"):
            cluster.add_node(num_cpus=2, labels={"pool": pool})
        yield cluster
    finally:
        cluster.shutdown()


def test_a_run_that_loses_the_node_and_disk_of_its_broker_goes_on_from_its_backup(
    headway, monkeypatch
):
    shared = headway.folder / "shared"
    settings = (
        "steps=40", "heldout.every=40", f"deploy.backup_dir={shared}",
        f"deploy.backup_seconds={BACKUP_SECONDS}",
        "weight_sync.transport=object_store",
        'deploy.placement.learner={labels={pool="learn"}}',
        'deploy.placement.actors={labels={pool="generate"}}',
    )  # fmt: skip
    accepted = "SELECT group_id, accepted_at FROM results JOIN groups USING (group_id)"
    accepted += " WHERE purpose = 'train'"
    name = "lost-node"
    monkeypatch.setenv(VARIABLE, str(headway.folder / f"{name}.trained"))  # for all nodes
    with three_nodes() as cluster:
        address = f"deploy.ray_address={cluster.address}"
        with Going(headway, name, *settings, address) as going:
            going.trains(13)
            raylet = cluster.head_node.all_processes["raylet"][0].process
            command, node = psutil.Process(going.process.pid), psutil.Process(raylet.pid)
            killed_at = clock.now()
            for process in (command, *command.children(), *node.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            cluster.remove_node(cluster.head_node, allow_graceful=False)
            going.process.communicate(timeout=60)
    lost = headway.folder / "lost-disk"
    going.folder.rename(lost)
    [backup] = shared.iterdir()
    with three_nodes() as cluster:
        address = f"deploy.ray_address={cluster.address}"
        going.process = headway.start_plain("resume", backup, "--set", address)
        try:
            run, again = going.check(40)
        finally:
            going.__exit__()
    assert "is made anew from its backup" in run.output
    before, after = {*rows(lost, accepted)}, {*rows(run.folder, accepted)}
    trained = {row[0] for row in rows(lost, "SELECT group_id FROM batch_groups")}
    print(f"{len(before)} groups were accepted before, {len(before - after)} of them had to be "
          f"generated again; {again} batches were trained again")  # fmt: skip
    assert {row for row in before if row[1] < killed_at - BACKUP_SECONDS} <= after
    assert trained <= {group for group, _ in after}, "every batch is the recorded one"
    shutil.rmtree(lost)
