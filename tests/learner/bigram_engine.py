"""An engine of supervised training without a model: a table of bigrams, by plain SGD in float64."""

from dataclasses import replace

import torch

from learner.engine.protocol import Forward
from learner.supervised.prefer import reference_scores


class BigramEngine:
    """The logits of a token are a row of the table, that of the token before it."""

    rank, ranks, steps_taken = 0, 1, 0

    def __init__(self, table=None, rate=1.0):
        table = torch.zeros(6, 6, dtype=torch.float64) if table is None else table
        self.table = table.requires_grad_()
        self.rate, self.rows = rate, []

    def forward(self, token_ids, position_ids, wanted):
        self.rows.append(token_ids.tolist())
        logprobs = self.table.log_softmax(-1)[token_ids[:-1], token_ids[1:]]
        padded = torch.nn.functional.pad(logprobs, (1, 0))
        return Forward(torch.where(wanted & (position_ids > 0), padded, 0.0), padded)

    def backward(self, loss):
        loss.backward()

    def sum_over_ranks(self, values):
        return values

    def step(self):
        with torch.no_grad():
            self.table -= self.rate * self.table.grad
        norm = float(self.table.grad.norm())
        self.table.grad = None
        return norm

    def reference_of(self, preferences):
        """Return preferences that have this table as their reference."""

        def logprobs(*columns):
            return self.forward(*columns).logprobs

        def scored(item):
            if item is None:
                return None
            reference = tuple(reference_scores(logprobs, item.texts, 16))
            return replace(item, reference=reference, unrelated=scored(item.unrelated))

        return [*map(scored, preferences)]
