"""Figures of a run from hand-made rows."""

import pytest

from actors.rollout.agent_statistics import AgentStatistics
from deploy.config.evaluation_schedule import PlannedEvaluation
from deploy.report.summary import overlap, summarise
from deploy.report.tables import figures
from deploy.storage.run_record import Earlier, Record
from learner.diagnostics.batch_report import TrainedBatch
from queues.records import Evaluation
from tests.deploy.run_rows import batch_row, weight_update


def batch(version, *, start, end, wait, lags, rollouts=4, session=1.0):
    return batch_row(
        version, start - wait, waited=wait, stepped=end - start, published=0.0,
        session_started_at=session, optimizer_steps=1, tokens_trained=sum(lags.values()),
        rollouts_trained=rollouts, multi_version_rollouts=1,
        max_lag=max(int(lag) for lag in lags), lag_mean=0.0, lag_histogram=lags,
        ess=0.5 + version / 10, reward_mean=0.5, tokens_fresh=10 * version,
        mismatch_fresh=1e-6 if version else None, tokens_crossed=5, mismatch_crossed=1e-3,
        tokens_stale=0, mismatch_stale=None,
    )  # fmt: skip


def swap(version, published, *, finished, **more):
    return weight_update(
        version, published, staged=None, started=0.2, finished=finished, pause_seconds=0.01,
        load_seconds=0.02, resume_seconds=0.03, **more,
    )  # fmt: skip


BATCHES = [
    batch(0, start=10, end=12, wait=5, lags={"0": 8}),
    batch(1, start=12, end=15, wait=0, lags={"0": 2, "1": 6}),
    batch(2, start=16, end=18, wait=1, lags={"2": 8}),
]
SWAPS = [
    swap(0, 9, finished=0.3, seeding=True),
    swap(1, 12, finished=0.5),
    swap(2, 15, finished=0.4),
    swap(3, 18, finished=None, error="LoadFailed"),
]


def summed(known=None, *, status="done", now=21.0):
    """Return the summary of a record, by default of a finished run."""
    return summarise(record() if known is None else known, status=status, now=now)


def record(batches=BATCHES, swaps=SWAPS, **known):
    return Record(
        **known,
        name="x",
        steps=3,
        max_staleness=2,
        started_at=1.0,
        batches=[TrainedBatch.from_dict(row) for row in batches],
        swaps=list(swaps),
        actors=[{"tokens_generated": 30, "idle_fraction": 0.25}],
        accounting={"balanced": True},
    )


def test_figures_of_a_finished_run():
    summary = summed()
    assert summary["seconds"] == 20.0
    assert summary["seconds_to_first_step"] == 11.0
    assert summary["samples_per_second"] == pytest.approx(8 / 6)
    assert (summary["tokens_trained"], summary["tokens_generated"]) == (24, 30)
    assert summary["max_lag_trained"] == 2
    assert summary["lag_histogram"] == {"0": 10, "1": 6, "2": 8}
    assert summary["ess_mean"] == pytest.approx(0.6)
    assert summary["idle_fraction"] == {"learner": pytest.approx(1 / 6), "actors": 0.25}
    assert summary["mismatch"]["fresh"] == {
        "tokens": 30,
        "mean_abs_logprob_difference": pytest.approx(1e-6),
    }
    assert summary["mismatch"]["stale"] == {"tokens": 0, "mean_abs_logprob_difference": None}


def test_the_time_between_two_sessions_does_not_count():
    later = [
        batch(3, start=1000, end=1002, wait=50, lags={"1": 8}, session=900.0),
        batch(4, start=1003, end=1006, wait=1, lags={"0": 8}, session=900.0),
    ]
    earlier = Earlier(seconds=40.0, tokens_generated=100, seconds_to_first_step=11.0)
    resumed = record([*BATCHES, *later], earlier=earlier)
    summary = summed(resumed)
    assert summary["seconds"] == 60.0
    assert summary["seconds_to_first_step"] == 11.0
    assert summary["tokens_generated"] == 130
    assert summary["samples_per_second"] == pytest.approx((8 + 4) / (6 + 4))
    assert summary["idle_fraction"]["learner"] == pytest.approx((1 + 1) / (6 + 4))


def add_score(known, version, *, size, samples=1, **result):
    """Add the score of a version to a record; several samples are not greedy."""
    kind = "greedy" if samples == 1 else "sampled"
    planned = PlannedEvaluation(
        version=version, kind=kind, temperature=0.0, size=size, samples=samples
    )
    versions = {"lowest_version": version, "highest_version": version}
    evaluation = Evaluation(count=size * samples, **{"best": None, **versions, **result})
    known.add_score(planned, evaluation, now=20.0)


def test_pass_at_k_stands_beside_the_mean_of_its_samples():
    known = record()
    for version, score, best in ((0, 0.25, 0.5), (3, 0.5, 0.75)):
        result = {"failed": 0, "score": score, "best": best, "incomplete": 1}
        add_score(known, version, size=10, **result)
        add_score(known, version, size=10, samples=4, **result)
    summary = summed(known)
    assert [row["size"] for row in summary["heldout"]] == [10, 10]
    assert "pass_at_k" not in summary["heldout"][0]
    last = summary["heldout_sampled"][-1]
    assert (last["size"], last["samples"], last["pass_at_k"]) == (10, 4, 0.75)
    assert (last["incomplete"], last["sampled_by"]) == (1, [3, 3])
    shown = figures(summary)
    assert shown["held-out sampled"] == (
        "0.250 → 0.500 (10 problems), pass@4 0.500 (9 of 10, 1 failed) → 0.750 (9 of 10, 1 failed)"
    )


