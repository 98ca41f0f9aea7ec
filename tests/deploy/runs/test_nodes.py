"""Runs on several nodes: where their roles are, nodes that join and leave, nodes that are lost."""

import contextlib
import shutil
import subprocess

import psutil
import pytest

from headway import clock
from learner.diagnostics.trained_log import VARIABLE
from tests.deploy.conftest import HEADWAY
from tests.deploy.offline.test_reward_models import JUDGED, SECTION
from tests.deploy.processes import titled
from tests.deploy.running import ACTOR, BROKER, ENDLESS, RANK, Running

BACKUP_SECONDS = 2.0
pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(900)]


POOLS = (
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


@pytest.fixture
def run_on(headway, monkeypatch, tmp_path):
    """Return a function that makes a run of 40 batches on a cluster, which starts later."""
    log = tmp_path / "trained"
    monkeypatch.setenv(VARIABLE, str(log))  # nodes have the environment of this process

    def on(cluster, name, *settings, **options):
        address = f"deploy.ray_address={cluster.address}"
        fixed = (
            "steps=40", "heldout.every=40", "learner.checkpoint_every=10",
            "actors.scripted_options={tokens_per_second=40.0}",
            "weight_sync.transport=object_store",
        )  # fmt: skip
        return Running(headway, name, *fixed, *settings, address, log=log, **options)

    return on


def went_on(run, role=None):
    """Check that a run trained its 40 batches; return how many of them again."""
    output = run.ends()
    assert (run.summary["status"], run.summary["version"]) == ("done", 40)
    if role is not None:  # Ray may notice the loss only after new processes were to begin there
        assert run.summary["restarts"][role] in (1, 2)
    return output, run.check_accounts(40)


def test_a_run_that_loses_the_node_and_disk_of_its_broker_goes_on_from_its_backup(headway, run_on):
    shared, lost = headway.folder / "shared", headway.folder / "lost-disk"
    backup = (f"deploy.backup_dir={shared}", f"deploy.backup_seconds={BACKUP_SECONDS}")
    accepted = "SELECT group_id, accepted_at FROM results JOIN groups USING (group_id)"
    accepted += " WHERE purpose = 'train'"
    with (
        nodes_of(learn=1, generate=1) as (cluster, (learn, generate)),
        run_on(cluster, "lost-node", *backup, *POOLS) as run,
    ):
        run.trains(13)
        for node, title in ((learn, RANK), (generate, ACTOR), (cluster.head_node, BROKER)):
            assert titled(raylet(node), title), "each role is where it is placed"
        command, node = map(psutil.Process, (run.process.pid, raylet(cluster.head_node)))
        killed_at = clock.now()
        for process in (command, *command.children(), *node.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        run.process.wait(60)
    before = {*run.query(accepted)}
    trained = {row[0] for row in run.query("SELECT group_id FROM batch_groups")}
    run.folder.rename(lost)
    [copy] = shared.iterdir()
    with nodes_of(learn=1, generate=1) as (cluster, _):
        address = f"deploy.ray_address={cluster.address}"
        try:
            run.start([HEADWAY, "resume", copy, "--set", address]).check(40)
        finally:
            run.__exit__()
    assert "is made anew from its backup" in run.output()
    after = {*run.query(accepted)}
    assert {row for row in before if row[1] < killed_at - BACKUP_SECONDS} <= after
    assert trained <= {group for group, _ in after}, "every batch is the recorded one"
    shutil.rmtree(lost)


def test_a_run_that_loses_a_node_of_its_learner_goes_on_where_another_joins(run_on):
    with (
        nodes_of(learn=2, generate=1) as (cluster, [leads, *_]),
        run_on(cluster, "lost-rank-node", "learner.ranks=2", *POOLS) as run,
    ):
        run.trains(13)
        cluster.remove_node(leads, allow_graceful=False)
        run.until(lambda: "the learner waits for a node" in run.output())
        cluster.add_node(num_cpus=1, labels={"pool": "learn"})
        output, again = went_on(run, "learner")
    assert again >= 2, "batches after the checkpoint are trained again"
    assert "the learner goes on from version 10" in output


def test_an_actor_gives_its_node_to_a_learner_that_lost_its_own(run_on):
    anywhere = [
        f'deploy.placement.{role}={{labels={{pool="any"}}}}' for role in ("learner", "actors")
    ]
    with (
        nodes_of(any=3) as (cluster, nodes),
        run_on(cluster, "given-back", "actors.max_count=2", *anywhere, cores="") as run,
    ):
        run.until(lambda: "actor-1 is ready" in run.output())
        run.trains(13)
        [leads] = run.until(lambda: [node for node in nodes if titled(raylet(node), RANK)])
        cluster.remove_node(leads, allow_graceful=False)
        output, _ = went_on(run)
    assert "the learner waits for a node" in output
    assert "actor-1 gives back its node, which others need" in output
    assert not run.summary["restarts"]["actors"]


def test_reward_models_go_on_where_another_node_joins(headway, run_on):
    section = (*SECTION, "sft.name=small", "reward_model.name=judges")
    made = headway.recipe("reward-model", *section)
    assert made.returncode == 0, made.stderr
    settings = (
        *section, JUDGED,
        "actors.heldout_reward=['last_answer']", *POOLS,
        'deploy.placement.reward_model={labels={pool="judge"},resources={judge=1.0}}',
    )  # fmt: skip
    with (
        nodes_of(learn=1, generate=1, judge=1) as (cluster, [*_, judge]),
        run_on(cluster, "lost-judge-node", *settings) as run,
    ):
        run.trains(13)
        cluster.remove_node(judge, allow_graceful=False)
        run.until(lambda: "reward-model is restarted" in run.output())
        cluster.add_node(num_cpus=1, labels={"pool": "judge"}, resources={"judge": 1})
        output, _ = went_on(run, "reward_models")
    assert "reward-model is ready again" in output


def test_actors_follow_the_nodes_of_a_cluster(headway, run_on):
    """Nodes join, one gets SIGTERM, one is killed; the run goes on with what is there."""
    settings = (
        *ENDLESS, 'deploy.placement.actors={labels={pool="generate"}}',
        "queues.lease_seconds=10.0", "queues.heartbeat_seconds=1.0",
    )  # fmt: skip
    with nodes_of() as (cluster, _), contextlib.ExitStack() as ends:
        joins = [HEADWAY.parent / "ray", "start", "--block", f"--address={cluster.address}"]
        first = subprocess.Popen(
            [*joins, "--num-cpus=1", "--labels=pool=generate"], stdout=subprocess.PIPE, text=True
        )
        ends.callback(first.terminate)
        next(line for line in first.stdout if "runtime started" in line)
        run = ends.enter_context(run_on(cluster, "elastic", *settings, cores="max_count = 3"))
        nodes = {"first": first.pid}

        def has_actors(*names):
            """Wait until these nodes and no others have an actor, and the run trains with them."""
            having = lambda: {name for name, pid in nodes.items() if titled(pid, ACTOR)}  # noqa: E731
            run.until(lambda: having() == {*names})
            run.trains_more(2)

        def join(name):
            node = cluster.add_node(num_cpus=1, labels={"pool": "generate"})
            nodes[name] = raylet(node)
            return node

        has_actors("first")
        second = join("second")
        has_actors("first", "second")
        first.terminate()
        run.until(lambda: first.poll() is not None)
        del nodes["first"]
        has_actors("second")
        join("third")
        has_actors("second", "third")
        del nodes["second"]
        cluster.remove_node(second, allow_graceful=False)
        has_actors("third")
        join("fourth")
        has_actors("third", "fourth")
        output = run.interrupt()
    assert "leaves its node, which is lost or drained" in output
    accounts = headway.accounting("elastic")
    assert (accounts["balanced"], accounts["trained_twice"]) == (True, 0)
    assert accounts["trained"] == 2 * len(run.rows("metrics.jsonl"))
