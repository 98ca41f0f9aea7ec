"""The loop of supervised training in one process: batches of texts, cut into packed rows.

batch ─▶ rows of at most `microbatch_tokens` ─▶ loss of each row, backward ─▶ step ─▶ report
"""

import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import torch
from torch import Tensor

from learner.batch.packing import pack
from learner.config.supervised import RewardTrainingConfig, SftConfig
from learner.engine.protocol import Trainable

Item = TypeVar("Item", bound=Sized)
"""A text, or several that lie in one row; its length is in tokens."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress after one optimizer step."""

    step: int
    loss: float
    """Mean over the learned tokens, in nats, or over the pairs of the step."""
    tokens: int
    """Tokens trained so far, prompts included."""
    seconds: float
    accuracy: float | None = None
    """Share of pairs whose better text had the higher score before the step."""


def train_rows(
    engine: Trainable,
    batches: Iterator[Sequence[Item]],
    config: SftConfig | RewardTrainingConfig,
    loss_of_row: Callable[[list[Item], Sequence[Item]], tuple[Tensor, int | None]],
    report: Callable[[Progress], None],
) -> None:
    """Train `config.steps` steps on an endless stream of batches; call `report` after each step.

    `loss_of_row` is given the items of a row and those of its whole batch, over which the losses
    are summed. With its loss it returns how many pairs have the higher score for the better text.
    """
    started, tokens = time.monotonic(), 0
    for step, batch in enumerate(islice(batches, config.steps), 1):
        sizes, total, right = [len(item) for item in batch], 0.0, list[int]()
        for indices in pack(sizes, config.microbatch_tokens):
            loss, row_right = loss_of_row([batch[i] for i in indices], batch)
            engine.backward(loss)
            total += float(loss.detach())
            right += [] if row_right is None else [row_right]
        engine.step()
        tokens += sum(sizes)
        accuracy, seconds = sum(right) / len(batch) if right else None, time.monotonic() - started
        report(Progress(step, total, tokens, seconds, accuracy))


def packed(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids and positions [N] int64 of texts in one row."""
    positions = [torch.arange(len(text)) for text in texts]
    return torch.tensor(list(chain.from_iterable(texts))), torch.cat(positions)
