"""Rollout groups and a plain torch engine for tests of the batch, the update and the loop."""

import math
from dataclasses import replace
from datetime import UTC, datetime

import torch
from torch import nn

from learner.engine.protocol import Forward
from learner.model.logprobs import LogprobOptions, chunked_logprobs
from queues.records import FinishReason, Rollout, RolloutGroup

VOCABULARY = 11
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def rollout(
    tokens,
    *,
    prompt=2,
    reward=0.0,
    versions=0,
    logprobs=-1.0,
    mask=None,
    index=0,
    reward_parts=None,
):
    """Return a rollout of `tokens` ids after which everything but the prompt was sampled."""
    if mask is None:
        mask = [position >= prompt for position in range(len(tokens))]
    stamps = versions if isinstance(versions, list) else [versions] * sum(mask)
    scores = logprobs if isinstance(logprobs, list) else [logprobs] * sum(mask)
    stamp, score = iter(stamps), iter(scores)
    return Rollout(
        sample_index=index,
        token_ids=tokens,
        prompt_length=prompt,
        loss_mask=mask,
        behavior_logprobs=[next(score) if sampled else 0.0 for sampled in mask],
        versions=[next(stamp) if sampled else -1 for sampled in mask],
        reward=reward,
        reward_parts=reward_parts or {},
        finish_reason=FinishReason.STOP,
        turns=1,
        environment="single_turn",
        engine_id="engine-0",
        created_at=NOW,
        finished_at=NOW,
    )


def group(name, rollouts):
    return RolloutGroup(group_id=name, prompt_id=f"test/0/{name}", attempt=1, rollouts=rollouts)


def random_groups(count=3, size=4, *, seed=0, version=0):
    """Return groups of random rollouts of 4-12 tokens with rewards 0 and 1."""
    make = torch.Generator().manual_seed(seed)

    def draw(high, low=0, n=1):
        return torch.randint(low, high, (n,), generator=make).tolist()

    groups = []
    for g in range(count):
        rollouts = []
        for index in range(size):
            tokens = draw(VOCABULARY, n=draw(13, 4)[0])
            sampled = len(tokens) - 2
            scores = (-3 * torch.rand(sampled, generator=make) - 0.5).tolist()
            rollouts.append(
                rollout(
                    tokens, reward=float(draw(2)[0]), versions=version, logprobs=scores, index=index
                )
            )
        groups.append(group(f"g{g}", rollouts))
    return groups


def columns_of(item):
    """Return token ids and positions of a rollout, [N] int64."""
    return torch.tensor(list(item.token_ids)), torch.arange(len(item.token_ids))


def with_each(groups, change):
    """Return groups with the fields of each rollout that `change` makes of it."""
    return [
        replace(item, rollouts=[replace(one, **change(one)) for one in item.rollouts])
        for item in groups
    ]


def cut_off(groups):
    """Return groups whose rollouts all ended at their limit."""
    return with_each(groups, lambda _: {"finish_reason": FinishReason.LENGTH})


def unexplained(groups):
    """Return groups as sampled by a policy that excludes every token."""
    return with_each(groups, lambda one: {"behavior_logprobs": [-math.inf] * len(one.token_ids)})


class TinyPolicy(nn.Module):
    """Each token's distribution depends on a decayed sum of the embeddings before it."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.embedding = nn.Embedding(VOCABULARY, 6, dtype=dtype)
            self.head = nn.Linear(6, VOCABULARY, bias=False, dtype=dtype)

    def states(self, token_ids, position_ids):
        """Return what the head is applied to, [N, 6]."""
        embedded = self.embedding(token_ids)
        states, state = [], torch.zeros_like(embedded[0])
        for position, vector in zip(position_ids.tolist(), embedded, strict=True):
            state = vector if position == 0 else 0.5 * state + vector
            states.append(state)
        return torch.tanh(torch.stack(states))

    def forward(self, token_ids, position_ids, *, entropy_gradient=False):
        hidden = self.states(token_ids, position_ids)
        logprobs, entropy = chunked_logprobs(
            hidden[:-1],
            self.head.weight,
            token_ids[1:],
            LogprobOptions(chunk=5, entropy_gradient=entropy_gradient),
        )
        follows = position_ids[1:] > 0
        pad = nn.functional.pad
        return pad(logprobs * follows, (1, 0)), pad(entropy * follows, (1, 0))


def only(wanted, columns):
    """Return a model's log-probabilities of tokens [N], nan for those not asked for."""
    if wanted is None:
        return columns
    return tuple(torch.where(wanted, column, torch.nan) for column in columns)


class PlainEngine:
    """A `TrainEngine` of plain torch: stochastic gradient descent on a `TinyPolicy`."""

    rank, ranks, gathers = 0, 1, False
    device = torch.device("cpu")

    def __init__(self, learning_rate=0.1, dtype=torch.float64):
        self.steps_taken = 0
        self.policy = TinyPolicy(dtype)
        self.learning_rate = learning_rate
        self.gradient = None

    def forward(self, token_ids, position_ids, wanted=None):
        return Forward(*only(wanted, self.policy(token_ids, position_ids)))

    def backward(self, loss):
        loss.backward()

    def step(self):
        self.gradient = torch.cat([p.grad.flatten() for p in self.policy.parameters()])
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter -= self.learning_rate * parameter.grad
                parameter.grad = None
        self.steps_taken += 1
        return float(self.gradient.norm())

    def sum_over_ranks(self, values):
        return values

    def weights(self):
        yield from self.policy.named_parameters()

    def close(self):
        pass
