"""DPO on pairs sampled online, and IPO.

Rafailov et al. 2023 (arXiv 2305.18290, eq. 7); label smoothing: cDPO; online: OAIF (arXiv
2402.04792); IPO: Azar et al. 2023 (arXiv 2310.12036). A pair is a group of two rollouts.
"""

from typing import Literal

import torch
from torch import Tensor

from headway.errors import InputError
from learner.losses.loss_inputs import LossInputs, Segments, TokenLoss
from learner.losses.preferences import Beta, Smoothing, logistic, squared


def dpo(
    inputs: LossInputs,
    *,
    beta: Beta = 0.1,
    label_smoothing: Smoothing = 0.0,
    variant: Literal["sigmoid", "ipo"] = "sigmoid",
) -> TokenLoss:
    """L = −(1 − ε)·log σ(β·z) − ε·log σ(−β·z), z = D(preferred) − D(other).

    D = Σ_t (log current − log reference) over the trained tokens of a sequence, ε =
    `label_smoothing`. The preferred rollout of a pair is the one with A > 0, the other has A < 0; a
    tie (A = 0), or a pair of which a rollout is missing, is left out. Both rollouts of a pair carry
    L on every token, so that `sequence_mean` is the mean over pairs. `variant` "ipo":
    (z − 1/(2β))², D being means over tokens instead of sums.

    Stats count tokens: `unpaired`, `misordered` (of pairs with z < 0), `reference_not_finite`.
    """
    margin, paired = _margins(inputs, mean=variant == "ipo")
    if variant == "ipo":
        loss = squared(margin, beta=beta)
    else:
        loss = logistic(margin, beta=beta, label_smoothing=label_smoothing)
    stats = {
        "unpaired": (inputs.trained & ~paired).sum(),
        "misordered": (paired & (margin.detach() < 0)).sum(),
        "reference_not_finite": (inputs.trained & ~inputs.referenced).sum(),
    }
    return TokenLoss(torch.where(paired, loss.to(inputs.current.dtype), 0.0), stats)


def _margins(inputs: LossInputs, *, mean: bool) -> tuple[Tensor, Tensor]:
    """Return z of each token's pair, [N] float64, and the tokens that belong to one, [N] bool."""
    sequences, groups = inputs.sequences, Segments(inputs.require("dpo", "group_ids"))
    group_of = torch.empty_like(sequences.index[: sequences.count])
    group_of = group_of.scatter(0, sequences.index, groups.index)
    rollouts = torch.bincount(group_of, minlength=groups.count)
    if bool((rollouts > 2).any()):
        raise InputError(
            f"dpo compares two rollouts of a prompt, found a group of {int(rollouts.max())}; use "
            "prompts.group_size = 2"
        )
    usable = inputs.referenced
    distance = sequences.sums(inputs.reference_log_ratio)
    if mean:
        distance = distance / sequences.sums(usable).clamp(min=1)
    side = sequences.sums(torch.where(usable, inputs.advantages, 0.0)).sign()
    of_group = torch.zeros(groups.count, dtype=distance.dtype, device=distance.device)
    margin = of_group.index_add(0, group_of, side * distance)
    sides = of_group.index_add(0, group_of, side.abs())
    balance = of_group.index_add(0, group_of, side)
    paired = (sides == 2) & (balance == 0)
    return margin[groups.index], paired[groups.index] & inputs.trained
