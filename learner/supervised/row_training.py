"""The loop of supervised training: batches, shared out over ranks and cut into packed rows.

batch ─▶ rows of this rank, at most `microbatch_tokens` ─▶ loss, backward ─▶ step ─▶ report
"""

import time
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from learner.batch.microbatch_plan import plan_microbatches
from learner.config.supervised import RewardTrainingConfig, StageConfig
from learner.engine.protocol import Trainable


class Trained(Sized, Protocol):
    """A text, or several that lie in one row; its length is in tokens."""

    @property
    def terms(self) -> int:
        """Terms that it has in the mean loss of a batch: learned tokens, steps, or 1 as a pair."""


Item = TypeVar("Item", bound=Trained)
LossOfRow = Callable[[list[Item]], tuple[Tensor, int | None]]
"""Function of the items of a row. It returns the sum of the terms of their loss, and how many terms
are told right, if that is counted."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress after one optimizer step."""

    step: int
    loss: float
    """Mean over the learned tokens, in nats, or over what a reward model learns from."""
    tokens: int
    """Tokens trained since the loop began, prompts included."""
    seconds: float
    accuracy: float | None = None
    """Share of pairs whose better text had the higher score before the step, or of the steps of
    completions that were told right."""
    heldout: tuple[int, float] | None = None
    """Step after which the loss of what is never trained was last measured, and its mean."""
    heldout_accuracy: float | None = None
    """Accuracy that was measured with it."""
    lost_to_rounding: float | None = None
    """Share of an adapter's changes that is lost in the model; None where not measured."""

    @property
    def text(self) -> str:
        """The figures, for a line of progress."""
        accuracy = [] if self.accuracy is None else [f"accuracy {self.accuracy:.2f}"]
        heldout = [] if self.heldout is None else [f"held out {self.heldout[1]:.4f}"]
        if self.heldout_accuracy is not None:
            heldout.append(f"accuracy {self.heldout_accuracy:.2f}")
        speed = f"{self.tokens / self.seconds:,.0f} tokens/s"
        return " · ".join([f"loss {self.loss:.4f}", *accuracy, *heldout, speed])


def train_rows(
    engine: Trainable,
    batches: Iterator[Sequence[Item]],
    config: StageConfig | RewardTrainingConfig,
    loss_of_row: LossOfRow[Item],
    heldout: Sequence[Item] = (),
    prepare: Callable[[Sequence[Item]], Sequence[Item]] = lambda batch: batch,
) -> Iterator[Progress]:
    """Train up to step `config.steps` on a stream of batches; yield after each step. Collective.

    Every rank is given the same batches. The loss of `heldout` is measured every
    `config.eval_every` steps, if it is given, and after the last one. `prepare` is called with each
    batch, and with the held-out one, before its loss, for what depends on the whole batch.
    """
    started, tokens, done = time.monotonic(), 0, engine.steps_taken
    every = config.eval_every if isinstance(config, StageConfig) else None
    measured, kept_accuracy = None, None
    for step, batch in enumerate(islice(batches, config.steps - done), done + 1):
        capacity = config.microbatch_tokens
        loss, accuracy = mean_loss(engine, prepare(batch), capacity, loss_of_row)
        engine.step()
        tokens += sum(len(item) for item in batch)
        if heldout and (step == config.steps or step % (every or config.steps) == 0):
            with torch.no_grad():
                value, kept_accuracy = mean_loss(engine, prepare(heldout), capacity, loss_of_row)
            measured = step, value
        seconds = time.monotonic() - started
        yield Progress(step, loss, tokens, seconds, accuracy, measured, kept_accuracy)


def mean_loss(
    engine: Trainable, batch: Sequence[Item], capacity: int, loss_of_row: LossOfRow[Item]
) -> tuple[float, float | None]:
    """Return loss and accuracy of a batch over all ranks; backward where gradients are enabled."""
    sizes = [len(item) for item in batch]
    shortest, terms = sizes.index(min(sizes)), max(1, sum(item.terms for item in batch))
    sums, counts_right = torch.zeros(2, dtype=torch.float64), False
    for indices in plan_microbatches(sizes, engine.ranks, capacity)[engine.rank]:
        # Every rank enters the same collectives: one with less to do has a row that counts nothing.
        loss, right_of_row = loss_of_row([batch[i] for i in indices or [shortest]])
        share = loss / terms if indices else loss * 0
        if torch.is_grad_enabled():
            engine.backward(share)
        counts_right = right_of_row is not None
        sums += sums.new_tensor([float(share.detach()), right_of_row or 0 if indices else 0])
    total, right = engine.sum_over_ranks(sums).tolist()
    return total, right / terms if counts_right else None


def packed(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids and positions [N] int64 of texts in one row."""
    positions = [torch.arange(len(text)) for text in texts]
    return torch.tensor(list(chain.from_iterable(texts))), torch.cat(positions)