def test_a_score_stands_with_the_rollouts_that_it_leaves_out():
    known = record()
    for version, failed, score in ((0, 20, None), (3, 18, 1.0)):
        add_score(known, version, size=20, failed=failed, score=score, incomplete=failed)
    known.accounting = {"balanced": True, "failed": {}, "heldout_failed": {"reward": 38}}
    summary = summed(known)
    assert [(row["scored"], row["failed"]) for row in summary["heldout"]] == [(0, 20), (2, 18)]
    shown = figures(summary)
    assert shown["held-out greedy"] == "– (0 of 20, 20 failed) → 1.000 (2 of 20, 18 failed)"
    assert shown["failed for good"] == "38 held-out rollouts (reward 38)"


def test_weight_sync_counts_successful_updates_of_engines_that_served():
    figures = summed()["weight_sync"]
    assert (figures["updates"], figures["failed"]) == (2, 1)
    assert figures["pause_seconds_mean"] == pytest.approx(0.06)
    assert figures["publish_to_serving_seconds_mean"] == pytest.approx(0.45)


def test_versions_that_were_overtaken_before_they_were_sent_are_counted():
    skipped = zip(BATCHES, (0, 2, 1), strict=True)
    made = record([{**row, "versions_skipped": count} for row, count in skipped])
    assert summed()["weight_sync"]["skipped"] == 0
    assert summed(made)["weight_sync"]["skipped"] == 3


def test_overlap_counts_updates_that_arrived_after_the_next_step_had_begun():
    counted = {"learner_ahead": 1, "queue_ready": 1, "queue_ready_and_learner_ahead": 1}
    rows = [TrainedBatch.from_dict(row) for row in BATCHES]
    assert overlap(rows, SWAPS) == {"updates": 3, **counted}


def test_what_was_left_out_of_training_is_counted_and_shown():
    nothing = summed()
    assert set(nothing["selection"].values()) == {0}
    figures_of_last = {"groups_let_through": 3, "prompts_retired": 1200, "groups_overdue": 7}
    rows = [*BATCHES[:-1], {**BATCHES[-1], **figures_of_last}]
    known = record(rows)
    known.accounting = {"balanced": True, "dropped": {"filtered": 41}}
    summary = summed(known)
    assert summary["selection"] == {"groups_filtered": 41, **figures_of_last}
    shown = [figures({**s, "heldout": [], "heldout_sampled": []}) for s in (nothing, summary)]
    labels = ("groups without a signal", "prompts mastered", "stragglers not waited for")
    assert [shown[0].get(label) for label in labels] == [None, None, None]
    texts = ["41 filtered, 3 more trained without effect", "1,200", "7 groups"]
    assert [shown[1].get(label) for label in labels] == texts


def test_a_batch_whose_tokens_were_all_too_old_has_no_lag():
    masked = {
        **BATCHES[-1], "max_lag": None, "lag_mean": None, "response_length_mean": None,
        "lag_histogram": {}, "ess": None,
    }  # fmt: skip
    summary = summed(record([*BATCHES[:-1], masked]))
    assert summary["max_lag_trained"] == max(row["max_lag"] for row in BATCHES[:-1])


def test_the_table_shows_every_figure_of_the_summary():
    assert figures(summed()).items() >= {
        "steps": "3 of 3", "seconds": "20 (first step after 11)",
        "rollouts trained per second": "1.3", "largest lag trained": "2 (bound 2)",
        "idle": "learner 17%, actors 25%", "accounts": "balanced",
        "weight updates": "2, pause 0.060 s, serving after 0.450 s",
    }.items()  # fmt: skip
    killed = summed(status="unknown") | {"seconds": None, "accounting": {}}
    assert figures(killed)["seconds"] == "– (first step after 11)"
    assert figures(killed)["accounts"] == "–"


def test_a_run_that_trained_nothing_has_a_summary_too():
    summary = summed(record([], []), status="failed", now=2.0)
    assert summary["version"] == 0
    assert summary["samples_per_second"] is None
    assert summary["max_lag_trained"] is None


def test_figures_of_agents_are_shown_where_there_are_any():
    of_agents = record()
    assert "agents" not in summed(of_agents)
    statistics = AgentStatistics()
    statistics.agent, statistics.turns = "program:x", 40
    statistics.count(turns=40, segments=3, sampled=90, left_out={"undelivered": 4})
    statistics.seconds.update(model=1.0, agent=3.0)
    row = of_agents.actors[0] | {"agents": statistics.statistics()}
    none = of_agents.actors[0] | {"agents": AgentStatistics().statistics()}
    of_agents.actors = [row, row, none]
    shown = figures(summed(of_agents))
    assert shown["turns of agents"] == "80, 6 began a further segment"
    assert shown["tokens of agents left out"] == "4.3% (undelivered 8)"
    assert shown["waiting for agents"] == "75% of the time"
    of_agents.actors = [none]
    assert not [label for label in figures(summed(of_agents)) if "agents" in label]


def test_what_was_predicted_stands_beside_what_happened():
    lag = {"lag_max": {"predicted": [3, 5, 8], "happened": 9}}
    memory = {"learner": {"predicted": 2**30, "happened": 1.5 * 2**30}}
    predicted = {"batches": 20, "figures": lag, "doubts": ["a", "b"], "memory": memory}
    summary = {**summed(record()), "predicted": predicted}
    assert figures(summary).items() - figures(summed(record())).items() == {
        ("largest lag, predicted from 20 batches", "5 (3 to 8); it was 9, outside"),
        ("doubts of what was predicted", "a; b"),
        ("memory of learner, predicted", "1.00 GiB; at its peak 1.50"),
    }
