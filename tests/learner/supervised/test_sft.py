"""Supervised warm start: what is learned, and that cutting into rows changes nothing."""

import pytest
import torch

from learner.config.supervised import SftConfig
from learner.supervised.sft import Example, batches_of, train_supervised
from tests.learner.bigram_engine import BigramEngine

EXAMPLES = [
    Example([2, 3, 4, 1], [False, True, True, True]),
    Example([2, 2, 5, 1], [False, False, True, True]),
    Example([3, 4, 1], [False, False, True]),
]


def stream():
    while True:
        yield from EXAMPLES


def trained(kept=(), **sizes):
    engine = BigramEngine()
    config = SftConfig(demonstrations="x", batch_tokens=16, **{"microbatch_tokens": 16, **sizes})
    return engine, list(train_supervised(engine, batches_of(stream(), 16), config, kept))


def test_the_loss_falls_and_progress_counts_tokens():
    _, reports = trained(steps=30)
    assert [r.step for r in reports] == list(range(1, 31))
    assert reports[0].loss == pytest.approx(torch.log(torch.tensor(6.0)).item())
    assert reports[-1].loss < 0.5
    assert reports[1].tokens == 37


def test_prompts_are_context_and_never_trained():
    engine, _ = trained(steps=1)
    gradient_free = engine.table[2].detach()
    assert gradient_free[2] < 0, "only pushed down by the softmax of what was trained"
    changed = (engine.table.detach() > 0).nonzero().tolist()
    assert changed == [[2, 3], [2, 5], [3, 4], [4, 1], [5, 1]]


@pytest.mark.parametrize("capacity", [16, 18, 64])
def test_rows_do_not_change_the_result(capacity):
    reference, _ = trained(steps=5, microbatch_tokens=1024)
    engine, _ = trained(steps=5, microbatch_tokens=capacity)
    torch.testing.assert_close(engine.table, reference.table, rtol=1e-12, atol=1e-12)
    assert max(len(row) for row in engine.rows) <= capacity


def test_the_first_token_of_an_empty_prompt_is_not_learned_and_not_counted():
    """Nothing predicts it: it has no log-probability."""
    example = Example([2, 3, 1], [True, True, True])
    config = SftConfig(demonstrations="x", batch_tokens=16, microbatch_tokens=16, steps=1)
    batches = batches_of(iter([example] * 9), 16)
    [progress] = train_supervised(BigramEngine(), batches, config)
    assert progress.loss == pytest.approx(torch.log(torch.tensor(6.0)).item())


def test_the_heldout_loss_is_measured_when_due_and_trains_nothing():
    plain, _ = trained(steps=5)
    engine, reports = trained(EXAMPLES, steps=5, eval_every=2, heldout=3)
    torch.testing.assert_close(engine.table, plain.table, rtol=0, atol=0)
    assert [r.heldout and r.heldout[0] for r in reports] == [None, 2, 2, 4, 5]
    logprobs = engine.table.detach().log_softmax(-1)
    learned = [(2, 3), (3, 4), (4, 1), (2, 5), (5, 1), (4, 1)]
    mean = -sum(logprobs[pair].item() for pair in learned) / len(learned)
    assert reports[-1].heldout[1] == pytest.approx(mean)
    assert f"held out {mean:.4f}" in reports[-1].text


class RankEngine(BigramEngine):
    """One of two ranks that run one after the other, each to its own share of the sums."""

    ranks = 2

    def __init__(self, rank):
        super().__init__()
        self.rank, self.sums = rank, []

    def sum_over_ranks(self, values):
        self.sums.append(values)
        return values


def test_ranks_share_a_batch_and_their_sums_are_those_of_one():
    alone = BigramEngine()
    ranks = [RankEngine(0), RankEngine(1)]
    config = SftConfig(demonstrations="x", batch_tokens=16, microbatch_tokens=16, steps=1)
    for engine in (alone, *ranks):
        engine.step = lambda: 0.0  # the gradients stay
        list(train_supervised(engine, batches_of(stream(), 16), config))
    shares = [sum(map(len, engine.rows)) for engine in ranks]
    assert max(shares) <= 11, "of 15 or more tokens"
    torch.testing.assert_close(ranks[0].table.grad + ranks[1].table.grad, alone.table.grad)
    total = sum(engine.sums[0][0].item() for engine in ranks)
    assert total == pytest.approx(torch.log(torch.tensor(6.0)).item())


def test_a_rank_without_an_item_takes_part_and_adds_nothing():
    engine = RankEngine(1)
    engine.step = lambda: 0.0
    config = SftConfig(demonstrations="x", batch_tokens=16, microbatch_tokens=16, steps=1)
    list(train_supervised(engine, iter([EXAMPLES[:1]]), config))
    assert engine.sums[0].tolist() == [0.0, 0.0]
    assert not engine.table.grad.any()
