"""Training of a reward model on preference pairs, by the likelihood of Bradley and Terry.

The score of a text is the model's output after its last token. Both texts of a pair lie in one
microbatch. It runs in one process.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from learner.batch.packing import pack
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
    pairs: Iterator[Pair],
    config: RewardTrainingConfig,
    report: Callable[[Progress], None],
) -> None:
    """Train `config.steps` steps on an endless stream of pairs; call `report` after each step."""

    def loss_of_row(row: Sequence[Pair]) -> tuple[Tensor, int]:
        chosen, rejected = _scores(engine, row)
        losses = bradley_terry(chosen, rejected, margin=config.margin, centring=config.centring)
        return losses.sum(), int((chosen > rejected).sum())

    batches = iter(lambda: [*islice(pairs, config.batch_pairs)], [])
    for progress in train_rows(engine, batches, config, loss_of_row):
        report(progress)


@torch.no_grad()
def score_pairs(engine: Trainable, pairs: Sequence[Pair], capacity: int) -> Tensor:
    """Score pairs without training, in microbatches of `capacity` tokens.

    Returns:
        [2, P] float64 on the CPU: scores of the better texts, and of the worse texts.
    """
    scores = torch.empty(2, len(pairs), dtype=torch.float64)
    for indices in pack([len(pair) for pair in pairs], capacity):
        of_some = torch.stack(_scores(engine, [pairs[i] for i in indices]))
        scores[:, indices] = of_some.double().cpu()
    return scores


def _scores(engine: Trainable, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Return the scores [P] of the better and of the worse texts of pairs, with gradient."""
    texts = [text for pair in pairs for text in (pair.chosen, pair.rejected)]
    (scores,) = engine.outputs(*packed(texts))
    ends = torch.tensor([len(text) for text in texts]).cumsum(0) - 1
    last = scores[ends.to(scores.device)]
    return last[0::2], last[1::2]
