"""Process reward models where steps can be checked: what they find, and what they teach."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.storage.run_directory import RunDirectory
from tests.deploy.conftest import HEADWAY

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.vllm, pytest.mark.deepspeed]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a policy that errs in one of five steps, and a reward model of steps."""
    made = tmp_path_factory.mktemp("doubles")
    shutil.copytree(Path(__file__).parent / "doubles", made, dirs_exist_ok=True)
    for command in ("sft", "reward-model"):
        subprocess.run([HEADWAY, command, "doubles.toml"], cwd=made, check=True)
    return made


def test_the_faulty_step_is_found_in_nine_of_ten_held_out_completions(folder):
    report = json.loads((folder / "runs/doubles-rm/reward_model.json").read_text())
    assert report["members"][0]["heldout_faults_found"] >= 0.9


def test_a_policy_rewarded_for_each_step_solves_more_held_out_problems(folder):
    subprocess.run([HEADWAY, "run", "doubles.toml"], cwd=folder, check=True)
    before, after = RunDirectory(folder / "runs/doubles").summary()["heldout_sampled"]
    assert after["score"] > before["score"] + 0.1
