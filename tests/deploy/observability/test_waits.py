"""Who waits on whom for what: by tables, without a clock."""

from dataclasses import fields, replace

import pytest

from deploy.observability.waits import DISK, ActorHealth, Health, Movement, Wait, Waits, waits
from queues.broker.status import BrokerStatus

STATES = {"queued": 2, "leased": 2, "ready": 0, "taken": 0}
KNOWN = {
    "version": 4, "learner": (0, 4), "steps": 9, "depth": STATES, "live": 2, "window": 6,
    "waits_for": {}, "engines": {"engine-0": 4, "engine-1": 4}, "evaluations": (), "accepted": 0,
}  # fmt: skip
BROKER = BrokerStatus(**dict.fromkeys(field.name for field in fields(BrokerStatus)) | KNOWN)
IDLE = {name: ActorHealth(engine_id=f"engine-{name[-1]}") for name in ("actor-0",)}
HEALTH = Health(broker=BROKER, paused=False, actors=IDLE, disk=True, groups_per_batch=2)


def broker(**changes):
    depth = {state: changes.pop(state, count) for state, count in STATES.items()}
    return replace(HEALTH, broker=replace(BROKER, depth=depth, **changes))


def actor(**changes):
    return replace(HEALTH, actors={"actor-0": replace(IDLE["actor-0"], **changes)})


@pytest.mark.parametrize(
    ("health", "who", "on", "what"),
    [
        (replace(HEALTH, disk=False), "driver", DISK, "a small file to become durable"),
        (replace(HEALTH, broker=None), "driver", "broker", "an answer"),
        (actor(running=3), "results queue", "actor-0", "one of 3 rollouts to end"),
        (replace(HEALTH, silent={"reward-model": 0.0}), "driver", "reward-model", "an answer"),
        (broker(taken=2), "broker", "learner", "batch 4 to be trained"),
        (broker(ready=2), "results queue", "learner", "batch 4 to be taken"),
        (
            broker(waits_for={"g1": "engine-0", "g2": "engine-0"}),
            *("learner", "actor-0", "2 due group(s) of batch 4"),
        ),
        (broker(waits_for={"g1": None}), "learner", "nobody", "1 due group(s) of batch 4"),
        (
            broker(engines={"engine-0": 3}),
            *("actor-0", "weight update", "a version above 3"),
        ),
        (broker(queued=0, leased=0), "actors", "feeder", "prompts"),
        (broker(version=9), "driver", "learner", "its last checkpoint"),
        (broker(learner=(1, 2)), "driver", "learner", "batch 4 to be asked for"),
        (
            replace(HEALTH, actors={}, actors_lacking=2),
            *("prompt queue", "the cluster", "resources for 2 actor(s)"),
        ),
    ],
)
def test_each_wait_has_its_owner(health, who, on, what):
    assert [wait for wait, _ in waits(health)] == [Wait(who, on, what)]


@pytest.mark.parametrize(
    "health",
    [
        HEALTH,
        replace(broker(version=9, taken=2), learner_saved=True),
        replace(broker(version=9), learner_writes=True),
        replace(broker(queued=0, leased=0), paused=True),
        replace(broker(queued=0, leased=0), actors={}),
        broker(queued=0, leased=0, live=6),
    ],
    ids=["all work", "the end", "the last checkpoint", "a full disk", "all start", "a full window"],
)
def test_nobody_waits(health):
    assert list(waits(health)) == []


@pytest.mark.parametrize(
    ("asked", "every", "excused"),
    [(3, 4, True), (3, 2, True), (3, 5, False), (4, 5, False), (4, 1, False), (1, 2, True)],
    ids=["due", "due again", "not due", "it trains", "it trains with one each", "recorded ones"],
)
def test_a_learner_that_trains_is_waited_for_though_a_checkpoint_is_written(asked, every, excused):
    health = replace(broker(ready=2, learner=(0, asked)), checkpoint_every=every)
    health = replace(health, learner_writes=True)
    assert [wait.on for wait, _ in waits(health)] == ([] if excused else ["learner"])
    movement = Movement()
    movement.idle_seconds(health, 0.0)
    assert movement.idle_seconds(health, 5.0) == (0.0 if excused else 5.0)


PINNED = {"actor-0": replace(IDLE["actor-0"], pinned_seconds=600.0)}


