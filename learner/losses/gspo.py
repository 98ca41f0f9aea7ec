"""GSPO: PPO's clip on the length-normalised ratio of whole sequences, and its token variant.

Zheng et al. 2025 (arXiv 2507.18071, eq. 5-7 and 13-14). Sequences count alike: `sequence_mean`.
"""

from torch import Tensor

from learner.losses.loss_inputs import LossInputs, TokenLoss, bounded
from learner.losses.ppo import clipped


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """ℓ_t = max(−A·s, −A·clip(s, 1 − clip_low, 1 + clip_high)), s = exp(mean_t log r_t).

    The mean is over the trained tokens of the sequence, a rollout with all paths of its history;
    r = current / anchor. Every token of a sequence carries the sequence's loss. The bounds are ten
    to a hundred times smaller than PPO's.

    Stats count tokens of the sequences concerned: `clip_low`, `clip_high`, `ratio_bounded`
    (|mean log-ratio| beyond 20).
    """
    log_ratio = _sequence_log_ratio(inputs)
    return clipped(inputs, log_ratio, bounded(log_ratio).exp(), clip_low, clip_high)


def gspo_token(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """GSPO for advantages that differ between tokens: s_t = sg(s) · π(y_t) / sg(π(y_t)).

    Value and gradient are those of `gspo` where a sequence has one advantage.
    """
    log_ratio = _sequence_log_ratio(inputs).detach()
    score = inputs.current - inputs.current.detach()
    ratio = (bounded(log_ratio) + score).exp()
    return clipped(inputs, log_ratio, ratio, clip_low, clip_high)


def _sequence_log_ratio(inputs: LossInputs) -> Tensor:
    """Return the mean log-ratio of each token's sequence, [N], not bounded."""
    ratio = inputs.raw_log_ratio
    return inputs.sequences.means(ratio, inputs.trained).to(ratio.dtype)
