"""Whole runs that leave groups and prompts out of training, from the command line."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed]


def test_a_policy_without_any_success_is_filtered_up_to_the_limit_and_then_trained(headway):
    tied = headway.finish(
        "tied", "steps=2", "queues.filter_tied=true", "queues.max_filtered_batches=1",
        "actors.scripted_options={median_length = 14, length_sigma = 0.3}",
        "actors.overlong.buffer=20", "actors.greedy_baseline=true",
    )  # fmt: skip
    summary = tied.summary
    assert (summary["status"], summary["version"]) == ("done", 2)
    filtered = summary["accounting"]["dropped"]["filtered"]
    assert filtered == summary["selection"]["groups_filtered"]
    assert 2 <= filtered <= 2 * 3, "one batch's worth before each take, and after the last"
    assert summary["selection"]["groups_let_through"] >= summary["accounting"]["trained"] == 4
    assert summary["accounting"]["balanced"]
    assert f"{filtered} filtered, " in tied.output

    rows = headway.rollouts("tied")
    assert sum(row["state"] == "dropped" for row in rows) == 2 * filtered
    parts = [dict(row["reward_parts"]) for row in rows]
    assert len({row["reward"] for row in rows}) > 1, "lengths differ, and so does their punishment"
    assert {part["last_answer"] for part in parts} == {0.0}
    for row, part in zip(rows, parts, strict=True):
        assert row["reward"] == part["overlong"]
        assert -1.0 <= json.loads(row["metadata"])["baseline_reward"] <= 0.0


def test_a_run_whose_prompts_are_all_mastered_ends_early_and_well(headway):
    lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(7)]
    (headway.folder / "sums.jsonl").write_text("\n".join(lines))
    run = headway.finish(
        "mastered", "steps=50", "prompts.source=files",
        "prompts.source_options.path=sums.jsonl", "heldout.size=2", "heldout.final_size=2",
        "prompts.pass_rate_cap=1.0", "prompts.pass_threshold=0.0",
    )  # fmt: skip
    summary = run.summary
    trained = summary["accounting"]["trained"]
    assert summary["status"] == "done"
    # Prompts whose first group was still under way when the second epoch was issued come twice.
    assert 5 <= trained <= 10
    assert summary["version"] == (trained + 1) // 2
    assert summary["rollouts_trained"] == 2 * trained, "the last batch may be short"
    assert summary["selection"]["prompts_retired"] == 5
    assert "prompts mastered" in run.output
    assert headway.accounting("mastered")["balanced"]
    scored = [row["version"] for row in summary["heldout"] if row["score"] is not None]
    assert scored == list(range(0, summary["version"] + 1, 2))
