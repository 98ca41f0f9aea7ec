"""On-policy distillation on the demo: a student reaches its teacher's score in fewer samples."""

import json
import subprocess
from statistics import fmean

import pytest

from tests.deploy.conftest import HEADWAY, run_demo

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(4 * 3600)]

SMOOTHED = 4
"""Batches whose rewards are averaged: 512 rollouts on prompts that were never trained before."""


def samples_until(target, rows):
    """Return the rollouts trained until the rewards of the next batches have reached a target."""
    rewards = [row["reward_mean"] for row in rows]
    means = [fmean(rewards[at : at + SMOOTHED]) for at in range(len(rewards) - SMOOTHED + 1)]
    first = next((at for at, mean in enumerate(means) if mean >= target), len(rows))
    return sum(row["rollouts_trained"] for row in rows[:first])


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
    settings = (f"seed={seed}", "preset=grpo", "steps=40", teachers)
    code, output, rows = run_demo(demo_folder, f"student-{seed}", *settings)
    assert code == 0, output
    taught, reinforcing = samples_until(target, rows), samples_until(target, alone[seed])
    print(json.dumps({"seed": seed, "target": target, "taught": taught, "grpo": reinforcing}))
    assert taught < reinforcing
