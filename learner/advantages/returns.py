"""Generalised advantage estimation, returns and whitening of packed tokens.

Pure functions; index t belongs to token t, and a value is that of the state before it.
"""

import torch
from torch import Tensor

from headway.errors import InputError
from learner.advantages.grouped import all_tied, check_shapes

EPSILON = 1e-8
"""Added to the variance of what is whitened, under the root."""
NO_VARIANCE = 1e-12
"""Variance below which values are only centred."""


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap: float | Tensor = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantages, not whitened, and the returns that the critic learns.

    δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  return_t = A_t + V_t
    (Schulman et al. 2016, arXiv 1506.02438, eq. 11-16). t + 1 is the next masked-in token of the
    sequence: tokens of the environment are stepped over.

    Args:
        rewards: [N] of each token; masked-out tokens do not count.
        values: [N] of the state before each token.
        mask: [N] bool, tokens that the policy sampled.
        sequence_ids: [N] integers.
        gamma: Discount per masked-in token, in [0, 1].
        lam: λ in [0, 1], or [S]: one for each of the S sequences, by ascending id.
        bootstrap: Value of the state after a sequence's last masked-in token, or [S].

    Returns:
        Advantages [N], 0 where `mask` is false, and returns [N], there the value itself (0 where it
        is not finite). Computed in float64; of the dtype of `values`, at least float32.

    Raises:
        InputError: Shapes that differ, or `gamma` or `lam` out of range.
    """
    columns = {"rewards": rewards, "mask": mask, "sequence_ids": sequence_ids}
    check_shapes(columns, "[N] like values", values)
    _, sequence = torch.unique(sequence_ids, return_inverse=True)
    size = int(sequence.max()) + 1 if sequence.numel() else 0
    decay = _per_sequence("lam", lam, size, values.device)
    following = _per_sequence("bootstrap", bootstrap, size, values.device)
    if not 0 <= gamma <= 1:
        raise InputError(f"gamma must be in [0, 1], found {gamma}")
    if not ((decay >= 0) & (decay <= 1)).all():
        raise InputError(f"lam must be in [0, 1], found {float(decay.min())}..{float(decay.max())}")
    reward, value = rewards.detach().double(), values.detach().double()
    at = mask.nonzero().flatten()
    at = at[torch.argsort(sequence[at], stable=True)]
    lengths = torch.bincount(sequence[mask], minlength=size)
    # All sequences are walked at once from their ends, the longest first, so that the unfinished
    # ones are a prefix.
    order = torch.argsort(lengths, descending=True)
    last, lengths = lengths.cumsum(0)[order] - 1, lengths[order]
    decay, following = decay[order], following[order]
    advantages, running = torch.zeros_like(value), torch.zeros_like(following)
    steps = torch.arange(int(lengths[0]) if size else 0, device=lengths.device)
    unfinished = torch.searchsorted(-lengths, -steps).tolist()
    for step, count in enumerate(unfinished):
        here = at[last[:count] - step]
        delta = reward[here] + gamma * following[:count] - value[here]
        running = delta + gamma * decay[:count] * running[:count]
        following = value[here]
        advantages[here] = running
    known = torch.where(mask | torch.isfinite(value), value, 0.0)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return advantages.to(dtype), (advantages + known).to(dtype)


def returns_to_go(
    rewards: Tensor, mask: Tensor, sequence_ids: Tensor, *, gamma: float = 1.0
) -> Tensor:
    """Q_t = Σ_{s ≥ t} γ^(s − t)·r_s over the masked-in tokens of a sequence.

    [N], 0 where masked out. Equal to `gae` with λ = 1 and values of 0; arguments, dtypes and
    errors are the same.
    """
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, mask, sequence_ids, gamma=gamma, lam=1.0)[0]


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """λ = 1 − 1 / (α·n), at least 0, [S] float64: rewards reach farther in longer rollouts.

    n is `lengths` [S] in sampled tokens. VAPO (arXiv 2504.05118, §4.2; α = 0.05 there).

    Raises:
        InputError: `alpha` is not positive.

    Example:
        >>> length_adaptive_lambda(torch.tensor([1000, 10]), 0.05).tolist()
        [0.98, 0.0]
    """
    if not alpha > 0:
        raise InputError(f"the α of a length-adaptive λ must be positive, found {alpha}")
    return 1 - 1 / (alpha * lengths.double()).clamp(min=1.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x − mean) / √(var + 1e-8) over the masked-in tokens of the whole batch, [N] float64.

    The variance is Bessel's. Exactly 0 where `mask` [N] is false, all values are equal, or there is
    only one.
    """
    whitened = torch.zeros_like(values, dtype=torch.float64)
    chosen = values[mask].double()
    if all_tied(chosen):
        return whitened
    centred, variance = chosen - chosen.mean(), chosen.var()
    scale = torch.where(variance < NO_VARIANCE, 1.0, (variance + EPSILON).rsqrt())
    whitened[mask] = centred * scale
    return whitened


def _per_sequence(name: str, value: float | Tensor, size: int, device: torch.device) -> Tensor:
    numbers = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
    if numbers.ndim and numbers.shape != (size,):
        raise InputError(
            f"{name} must be a number or one for each of {size} sequences, found "
            f"{tuple(numbers.shape)}"
        )
    return numbers.expand(size)
