"""A minibatch without a token that has a part in the loss takes no optimizer step."""

import pytest
import torch
from rollouts import PlainEngine, cut_off, group, random_groups, rollout, unexplained

from learner.config.learner import LearnerConfig
from learner.update import Updater


class Momentum(PlainEngine):
    """An engine that moves at every step, also where the gradient is 0."""

    def step(self):
        norm = super().step()
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter *= 0.9
        return norm


class Critic(Momentum):
    def outputs(self, token_ids, position_ids):
        return (3 + self.forward(token_ids, position_ids).logprobs,)


def weights(engine):
    return torch.cat([tensor.detach().flatten().clone() for _, tensor in engine.weights()])


CASES = {
    "masked": (cut_off(random_groups()), {"mask_truncated": True}),
    "too old": (random_groups(), {"max_token_lag": 1}),
    "rejected": (
        random_groups(),
        {"correction": "lag_mask", "correction_options": {"max_lag": 1}},
    ),
    "not finite": (unexplained(random_groups()), {}),
    "tied": ([group("a", [rollout([1, 2, 3, 4], index=i) for i in range(2)])], {"drop_tied": True}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("minibatches", [1, 3])
def test_weights_and_schedule_stay_where_no_token_trains(case, minibatches):
    groups, settings = CASES[case]
    engine = Momentum()
    before = weights(engine)
    config = LearnerConfig(minibatches=minibatches, epochs=2, **settings)
    found = Updater(engine, config).update(groups, 5)
    assert torch.equal(weights(engine), before)
    assert engine.steps_taken == found.optimizer_steps == 0
    assert (found.loss, found.grad_norm, found.learning_rate) == (0.0, None, None)


def test_tokens_that_a_correction_rejects_take_a_step_where_the_loss_has_other_terms():
    groups, settings = CASES["rejected"]
    config = LearnerConfig(positive_nll=0.1, **settings)
    assert Updater(Momentum(), config).update(groups, 5).optimizer_steps == 1


def test_only_the_minibatches_with_a_token_take_a_step():
    groups = random_groups(count=3)
    [masked] = cut_off(groups[:1])
    found, engines = [], []
    for batch in ([masked, *groups[1:]], groups[1:]):
        engine = Momentum()
        config = LearnerConfig(mask_truncated=True, minibatches=len(batch), loss="reinforce")
        found.append(Updater(engine, config).update(batch, 5))
        engines.append(engine)
    assert [report.optimizer_steps for report in found] == [2, 2]
    assert found[0].tokens_trained == found[1].tokens_trained


@pytest.mark.parametrize("pretrain_batches", [0, 9])
def test_neither_does_a_critic_of_its_own_take_a_step(pretrain_batches):
    groups, settings = CASES["masked"]
    engine, critic = Momentum(), Critic()
    before = weights(critic)
    config = LearnerConfig(
        advantage="gae", critic={"pretrain_batches": pretrain_batches}, **settings
    )
    found = Updater(engine, config, critic=critic).update(groups, 5)
    assert torch.equal(weights(critic), before)
    assert engine.steps_taken == critic.steps_taken == 0
    assert found.critic.critic_grad_norm is None
    assert found.critic.value_loss == 0.0


def test_a_batch_of_equal_rewards_still_takes_its_step():
    groups = [group("a", [rollout([1, 2, 3, 4], reward=0.3, index=i) for i in range(2)])]
    assert Updater(PlainEngine(), LearnerConfig()).update(groups, 0).optimizer_steps == 1
