"""A rollout that was cut off goes on with the critic's value of the state after its last token."""

import dataclasses

import pytest
import torch
from rollouts import PlainEngine, group, rollout

from learner.config.learner import LearnerConfig
from learner.engine.protocol import Forward
from learner.update import Updater
from queues.records import FinishReason

ROLLOUTS = [
    dataclasses.replace(rollout([3, 4, 5, 6], reward=1.0), finish_reason=FinishReason.LENGTH),
    rollout([3, 4, 7], reward=0.5, index=1),
    dataclasses.replace(
        rollout([3, 4, 8, 2], reward=0.0, index=2, mask=[False, False, True, False]),
        finish_reason=FinishReason.LENGTH,
    ),
]
GAMMA, LAM = 0.9, 0.7


def value_after(token_ids):
    return token_ids.double() / 10


def value_before(token_ids, position_ids):
    values = torch.nn.functional.pad(value_after(token_ids)[:-1], (1, 0))
    return torch.where(position_ids > 0, values, 0.0)


class Critic(PlainEngine):
    """A critic whose value is a tenth of the newest token."""

    def outputs(self, token_ids, position_ids):
        return (value_after(token_ids) + 0 * self.forward(token_ids, position_ids).logprobs,)


class Shared(PlainEngine):
    """A policy with the same critic on its backbone."""

    bootstraps = True

    def forward(self, token_ids, position_ids, wanted=None):
        out = super().forward(token_ids, position_ids, wanted)
        after = value_after(token_ids) if self.bootstraps else None
        return Forward(*out[:2], value_before(token_ids, position_ids), after)


def returns(bootstrap):
    """Compute the returns of sampled tokens by hand, rollout by rollout from the end."""
    found = []
    for one in ROLLOUTS:
        ids, cut = one.token_ids, one.finish_reason is FinishReason.LENGTH
        following = ids[-1] / 10 if bootstrap and cut else 0.0
        reward, running, of_rollout = one.reward, 0.0, []
        for at in reversed(range(len(ids))):
            if one.loss_mask[at]:
                value = ids[at - 1] / 10
                running = reward + GAMMA * following - value + GAMMA * LAM * running
                of_rollout.append(running + value)
                following, reward = value, 0.0
        found += reversed(of_rollout)
    return found


@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("microbatch_tokens", [16, 10_000])
def test_returns_are_those_of_the_formula(bootstrap, shared, microbatch_tokens):
    options = {"gamma": GAMMA, "lam": LAM, "bootstrap_truncated": bootstrap, "whiten": False}
    config = LearnerConfig(
        advantage="gae",
        advantage_options=options,
        critic={"shared": shared},
        microbatch_tokens=microbatch_tokens,
    )
    engine = Shared() if shared else PlainEngine()
    engine.bootstraps = bootstrap
    updater = Updater(engine, config, critic=None if shared else Critic())
    seen = []
    compute = updater.objective.with_advantages

    def kept(batch):
        seen.append(compute(batch))
        return seen[-1]

    updater.objective.with_advantages = kept
    updater.update([group("a", ROLLOUTS)], 0)
    sampled = seen[0].tokens.mask
    assert seen[0].advantages.returns[sampled].tolist() == pytest.approx(returns(bootstrap))
