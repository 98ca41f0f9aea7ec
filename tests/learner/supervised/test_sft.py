"""Supervised warm start: what is learned, and that cutting into rows changes nothing."""

import pytest
import torch

from learner.config.supervised import SftConfig
from learner.engine.protocol import Forward
from learner.supervised.sft import Example, train_supervised


class TableEngine:
    """A bigram table: log-probability of a token given the one before it, by plain SGD."""

    def __init__(self, rate=1.0):
        self.table = torch.zeros(6, 6, dtype=torch.float64, requires_grad=True)
        self.rate = rate
        self.rows = []

    def forward(self, token_ids, position_ids, wanted=None):
        self.rows.append(token_ids.tolist())
        logprobs = self.table.log_softmax(-1)[token_ids[:-1], token_ids[1:]]
        follows = position_ids[1:] > 0
        padded = torch.nn.functional.pad(logprobs * follows, (1, 0))
        return Forward(padded, torch.zeros_like(padded))

    def backward(self, loss):
        loss.backward()

    def step(self):
        with torch.no_grad():
            self.table -= self.rate * self.table.grad
        norm = float(self.table.grad.norm())
        self.table.grad = None
        return norm


EXAMPLES = [
    Example([2, 3, 4, 1], [False, True, True, True]),
    Example([2, 2, 5, 1], [False, False, True, True]),
    Example([3, 4, 1], [False, False, True]),
]


def stream():
    while True:
        yield from EXAMPLES


def trained(**sizes):
    engine, reports = TableEngine(), []
    config = SftConfig(demonstrations="x", batch_tokens=16, **{"microbatch_tokens": 16, **sizes})
    train_supervised(engine, stream(), config, reports.append)
    return engine, reports


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
    example, reports = Example([2, 3, 1], [True, True, True]), []
    config = SftConfig(demonstrations="x", batch_tokens=16, microbatch_tokens=16, steps=1)
    train_supervised(TableEngine(), iter([example] * 9), config, reports.append)
    assert reports[0].loss == pytest.approx(torch.log(torch.tensor(6.0)).item())
