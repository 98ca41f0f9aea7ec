"""A whole run that distils two teachers of other sizes, without rewards, and goes on."""

import shutil

import pytest

from tests.deploy.conftest import FinishedRun

pytestmark = [pytest.mark.ray, pytest.mark.deepspeed, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(headway, build_model):
    """Provide a run of six batches, of which the last two were trained after it was resumed."""
    form = {"characters": "0123456789+-=,abcdefghijklmnopqr", "context": 256}
    for name, width in (("narrow", 16), ("wide", 64)):  # far from uniform
        build_model(folder=headway.folder / name, hidden_size=width, initializer_range=0.3, **form)
    headway.finish(
        "distilled", "steps=4", "prompts.group_size=1", "prompts.groups_per_batch=4",
        "learner.zero_stage=3", "learner.learning_rate=1e-2",
        "learner.distillation.teachers=[{path='narrow'},{path='wide',weight=3}]",
        "learner.distillation.policy_loss=0", "learner.distillation.top_k=8",
    )  # fmt: skip
    resumed = headway("resume", "distilled", "--set", "steps=6")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    return FinishedRun(headway.run_folder("distilled"), resumed.stdout)


def test_the_loss_of_every_batch_is_the_weighted_mean_of_the_teachers_divergences(run):
    assert (run.summary["status"], run.summary["version"]) == ("done", 6)
    rows = run.rows("metrics.jsonl")
    for row in rows:
        narrow, wide = row["teacher_divergence"]["narrow"], row["teacher_divergence"]["wide"]
        assert row["policy_loss"] == 0 < min(narrow, wide)
        assert row["grad_norm"] > 0
        assert row["loss"] == pytest.approx((narrow + 3 * wide) / 4, rel=1e-4)


def test_a_replay_trains_the_same_weights_and_another_teacher_is_refused(headway, run):
    replayed = headway("replay", "distilled", "--steps", "4:6")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    shutil.copy(headway.folder / "wide/config.json", headway.folder / "narrow/config.json")
    refused = headway.call("resume", "distilled", "--set", "steps=7")
    assert refused.returncode == 2
    assert "the teacher 0 of distilled is not that of its last session" in refused.stderr
