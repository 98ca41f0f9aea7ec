"""On-policy distillation on the demo: a student reaches its teacher's score in fewer samples."""

import json
import subprocess
from statistics import fmean

import pytest

from tests.deploy.conftest import HEADWAY, run_demo

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(4 * 3600)]

SMOOTHED = 512
"""Rollouts whose rewards are averaged, on prompts that were never trained before."""


def samples_until(target, rows):
    """Return the rollouts trained until the mean reward of the next ones has reached a target."""
    of_batch = rows[0]["rollouts_trained"]
    count, rewards = SMOOTHED // of_batch, [row["reward_mean"] for row in rows]
    means = (fmean(rewards[at : at + count]) for at in range(len(rewards) - count + 1))
    return next(at * of_batch for at, mean in enumerate(means) if mean >= target)


@pytest.fixture(scope="module")
def reinforced(demo_folder):
    """Return the batches of GRPO alone, by seed, and the teacher: the model of the first seed."""
    rows = {}
    for seed in range(3):
        settings = (f"seed={seed}", "preset=grpo")
        code, output, rows[seed] = run_demo(demo_folder, f"grpo-{seed}", *settings)
        assert code == 0, output
    teacher = demo_folder / "teacher"
    export = [HEADWAY, "export", "runs/grpo-0", "--to", teacher]
    subprocess.run(export, cwd=demo_folder, check=True)
    return rows, teacher


@pytest.mark.parametrize("seed", range(3))
def test_a_student_reaches_its_teacher_in_fewer_samples_than_by_grpo(demo_folder, reinforced, seed):
    alone, teacher = reinforced
    target = 0.95 * fmean(row["reward_mean"] for row in alone[0][-8:])
    teachers = f'learner.distillation={{ teachers = [{{ path = "{teacher}" }}], policy_loss = 0 }}'
    settings = (f"seed={seed}", "preset=grpo", "steps=60", teachers)
    # What a teacher says of every token is less noisy than a reward of the whole: smaller batches.
    smaller = ("prompts.group_size=2", "learner.learning_rate=5e-4")
    code, output, rows = run_demo(demo_folder, f"student-{seed}", *settings, *smaller)
    assert code == 0, output
    taught, reinforcing = samples_until(target, rows), samples_until(target, alone[seed])
    print(json.dumps({"seed": seed, "target": target, "taught": taught, "grpo": reinforcing}))
    assert taught < reinforcing
