"""Whole runs whose number of actors changes while they train."""

import pytest

from deploy.storage.run_directory import RunDirectory
from queues.schema import summarize
from tests.deploy.running import ACTOR, ENDLESS, Running, restarts

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.timeout(1200)]
ONE = "count = 1\ncpus = 0.25"


def scale(headway, name, actors):
    """Ask a run for a number of actors; return exit code and what was printed, in one line."""
    done = headway("scale", name, "--actors", str(actors))
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def tokens_kept(run):
    """Return the tokens that the ledger has: of accepted results, and of unfinished groups."""
    [(accepted,)] = run.query("SELECT SUM(tokens) FROM results")
    saved = run.query("SELECT payload FROM partials")
    return accepted + sum(summarize(payload).tokens for (payload,) in saved)


@pytest.mark.vllm
def test_a_run_grows_and_shrinks_and_engines_that_leave_hand_over_every_token(headway):
    """It has one engine, three, and then two; prints its throughput each time."""
    settings = (
        *ENDLESS, "actors.engine=vllm", "actors.max_new_tokens=200", "actors.kv_cache_gib=0.25",
        "prompts.groups_per_batch=4", "learner.microbatch_tokens=512",
        "learner.checkpoint_every=100",
    )  # fmt: skip
    rates = []

    def measure(engines):
        run.trains_more(22)
        first, *others = run.rows("metrics.jsonl")[-20:]
        samples = sum(row["rollouts_trained"] for row in others)
        rate = samples / (others[-1]["step_finished_at"] - first["step_finished_at"])
        rates.append(f"{engines} engine(s): {rate:.1f} samples/s")

    with Running(headway, "scaled-vllm", *settings, cores=ONE) as run:
        measure(1)
        assert scale(headway, "scaled-vllm", 3)[0] == 0
        run.until(lambda: run.served("engine-1") and run.served("engine-2"))
        measure(3)
        code, words = scale(headway, "scaled-vllm", 100)
        assert code == 2
        assert "keeps 3 actor(s): actors: 100 process(es), each with 0.25 CPU" in words
        assert scale(headway, "scaled-vllm", 2)[0] == 0
        run.until(lambda: len(run.titled(ACTOR)) == 2)
        assert not run.titled(f"{ACTOR} actor-2"), "the newest leaves"
        measure(2)
        run.interrupt()
    asked = [(row["before"], row["asked"], bool(row["refused"]))
             for row in run.rows("scalings.jsonl")]  # fmt: skip
    assert asked == [(1, 3, False), (3, 100, True), (3, 2, False)]
    assert RunDirectory(run.folder).config().actors.count == 2, "a resume keeps its size"
    code, words = scale(headway, "scaled-vllm", 2)
    assert (code, "go on with `headway resume" in words) == (2, True)
    accounts = headway.accounting("scaled-vllm")
    assert (accounts["balanced"], accounts["trained_twice"]) == (True, 0)
    assert accounts["trained"] == 4 * len(run.rows("metrics.jsonl"))
    assert run.summary["max_lag_trained"] <= 2
    assert run.summary["restarts"] == restarts()
    again = [row for row in headway.rollouts("scaled-vllm") if row["attempt"] > 1]
    sampled = run.summary["tokens_generated"]
    print(*rates, f"{len(again)} rollouts of groups that were handed over, {sampled} tokens "
          "sampled", sep="\n")  # fmt: skip
    assert tokens_kept(run) == sampled
