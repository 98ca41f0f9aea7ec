"""Supervised warm start: next-token likelihood of demonstrations, in one process.

A demonstration comes as token ids; text becomes ids where rollouts are rendered.
"""

from collections.abc import Callable, Iterator, Sequence
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


def train_supervised(
    engine: TrainEngine,
    examples: Iterator[Example],
    config: SftConfig,
    report: Callable[[Progress], None],
) -> None:
    """Train `config.steps` steps on endless examples; call `report` after each step."""

    def mean_loss(row: Sequence[Example], batch: Sequence[Example]) -> tuple[Tensor, None]:
        """Return the part of a row in the mean over all learned tokens of the batch."""
        learned_tokens = max(1, sum(sum(example.loss_mask[1:]) for example in batch))
        token_ids, position_ids = packed([example.token_ids for example in row])
        learned = torch.tensor(list(chain.from_iterable(example.loss_mask for example in row)))
        learned &= position_ids > 0
        logprobs = engine.forward(token_ids, position_ids, learned).logprobs
        return -logprobs[learned.to(logprobs.device)].sum() / learned_tokens, None

    train_rows(engine, _batches(examples, config.batch_tokens), config, mean_loss, report)


def _batches(examples: Iterator[Example], tokens: int) -> Iterator[list[Example]]:
    """Yield batches of at least so many tokens."""
    batch: list[Example] = []
    for example in examples:
        batch.append(example)
        if sum(len(example) for example in batch) >= tokens:
            yield batch
            batch = []
