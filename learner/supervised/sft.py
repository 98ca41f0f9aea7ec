"""Supervised warm start: next-token likelihood of demonstrations.

A demonstration comes as token ids; text becomes ids where rollouts are rendered.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from learner.config.supervised import SftConfig
from learner.engine.protocol import TrainEngine
from learner.supervised.row_training import Progress, packed, train_rows


@dataclass(frozen=True, slots=True)
class Example:
    """A demonstration as token ids."""

    token_ids: list[int]
    loss_mask: list[bool]
    """True for the tokens that are learned; the first never is, for nothing predicts it."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def terms(self) -> int:
        """Tokens that are learned."""
        return sum(self.loss_mask[1:])


def train_supervised(
    engine: TrainEngine,
    batches: Iterator[Sequence[Example]],
    config: SftConfig,
    heldout: Sequence[Example] = (),
) -> Iterator[Progress]:
    """Train on a stream of `batches_of` examples; see `train_rows`."""

    def loss_of_row(row: Sequence[Example]) -> tuple[Tensor, None]:
        token_ids, position_ids = packed([example.token_ids for example in row])
        learned = torch.tensor(list(chain.from_iterable(example.loss_mask for example in row)))
        learned &= position_ids > 0
        logprobs = engine.forward(token_ids, position_ids, learned).logprobs
        return -logprobs[learned.to(logprobs.device)].sum(), None

    return train_rows(engine, batches, config, loss_of_row, heldout)


def batches_of(examples: Iterator[Example], tokens: int) -> Iterator[list[Example]]:
    """Yield batches of at least so many tokens."""
    batch, count = list[Example](), 0
    for example in examples:
        batch.append(example)
        count += len(example)
        if count >= tokens:
            yield batch
            batch, count = [], 0
