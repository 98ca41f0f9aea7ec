"""Trains a reward model on preference pairs: Bradley and Terry's likelihood on packed rows.

The score of a text is the model's output after its last token. Both texts of a pair lie in one row,
so that a row's loss needs no other row. Runs in one process, through the same engine as
reinforcement. Leaves out where pairs come from and how they are written as tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from learner.batch.packing import pack
from learner.config.reward_model import RewardTrainingConfig


class ScoreEngine(Protocol):
    """What training needs of an engine; `DeepSpeedEngine` has it."""

    def outputs(self, token_ids: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Scores [N] float32 after each token of a row, with gradient, alone in a tuple."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a scalar to what `step` will use."""
        ...

    def step(self) -> float:
        """One optimizer step; the gradient's norm before clipping."""
        ...


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts as token ids, prompts included."""

    chosen: list[int]
    rejected: list[int]

    @property
    def tokens(self) -> int:
        """Of both."""
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, slots=True)
class RewardProgress:
    """What one optimizer step did."""

    step: int
    steps: int
    loss: float
    """Mean over the pairs of the step."""
    accuracy: float
    """Share of them whose better text had the higher score, before the step."""
    tokens: int
    """Trained so far."""
    seconds: float


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, centring: float = 0.0
) -> Tensor:
    """−log σ(s_w − s_l − margin) + centring · (s_w + s_l)², for each pair.

    The likelihood is Bradley and Terry's (1952), as Christiano et al. (2017, arXiv 1706.03741) and
    Ouyang et al. (2022, arXiv 2203.02155) use it; the centring term, which fixes the free constant
    of the scores, is Eisenstein et al.'s (2023, arXiv 2312.09244).

    Args:
        chosen: s_w, [P] scores of the better texts.
        rejected: s_l, [P] scores of the worse ones.
        margin: By how much the better score should exceed the worse one.
        centring: Weight of the squared sum.

    Returns:
        [P].

    Example:
        >>> bradley_terry(torch.tensor([1.0]), torch.tensor([1.0]))
        tensor([0.6931])
    """
    likelihood = torch.nn.functional.softplus(rejected - chosen + margin)
    return likelihood + centring * (chosen + rejected) ** 2


def train_reward_model(
    engine: ScoreEngine,
    pairs: Iterator[Pair],
    config: RewardTrainingConfig,
    report: Callable[[RewardProgress], None],
) -> None:
    """Trains `config.steps` optimizer steps on an endless stream of pairs.

    Args:
        engine: Holds the model; its weights are changed.
        pairs: Consumed in order; each is used once.
        config: Sizes of a step, and the loss.
        report: Called after every step.
    """
    started, tokens = time.monotonic(), 0
    for step in range(config.steps):
        batch = [next(pairs) for _ in range(config.batch_pairs)]
        loss, accuracy = _step(engine, batch, config)
        tokens += sum(pair.tokens for pair in batch)
        report(
            RewardProgress(
                step + 1, config.steps, loss, accuracy, tokens, time.monotonic() - started
            )
        )


def _step(
    engine: ScoreEngine, batch: Sequence[Pair], config: RewardTrainingConfig
) -> tuple[float, float]:
    """One optimizer step; mean loss and accuracy over the pairs of the batch."""
    loss_sum, right = 0.0, 0
    for row in _rows(batch, config.microbatch_tokens):
        chosen, rejected = _scores(engine, row)
        losses = bradley_terry(chosen, rejected, margin=config.margin, centring=config.centring)
        loss = losses.sum() / len(batch)
        engine.backward(loss)
        loss_sum += float(loss.detach())
        right += int((chosen > rejected).sum())
    engine.step()
    return loss_sum, right / len(batch)


@torch.no_grad()
def score_pairs(engine: ScoreEngine, pairs: Sequence[Pair], capacity: int) -> Tensor:
    """Scores of pairs as they are now; nothing is trained.

    Args:
        engine: Holds the model.
        pairs: At least one.
        capacity: Tokens of a packed row.

    Returns:
        [2, P] float64 on the CPU: of the better texts, and of the worse ones.
    """
    found = torch.empty(2, len(pairs), dtype=torch.float64)
    for indices in pack([pair.tokens for pair in pairs], capacity):
        found[:, indices] = torch.stack(_scores(engine, [pairs[i] for i in indices])).double().cpu()
    return found


def _rows(batch: Sequence[Pair], capacity: int) -> Iterator[list[Pair]]:
    for indices in pack([pair.tokens for pair in batch], capacity):
        yield [batch[i] for i in indices]


def _scores(engine: ScoreEngine, row: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Scores [P] of the better and of the worse texts of a row, with gradient."""
    texts = [text for pair in row for text in (pair.chosen, pair.rejected)]
    token_ids = torch.tensor([token for text in texts for token in text])
    position_ids = torch.cat([torch.arange(len(text)) for text in texts])
    (scores,) = engine.outputs(token_ids, position_ids)
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    last = scores[ends.to(scores.device)]
    return last[0::2], last[1::2]
