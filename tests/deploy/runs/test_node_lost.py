"""Runs that lose a node: of the broker, with its disk, of the learner, or of reward models."""

import contextlib
import shutil

import psutil
import pytest

from headway import clock
from learner.diagnostics.trained_log import VARIABLE
from tests.deploy import conftest
from tests.deploy.conftest import RECIPE
from tests.deploy.offline.test_reward_model import JUDGED, SECTION
from tests.deploy.processes import titled
from tests.deploy.runs.test_broker_dies import rows
from tests.deploy.runs.test_learner_dies import RANK, Going

BACKUP_SECONDS = 2.0
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]


POOLS = (
    "weight_sync.transport=object_store",
    'deploy.placement.learner={labels={pool="learn"}}',
    'deploy.placement.actors={labels={pool="generate"}}',
)


@contextlib.contextmanager
def nodes_of(**counts):
    """Start a head, and so many nodes of Ray for each label; yield the cluster and those nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "labels": {"pool": "head"}}
    )
    try:
        nodes = [
            cluster.add_node(num_cpus=1, labels={"pool": pool}, resources={pool: 1})
            for pool, count in counts.items()
            for _ in range(count)
        ]
        yield cluster, nodes
    finally:
        cluster.shutdown()


def raylet(node):
    """Return the process id of the raylet of a node, whose children are the node's processes."""
    return node.all_processes["raylet"][0].process.pid


def has_rank(node):
    return titled(raylet(node), RANK)


def test_a_run_that_loses_the_node_and_disk_of_its_broker_goes_on_from_its_backup(
    headway, monkeypatch
):
    shared = headway.folder / "shared"
    settings = (
        "steps=40", "heldout.every=40", f"deploy.backup_dir={shared}",
        f"deploy.backup_seconds={BACKUP_SECONDS}", *POOLS,
    )  # fmt: skip
    accepted = "SELECT group_id, accepted_at FROM results JOIN groups USING (group_id)"
    accepted += " WHERE purpose = 'train'"
    name = "lost-node"
    monkeypatch.setenv(VARIABLE, str(headway.folder / f"{name}.trained"))  # for all nodes
    with nodes_of(learn=1, generate=1) as (cluster, _):
        address = f"deploy.ray_address={cluster.address}"
        with Going(headway, name, *settings, address) as going:
            going.trains(13)
            command, node = map(psutil.Process, (going.process.pid, raylet(cluster.head_node)))
            killed_at = clock.now()
            for process in (command, *command.children(), *node.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            cluster.remove_node(cluster.head_node, allow_graceful=False)
            going.process.communicate(timeout=60)
    lost = headway.folder / "lost-disk"
    going.folder.rename(lost)
    [backup] = shared.iterdir()
    with nodes_of(learn=1, generate=1) as (cluster, _):
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


def test_a_run_that_loses_a_node_of_its_learner_goes_on_where_another_joins(headway, monkeypatch):
    name = "lost-rank-node"
    settings = ("steps=40", "heldout.every=40", "learner.ranks=2", *POOLS)
    monkeypatch.setenv(VARIABLE, str(headway.folder / f"{name}.trained"))  # for all nodes
    with nodes_of(learn=2, generate=1) as (cluster, [leads, *_]):
        address = f"deploy.ray_address={cluster.address}"
        with Going(headway, name, *settings, address) as going:
            going.trains(13)
            cluster.remove_node(leads, allow_graceful=False)
            going.until(lambda: "the learner waits for a node" in going.log_of_driver())
            cluster.add_node(num_cpus=1, labels={"pool": "learn"})
            run = going.end()
            again = going.check_accounts(40)
    assert (run.summary["status"], run.summary["version"]) == ("done", 40)
    # Ray may notice the loss only after new ranks were to begin there.
    assert run.summary["restarts"]["learner"] in (1, 2)
    print(f"the learner was away for {run.summary['lost_seconds']['learner']:.1f} s")
    assert again >= 2, "batches after the checkpoint are trained again"
    assert "the learner goes on from version 10" in run.output


def test_an_actor_gives_its_node_to_a_learner_that_lost_its_own(headway, monkeypatch):
    name = "given-back"
    settings = (
        "steps=40", "heldout.every=40", "actors.max_count=2",
        "weight_sync.transport=object_store", *(
            f'deploy.placement.{role}={{labels={{pool="any"}}}}' for role in ("learner", "actors")
        ),
    )  # fmt: skip
    monkeypatch.setenv(VARIABLE, str(headway.folder / f"{name}.trained"))  # for all nodes
    recipe = headway.folder / "given-back.toml"
    recipe.write_text(RECIPE.read_text().replace('cores = ["0"]', ""))
    monkeypatch.setattr(conftest, "RECIPE", recipe)
    with nodes_of(any=3) as (cluster, nodes):
        address = f"deploy.ray_address={cluster.address}"
        with Going(headway, name, *settings, address) as going:
            going.until(lambda: "actor-1 is ready" in going.log_of_driver())
            going.trains(13)
            [leads] = going.until(lambda: [node for node in nodes if has_rank(node)])
            cluster.remove_node(leads, allow_graceful=False)
            run = going.end()
            going.check_accounts(40)
    assert (run.summary["status"], run.summary["version"]) == ("done", 40)
    assert "the learner waits for a node" in run.output
    assert "actor-1 gives back its node, which others need" in run.output
    assert not run.summary["restarts"]["actors"]
    print(f"the learner was away for {run.summary['lost_seconds']['learner']:.1f} s")


def test_reward_models_go_on_where_another_node_joins(headway, monkeypatch):
    name = "lost-judge-node"
    assert headway.recipe("reward-model", *SECTION).returncode == 0
    settings = (
        *SECTION, JUDGED, "sft.name=small", "reward_model.name=small", "steps=40",
        "heldout.every=40", "actors.heldout_reward=['last_answer']", *POOLS,
        'deploy.placement.reward_model={labels={pool="judge"},resources={judge=1.0}}',
    )  # fmt: skip
    monkeypatch.setenv(VARIABLE, str(headway.folder / f"{name}.trained"))  # for all nodes
    with nodes_of(learn=1, generate=1, judge=1) as (cluster, [*_, judge]):
        address = f"deploy.ray_address={cluster.address}"
        with Going(headway, name, *settings, address) as going:
            going.trains(13)
            cluster.remove_node(judge, allow_graceful=False)
            going.until(lambda: "reward-model is restarted" in going.log_of_driver())
            cluster.add_node(num_cpus=1, labels={"pool": "judge"}, resources={"judge": 1})
            run = going.end()
            going.check_accounts(40)
    assert (run.summary["status"], run.summary["version"]) == ("done", 40)
    assert run.summary["restarts"]["reward_models"] in (1, 2), "as for the learner"
    assert "reward-model is ready again" in run.output
    print(f"reward models were away for {run.summary['lost_seconds']['reward_models']:.1f} s")
