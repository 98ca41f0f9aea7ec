"""Offline preferences: DPO, IPO, KTO, ORPO and SimPO.

The reference scores texts once, before training. KTO's KL term is that of TRL: every judged
completion comes with one unrelated text, its prompt with the completion of another, and the term is
the mean of their log-ratios over the batch, at least 0, without gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from headway.options import check_options
from learner.batch.packing import pack
from learner.config.supervised import PreferConfig
from learner.engine.protocol import TrainEngine
from learner.losses.loss_inputs import Segments
from learner.losses.preferences import PREFERENCE_LOSSES, PreferenceLoss
from learner.supervised.row_training import Progress, mean_loss, packed, train_rows
from learner.supervised.sft import Example

Logprobs = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of token ids, positions and the wanted tokens [N] of a row: log-probabilities [N], 0
where they are not wanted."""


@dataclass(frozen=True, slots=True)
class Preference:
    """A better and a worse text of a prompt; or one text with a label, for KTO."""

    texts: tuple[Example, ...]
    """The better one first."""
    reference: tuple[float, ...] = ()
    """Log-probabilities of their completions under the reference, if the loss needs them."""
    desirable: bool = True
    """The label of a single text."""
    unrelated: "Preference | None" = None
    """For KTO: the prompt with the completion of another one."""
    of_batch: float = 0.0
    """KTO's KL term of its batch; for ORPO, the mean tokens of a better text in it."""

    def __len__(self) -> int:
        return sum(map(len, self.texts))

    @property
    def terms(self) -> int:
        """It is one term of the loss."""
        return 1


def check_loss(config: PreferConfig) -> PreferenceLoss:
    """Return the loss of a section; raise InputError for options that it does not have."""
    loss, options = PREFERENCE_LOSSES[config.loss], config.loss_options
    setting = "prefer.loss_options"
    check_options(loss.function, *loss.inputs, setting=setting, name=config.loss, options=options)
    return loss


def train_preferences(
    engine: TrainEngine,
    batches: Iterator[Sequence[Preference]],
    config: PreferConfig,
    heldout: Sequence[Preference] = (),
) -> Iterator[Progress]:
    """Train on a stream of batches; see `train_rows`. Accuracy is the share of positive margins.

    A margin is the value of the better text minus that of the worse; for KTO, the log-ratio of a
    desirable text minus the KL term, and the reverse of the others.
    """
    loss, options = check_loss(config), config.loss_options

    def values(row: Sequence[Preference]) -> tuple[Tensor, Tensor]:
        """Return what the loss takes of each text, and log-probabilities of whole texts, [T]."""
        texts = [text for item in row for text in item.texts]
        sums, whole = text_sums(
            lambda *columns: engine.forward(*columns).logprobs, texts, whole=loss.likelihood
        )
        if loss.referenced:
            sums = sums - sums.new_tensor([value for item in row for value in item.reference])
        if loss.mean:
            sums = sums / sums.new_tensor([text.terms for text in texts])
        return sums, whole

    def log_ratios(row: Sequence[Preference]) -> tuple[Tensor, None]:
        return values(row)[0].sum(), None

    def prepared(batch: Sequence[Preference]) -> Sequence[Preference]:
        """Give the items of a batch what their loss takes of all of it, as the policy is now."""
        of_batch = sum(len(item.texts[0]) - 1 for item in batch) / len(batch)
        if unrelated := [item.unrelated for item in batch if item.unrelated is not None]:
            with torch.no_grad():
                kl, _ = mean_loss(engine, unrelated, config.microbatch_tokens, log_ratios)
            of_batch = max(0.0, kl)
        return [replace(item, of_batch=of_batch) for item in batch]

    def loss_of_row(row: Sequence[Preference]) -> tuple[Tensor, int]:
        """Return the sum of the losses of a row, and its positive margins."""
        sums, whole = values(row)
        of_batch = sums.new_tensor([item.of_batch for item in row])
        if config.loss == "kto":
            desirable = torch.tensor([item.desirable for item in row], device=sums.device)
            margins = torch.where(desirable, sums - of_batch, of_batch - sums)
            losses = loss.function(margins, desirable, **options)
        else:
            margins = sums[0::2] - sums[1::2]
            losses = loss.function(sums[0::2], sums[1::2], **options)
        if loss.likelihood:
            losses = losses - whole[0::2] / of_batch
        return losses.sum(), int((margins > 0).sum())

    return train_rows(engine, batches, config, loss_of_row, heldout, prepare=prepared)


def text_sums(
    logprobs: Logprobs, texts: Sequence[Example], *, whole: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [T] float64 of texts in one row.

    Those of their completions, and, if they are computed as a `whole`, of all their tokens.
    """
    token_ids, position_ids = packed([text.token_ids for text in texts])
    said = torch.tensor([*chain.from_iterable(text.loss_mask for text in texts)])
    predicted = position_ids > 0
    of_tokens = logprobs(token_ids, position_ids, predicted if whole else said & predicted)
    segments = Segments((position_ids == 0).cumsum(0).to(of_tokens.device))
    completions = torch.where(said.to(of_tokens.device), of_tokens, 0.0)
    return segments.sums(completions), segments.sums(of_tokens)


@torch.no_grad()
def reference_scores(logprobs: Logprobs, texts: Sequence[Example], capacity: int) -> list[float]:
    """Return log-probabilities of completions, in microbatches of `capacity` tokens."""
    scores = torch.empty(len(texts), dtype=torch.float64)
    for indices in pack([len(text) for text in texts], capacity):
        scores[indices] = text_sums(logprobs, [texts[i] for i in indices])[0].cpu()
    return [*map(float, scores)]


def unrelated_text(own: Example, other: Example, context: int) -> Example:
    """Return the prompt of one text with the completion of another, cut at `context` tokens."""
    start, end = own.loss_mask.index(True), other.loss_mask.index(True)
    ids = [*own.token_ids[:start], *other.token_ids[end:]]
    mask = [*own.loss_mask[:start], *other.loss_mask[end:]]
    return Example(ids[:context], mask[:context])
