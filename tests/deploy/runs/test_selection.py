"""A whole run that leaves prompts out of training, from the command line."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.deepspeed]


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
