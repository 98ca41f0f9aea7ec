"""Every preset trains the task of the demo in a whole run; about a minute each."""

import json
import math

import pyarrow.parquet
import pytest

from deploy.config.presets import preset_names
from queues.readers.parquet import export_parquet
from tests.deploy.conftest import Headway

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.deepspeed,
    pytest.mark.timeout(1500),
]

STEPS = 20
SMALL = (
    "sft.steps=250",
    "reward_model.steps=40",
    "heldout.size=50",
    "heldout.final_size=50",
    "heldout.every=20",
)

OWN = {
    "rloo": ["reference_kl", "kl_coefficient"],
    "grpo": ["reference_kl", "kl_coefficient"],
    "reinforce_pp": ["reference_kl"],
    "ppo_rlhf": ["reference_kl", "value_loss", "explained_variance", "critic_grad_norm"],
    "vapo": ["value_loss", "explained_variance", "critic_grad_norm"],
    "online_dpo": ["reference_kl"],
}
"""Figures that only some presets have; each is a number in at least one record."""
FRACTIONS = {
    "reinforce": ["truncated"],
    "rloo": ["truncated"],
    "remax": ["truncated"],
    "grpo": ["clip_low", "clip_high"],
    "dr_grpo": ["clip_low", "clip_high"],
    "reinforce_pp": ["clip_low", "clip_high"],
    "dapo": ["clip_low", "clip_high"],
    "cispo": ["capped"],
    "scalerl": ["capped"],
    "gspo": ["clip_low", "clip_high", "truncated"],
    "sapo": ["damped"],
    "areal": ["clip_low", "clip_high", "weight_capped"],
    "ppo_rlhf": ["clip_low", "clip_high", "truncated"],
    "vapo": ["clip_low", "clip_high"],
    "online_dpo": ["unpaired", "misordered"],
    "raft": ["kept"],
}
"""Fractions of tokens that only some presets have; each is in at least one record."""
PARTS = {"dapo": {"last_answer", "overlong"}, "ppo_rlhf": {"reward_model"}}
"""Parts of the rewards of training rollouts, where they are not the demo's."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Commands in a folder with a short warm start of the demo, and its reward models."""
    command = Headway(tmp_path_factory.mktemp("presets"))
    for made in ("sft", "reward-model"):
        result = command(made, "demo", *settings(), timeout=400)
        assert result.returncode == 0, result.stdout + result.stderr
    return command


def settings(*more):
    return [part for setting in (*SMALL, *more) for part in ("--set", setting)]


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_trains_twenty_steps_with_figures_of_its_own(demo, name, tmp_path):
    result = demo("run", name, *settings(f"steps={STEPS}"), timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = demo.folder / "runs" / name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    assert [row["version"] for row in rows] == list(range(STEPS))
    assert summary["status"] == "done"
    assert summary["accounting"]["balanced"]
    assert summary["max_lag_trained"] <= summary["max_staleness"]
    for row in rows:
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] is None or math.isfinite(row["grad_norm"])
        assert 0 < row["ess"] <= 1
    for figure in OWN.get(name, []):
        found = numbers(row[figure] for row in rows)
        assert found, figure
        assert all(map(math.isfinite, found)), figure
    for fraction in FRACTIONS.get(name, []):
        found = numbers(row["fractions"].get(fraction) for row in rows)
        assert found, fraction
        assert all(0 <= share <= 1 for share in found), fraction
    assert sum(row["optimizer_steps"] for row in rows) > 0
    check_rollouts(name, trained_rollouts(folder, tmp_path / "rollouts.parquet"))


def numbers(values):
    return [value for value in values if value is not None]


def trained_rollouts(folder, file):
    """Return every trained rollout in the journal of a run."""
    export_parquet(folder, file)
    columns = ["group_id", "reward_parts", "metadata", "state"]
    rows = pyarrow.parquet.read_table(file, columns=columns).to_pylist()
    return [row for row in rows if row["state"] == "trained"]


def check_rollouts(name, rollouts):
    """Check rewards and baselines of a preset's rollouts in the journal."""
    assert rollouts
    parts = PARTS.get(name, {"last_answer"})
    assert all({part for part, _ in row["reward_parts"]} == parts for row in rollouts)
    baselines = {}
    for row in rollouts:
        baseline = json.loads(row["metadata"]).get("baseline_reward")
        assert (baseline is not None) is (name == "remax")
        baselines.setdefault(row["group_id"], set()).add(baseline)
    assert all(len(found) == 1 for found in baselines.values()), "one for each group"
