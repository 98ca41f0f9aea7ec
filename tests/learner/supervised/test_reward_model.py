"""Reward models: the loss by hand, what is learned, and that cutting into rows changes nothing."""

import itertools
import math

import pytest
import torch

from learner.config.supervised import RewardTrainingConfig
from learner.supervised.reward_model import (
    Chain,
    Pair,
    bradley_terry,
    train_process_model,
    train_reward_model,
)


def double(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def test_equal_scores_cost_the_logarithm_of_two_and_pull_by_a_half():
    chosen, rejected = double(3.0), double(3.0)
    loss = bradley_terry(chosen, rejected)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2), abs=1e-15)
    assert (chosen.grad.item(), rejected.grad.item()) == (-0.5, 0.5)


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "centring", "expected"),
    [
        (2.0, 0.5, 0.0, 0.0, math.log1p(math.exp(-1.5))),
        (0.5, 2.0, 0.0, 0.0, math.log1p(math.exp(1.5))),
        (2.0, 0.5, 1.0, 0.0, math.log1p(math.exp(-0.5))),
        (2.0, 0.5, 0.0, 0.01, math.log1p(math.exp(-1.5)) + 0.01 * 6.25),
        (-500.0, 500.0, 0.0, 0.0, 1000.0),
        (500.0, -500.0, 0.0, 0.01, 0.0),
    ],
)
def test_the_loss_is_the_formulas(chosen, rejected, margin, centring, expected):
    loss = bradley_terry(double(chosen), double(rejected), margin=margin, centring=centring)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


class SumEngine:
    """Scores a text so far by the sum of a weight for each token; plain SGD in float64."""

    rank, ranks, steps_taken = 0, 1, 0

    def __init__(self, rate=0.2):
        self.weights = torch.linspace(-0.1, 0.1, 12, dtype=torch.float64).requires_grad_()
        self.rate, self.rows = rate, []

    def outputs(self, token_ids, position_ids):
        self.rows.append(token_ids.tolist())
        starts = [*(position_ids == 0).nonzero().flatten().tolist(), len(token_ids)]
        parts = [self.weights[token_ids[a:b]].cumsum(0) for a, b in itertools.pairwise(starts)]
        return (torch.cat(parts),)

    def backward(self, loss):
        loss.backward()

    def sum_over_ranks(self, values):
        return values

    def step(self):
        with torch.no_grad():
            self.weights -= self.rate * self.weights.grad
        self.weights.grad = None
        return 0.0


PAIRS = [
    Pair([2, 3, 4, 1], [2, 5, 1]),
    Pair([6, 3, 1], [6, 5, 5, 5, 1]),
    Pair([7, 4, 3, 3, 1], [7, 1]),
]


def stream():
    while True:
        yield from PAIRS


def trained(**settings):
    engine = SumEngine()
    config = RewardTrainingConfig(
        pairs="x", **{"batch_pairs": 5, "steps": 20, "microbatch_tokens": 16, **settings}
    )
    pairs = stream()
    batches = iter(lambda: [*itertools.islice(pairs, config.batch_pairs)], [])
    return engine, [*train_reward_model(engine, batches, config)]


def test_the_loss_falls_until_every_pair_is_told_apart():
    _, reports = trained()
    assert [report.step for report in reports] == list(range(1, 21))
    assert reports[-1].loss < 0.5 * reports[0].loss
    assert reports[-1].accuracy == 1.0
    assert reports[0].tokens == sum(len(pair) for pair in [*PAIRS, *PAIRS[:2]])


def test_only_the_score_of_the_last_token_counts():
    engine, _ = trained(steps=1, centring=0.0, batch_pairs=1)
    before = SumEngine().weights.detach()
    moved = (engine.weights.detach() - before).nonzero().flatten().tolist()
    assert moved == [3, 4, 5], "what both texts have in common cancels"


@pytest.mark.parametrize("capacity", [16, 18, 30])
def test_rows_do_not_change_the_result(capacity):
    reference, expected = trained(microbatch_tokens=1024, margin=0.2)
    engine, reports = trained(microbatch_tokens=capacity, margin=0.2)
    torch.testing.assert_close(engine.weights, reference.weights, rtol=1e-12, atol=1e-12)
    assert [r.accuracy for r in reports] == [r.accuracy for r in expected]
    assert max(len(row) for row in engine.rows) <= capacity
    assert len(engine.rows) > len(reference.rows)


def test_both_texts_of_a_pair_share_a_row_even_where_it_is_too_long():
    long = [Pair(2 * pair.chosen, 3 * pair.rejected) for pair in PAIRS]
    engine, config = SumEngine(), RewardTrainingConfig(pairs="x", steps=1, microbatch_tokens=16)
    assert len([*train_reward_model(engine, iter([long]), config)]) == 1
    assert sorted(engine.rows) == sorted([*pair.chosen, *pair.rejected] for pair in long)


CHAINS = [
    Chain([2, 3, 4, 5], [1, 3], [1.0, 0.0]),
    Chain([2, 6, 7, 4, 3], [2, 4], [0.25, 0.75]),
    Chain([8, 9], [1], [1.0]),
]


@pytest.mark.parametrize("capacity", [16, 1024])
def test_the_loss_of_steps_is_the_cross_entropy_of_their_labels_after_their_last_tokens(capacity):
    engine, expected = SumEngine(rate=1.0), SumEngine().weights.detach().clone().requires_grad_()
    config = RewardTrainingConfig(pairs="x", kind="process", steps=1, microbatch_tokens=capacity)
    (progress,) = train_process_model(engine, iter([CHAINS * 2]), config, CHAINS[:1])
    terms, right = [], 0
    for chain in CHAINS:
        for end, label in zip(chain.ends, chain.labels, strict=True):
            p = torch.sigmoid(expected[chain.token_ids[: end + 1]].sum())
            terms.append(-label * p.log() - (1 - label) * (1 - p).log())
            right += bool(p > 0.5) == (label > 0.5)
    loss = torch.stack(terms).mean()
    loss.backward()
    assert progress.loss == pytest.approx(loss.item(), abs=1e-6)
    assert progress.accuracy == right / 5
    assert progress.heldout[1] != progress.loss
    torch.testing.assert_close(engine.weights, expected - expected.grad, rtol=0, atol=1e-12)
    assert (len(engine.rows) > 2) is (capacity == 16)
