"""Whole runs with several actors, of which some are killed."""

import os
from pathlib import Path

import pytest

from tests.deploy.running import ACTOR, ENDLESS, ENGINE, Running, restarts

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(1200)]
TWO = "count = 2\ncpus = 0.5"


def test_a_run_whose_actors_are_killed_loses_and_doubles_nothing(headway):
    slow = "actors.scripted_options={tokens_per_second=20.0}"
    with Running(headway, "killed", "steps=60", "heldout.every=60", slow, cores=TWO) as run:
        run.trains(3)
        first, second = run.until(lambda: run.titled(ACTOR)[1:] and run.titled(ACTOR))
        first.kill()
        engine = run.until(lambda: run.serves_again(1))
        second.kill()
        other = run.until(lambda: run.serves_again(2))
        assert {engine, other} == {"engine-0", "engine-1"}
        assert run.check(60, actors=2) == 0
    assert run.output().count("is restarted (1 of 5 in a row)") == 2
    assert run.output().count("is ready again") == 2
    assert run.summary["tokens_generated"] >= run.summary["tokens_trained"] > 0


def narrowest_binding(process):
    """Return the smallest set of cores that a thread of a process is bound to."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return min((os.sched_getaffinity(int(task.name)) for task in tasks), key=len)


@pytest.mark.vllm
@pytest.mark.timeout(500)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two engines on cores of their own")
@pytest.mark.parametrize("trained", [(), ("learner.lora.rank=4",)], ids=["weights", "adapter"])
def test_an_engine_and_an_actor_of_vllm_that_are_killed_serve_the_newest_weights_again(
    headway, trained
):
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    settings = (*ENDLESS, "actors.engine=vllm", f"actors.cores={cores}", *trained)
    with Running(headway, f"real-killed-{len(trained)}", *settings, cores=TWO) as run:
        run.trains(3)
        engine, other_engine = run.titled(ENGINE)
        actors = {process.pid: process for process in run.titled(ACTOR)}
        actor, other_actor = (
            next(actors[above.pid] for above in process.parents() if above.pid in actors)
            for process in (engine, other_engine)
        )
        bindings = [narrowest_binding(process) for process in (engine, other_engine)]
        assert all(bindings)
        assert not bindings[0] & bindings[1]
        engine.kill()
        restarted = [run.until(lambda: run.serves_again(1))]
        assert actor.pid not in [process.pid for process in run.titled(ACTOR)]
        other_actor.kill()
        run.trains_more(10)
        assert run.serves_again(2) is None, "the run goes on while one actor is away"
        restarted.append(run.until(lambda: run.serves_again(2)))
        assert sorted(restarted) == ["engine-0", "engine-1"]
        run.trains_more(3)
        run.interrupt()
    rows = run.rows("restarts.jsonl")
    assert "a process of the vLLM engine is gone" in rows[0]["reason"]
    assert "its process died" in rows[1]["reason"]
    for row, engine_id in zip(rows, restarted, strict=True):
        published = sum(batch["published_at"] < row["at"] for batch in run.rows("metrics.jsonl"))
        assert run.served(engine_id, row["at"])[0] >= published
    accounts = headway.accounting(run.name)
    assert (accounts["balanced"], accounts["trained_twice"]) == (True, 0)
    assert run.summary["restarts"] == restarts(actors=2)
    assert run.summary["max_lag_trained"] <= 2
