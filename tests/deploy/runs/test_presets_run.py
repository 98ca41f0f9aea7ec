"""Every preset trains with figures of its own; two of them train the demo in whole runs."""

import json
import math
from dataclasses import replace

import pyarrow.parquet
import pytest
import torch
from torch import nn

from deploy.config.loader import load_recipe, preset_names
from learner.update import Updater
from queues.readers.parquet import export_parquet
from tests.deploy.conftest import Headway
from tests.learner.rollouts import VOCABULARY, PlainEngine, random_groups

STEPS = 20
SMALL = (
    "sft.steps=250", "reward_model.steps=40", "heldout.size=50", "heldout.final_size=50",
    "heldout.every=20",
)  # fmt: skip

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
    **dict.fromkeys(("reinforce", "rloo", "remax"), ("truncated",)),
    **dict.fromkeys(("grpo", "dr_grpo", "reinforce_pp", "dapo", "vapo"), ("clip_low", "clip_high")),
    **dict.fromkeys(("gspo", "ppo_rlhf"), ("clip_low", "clip_high", "truncated")),
    **dict.fromkeys(("cispo", "scalerl"), ("capped",)),
    "sapo": ("damped",),
    "areal": ("clip_low", "clip_high", "weight_capped"),
    "online_dpo": ("unpaired", "misordered"),
    "raft": ("kept",),
}
"""Fractions of tokens that only some presets have; each is in at least one record."""
PARTS = {"ppo_rlhf": {"reward_model"}}
"""Parts of the rewards of training rollouts, where they are not the demo's."""


class PlainCritic(PlainEngine):
    """A critic of plain torch: the value of a state is that of its last token."""

    def __init__(self):
        super().__init__()
        self.policy = nn.Embedding(VOCABULARY, 1, dtype=torch.float64)

    def outputs(self, token_ids, position_ids):
        return (self.policy(token_ids)[:, 0].float(),)


class PlainReference(PlainEngine):
    """A `Reference` whose weights are not those of the policy."""

    @torch.no_grad()
    def logprobs(self, token_ids, position_ids, wanted):
        return 0.9 * self.forward(token_ids, position_ids, wanted).logprobs


def numbers(values):
    return [value for value in values if value is not None]


def check_figures(name, rows):
    """Check the figures of the batches of a preset, those that it alone has among them."""
    for row in rows:
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] is None or math.isfinite(row["grad_norm"])
        assert 0 < row["ess"] <= 1
    for figure in OWN.get(name, []):
        values = numbers(row[figure] for row in rows)
        assert values, figure
        assert all(map(math.isfinite, values)), figure
    for fraction in FRACTIONS.get(name, []):
        shares = numbers(row["fractions"].get(fraction) for row in rows)
        assert shares, fraction
        assert all(0 <= share <= 1 for share in shares), fraction
    assert sum(row["optimizer_steps"] for row in rows) > 0


@pytest.mark.parametrize("name", preset_names())
def test_updates_under_a_preset_have_figures_of_its_own(name):
    learner = load_recipe(name).objective
    critic = PlainCritic() if learner.critic is not None and not learner.critic.shared else None
    reference = PlainReference() if learner.holds_reference else None
    updater = Updater(PlainEngine(0.01), learner, critic=critic, reference=reference)
    reports = []
    for version in range(7):  # a critic is trained alone for five batches
        groups = random_groups(seed=version, version=version)
        if name == "remax":
            groups = [
                replace(group, rollouts=[replace(r, baseline_reward=0.5) for r in group.rollouts])
                for group in groups
            ]
        reports.append(updater.update(groups, version).to_dict())
    check_figures(name, reports)


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


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.deepspeed
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ["ppo_rlhf", "remax"])
def test_a_preset_trains_twenty_steps_of_the_demo(demo, name, tmp_path):
    """Between them: critic, reward model, KL in the reward, minibatches, greedy baseline."""
    result = demo("run", name, *settings(f"steps={STEPS}"), timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    folder = demo.folder / "runs" / name
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    assert [row["version"] for row in rows] == list(range(STEPS))
    assert summary["status"] == "done"
    assert summary["accounting"]["balanced"]
    assert summary["max_lag_trained"] <= summary["max_staleness"]
    check_figures(name, rows)
    check_rollouts(name, trained_rollouts(folder, tmp_path / "rollouts.parquet"))


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
    assert all(len(rewards) == 1 for rewards in baselines.values()), "one for each group"
