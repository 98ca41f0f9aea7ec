"""Training of reward models, on preference pairs by Bradley and Terry's likelihood, or on steps.

The score of a text, or of a step, is the model's output after its last token. Both texts of a pair
lie in one microbatch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from learner.config.supervised import RewardTrainingConfig
from learner.engine.protocol import Trainable
from learner.supervised.row_training import Progress, packed, train_rows


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts as token ids, prompts included."""

    chosen: list[int]
    rejected: list[int]

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def terms(self) -> int:
        """A pair is one term of the loss."""
        return 1


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt and the steps of a completion as token ids."""

    token_ids: list[int]
    ends: list[int]
    """Index of the last token of each step."""
    labels: list[float]
    """Probability that each step is right."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def terms(self) -> int:
        """Every step is a term of the loss."""
        return len(self.ends)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, *, margin: float = 0.0, centring: float = 0.0
) -> Tensor:
    """−log σ(s_w − s_l − margin) + centring · (s_w + s_l)², of the scores [P] of pairs.

    s_w is the score of the better text (`chosen`), s_l that of the worse. The likelihood is Bradley
    and Terry's (1952), as Christiano et al. (2017, arXiv 1706.03741) and Ouyang et al. (2022, arXiv
    2203.02155) use it; the centring term, which fixes the free constant of the scores, is
    Eisenstein et al.'s (2023, arXiv 2312.09244).

    Example:
        >>> bradley_terry(torch.tensor([1.0]), torch.tensor([1.0]))
        tensor([0.6931])
    """
    likelihood = torch.nn.functional.softplus(rejected - chosen + margin)
    return likelihood + centring * (chosen + rejected) ** 2


def train_reward_model(
    engine: Trainable,
    batches: Iterator[Sequence[Pair]],
    config: RewardTrainingConfig,
    heldout: Sequence[Pair] = (),
) -> Iterator[Progress]:
    """Train on a stream of batches of pairs; see `train_rows`."""

    def loss_of_row(row: Sequence[Pair]) -> tuple[Tensor, int]:
        chosen, rejected = _scores(engine, row)
        losses = bradley_terry(chosen, rejected, margin=config.margin, centring=config.centring)
        return losses.sum(), int((chosen > rejected).sum())

    return train_rows(engine, batches, config, loss_of_row, heldout)


def train_process_model(
    engine: Trainable,
    batches: Iterator[Sequence[Chain]],
    config: RewardTrainingConfig,
    heldout: Sequence[Chain] = (),
) -> Iterator[Progress]:
    """Train on a stream of batches of chains; see `train_rows`.

    The loss is the cross-entropy of the labels, which may be soft, with σ of the outputs after the
    last token of each step (Lightman et al. 2023, arXiv 2305.20050; with shares of right samples as
    labels, Wang et al. 2024, arXiv 2312.08935).
    """

    def loss_of_row(row: Sequence[Chain]) -> tuple[Tensor, int]:
        (outputs,) = engine.outputs(*packed([chain.token_ids for chain in row]))
        starts = accumulate((len(chain) for chain in row), initial=0)
        ends = [
            start + end for start, chain in zip(starts, row, strict=False) for end in chain.ends
        ]
        logits = outputs[torch.tensor(ends, device=outputs.device)]
        labels = logits.new_tensor([label for chain in row for label in chain.labels])
        loss = binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        return loss, int(((logits > 0) == (labels > 0.5)).sum())

    return train_rows(engine, batches, config, loss_of_row, heldout)


def _scores(engine: Trainable, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Return the scores [P] of the better and of the worse texts of pairs, with gradient."""
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    (scores,) = engine.outputs(*packed(texts))
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    last = scores[ends.to(scores.device)]
    return last[0::2], last[1::2]
