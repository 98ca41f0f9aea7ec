"""Every preset trains the demo's task through the real loop. About a minute each."""

import json
import math

import pytest
from conftest import Headway

from deploy.presets import preset_names

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
"""Figures that only some presets have."""
FRACTIONS = {
    "reinforce": ["truncated"],
    "grpo": ["clip_low", "clip_high"],
    "dapo": ["clip_low", "clip_high"],
    "cispo": ["capped"],
    "scalerl": ["capped"],
    "gspo": ["clip_low", "clip_high", "truncated"],
    "online_dpo": ["unpaired", "misordered"],
    "raft": ["kept"],
}


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
def test_a_preset_trains_twenty_steps_with_figures_of_its_own(demo, name):
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
            assert row[figure] is None or math.isfinite(row[figure]), figure
        for fraction in FRACTIONS.get(name, []):
            assert 0 <= row["fractions"][fraction] <= 1, fraction
    assert sum(row["optimizer_steps"] for row in rows) > 0