@pytest.mark.parametrize(
    ("health", "most", "on"),
    [
        (broker(taken=2), 10.0, "learner"),
        (replace(broker(taken=2), step_seconds=8.0), 34.0, "learner"),
        (replace(broker(engines={"engine-0": 3}), actors=PINNED), 610.0, "weight update"),
    ],
    ids=["its deadline", "several times the longest step", "as long as a version may be kept"],
)
def test_a_wait_is_overdue_after_its_deadline_and_not_before(health, most, on):
    watched = Waits(deadline=10.0)
    assert [watched.overdue(health, 100.0 + passed) for passed in (0.0, most - 5, most)] == [[]] * 3
    [late] = watched.overdue(health, 100.5 + most)
    assert (late.on, late.seconds) == (on, most + 0.5)


def test_a_silent_process_is_waited_for_since_it_was_asked():
    watched = Waits(deadline=10.0)
    assert watched.overdue(replace(HEALTH, silent={"learner-0": 5.0}), 105.0) == []
    [late] = watched.overdue(replace(HEALTH, silent={"learner-0": 11.0}), 111.0)
    assert (late.on, late.seconds) == ("learner-0", 11.0)


def test_until_the_initial_policy_is_scored_nobody_waits_for_the_feeder():
    watched = Waits(deadline=10.0)
    began = broker(
        version=0, learner=(0, 0), engines={}, queued=0, leased=0, live=0, evaluations=["e@0"]
    )
    scoring = [replace(began, broker=replace(began.broker, accepted=n)) for n in (3, 4)]
    watched.overdue(scoring[0], 0.0)
    assert watched.overdue(scoring[1], 9.0) == []
    assert watched.overdue(scoring[1], 18.0) == []
    wait = Wait("feeder", "actors", "scores of the initial policy")
    assert watched.overdue(scoring[1], 19.5) == [replace(wait, seconds=10.5)]


def test_a_learner_that_trains_recorded_batches_again_makes_progress():
    watched = Waits(deadline=10.0)
    for now, learner in ((0.0, (0, 4)), (9.0, (1, -1)), (18.0, (1, 2)), (27.0, (1, 3))):
        assert watched.overdue(broker(taken=2, learner=learner), now) == []
    assert len(watched.overdue(broker(taken=2, learner=(1, 3)), 38.0)) == 1


def test_what_moves_begins_anew_and_so_does_what_was_over():
    watched = Waits(deadline=10.0)
    later = broker(taken=2, version=5, engines={"engine-0": 5})
    watched.overdue(broker(taken=2), 0.0)
    assert watched.overdue(later, 11.0) == []
    assert watched.overdue(HEALTH, 20.0) == []
    assert watched.overdue(later, 30.0) == []
    assert [late.seconds for late in watched.overdue(later, 41.0)] == [11.0]


def test_an_actor_moves_by_rollouts_that_end_and_by_versions():
    watched = Waits(deadline=10.0)
    watched.overdue(actor(running=2, finished=7), 0.0)
    assert watched.overdue(actor(running=2, finished=8), 11.0) == []
    newer = replace(actor(running=2, finished=8), broker=replace(BROKER, engines={"engine-0": 5}))
    assert watched.overdue(newer, 22.0) == []
    assert [late.on for late in watched.overdue(newer, 33.0)] == ["actor-0"]


def test_the_longest_comes_first():
    watched = Waits(deadline=1.0)
    watched.overdue(replace(HEALTH, disk=False), 0.0)
    both = replace(broker(taken=2), disk=False)
    watched.overdue(both, 5.0)
    assert [late.on for late in watched.overdue(both, 9.0)] == [DISK, "learner"]


@pytest.mark.parametrize(
    "moved",
    [broker(version=5), broker(accepted=1), broker(engines={"engine-0": 4, "engine-1": 5})],
)
def test_a_run_moves_by_a_version_a_result_or_an_engine_that_takes_weights(moved):
    movement = Movement()
    assert [movement.idle_seconds(HEALTH, now) for now in (10.0, 15.0)] == [0.0, 5.0]
    assert [movement.idle_seconds(moved, now) for now in (16.0, 18.0)] == [0.0, 2.0]
    silent = replace(HEALTH, broker=None)
    assert movement.idle_seconds(silent, 25.0) == 9.0, "a broker that does not answer is still"


@pytest.mark.parametrize(
    "excused",
    [{"paused": True}, {"actors": {}}, {"learner_starts": True}, {"reward_models_start": True}],
)
def test_while_a_disk_is_full_or_all_actors_start_no_idle_time_counts(excused):
    movement = Movement()
    movement.idle_seconds(HEALTH, 0.0)
    assert movement.idle_seconds(replace(HEALTH, **excused), 100.0) == 0.0
    assert movement.idle_seconds(HEALTH, 101.0) == 1.0
