"""The critic's side: advantages and targets from its values, its loss, and how much it explains.

Pure functions on packed rows; index t speaks about token t, and a value is that of the state before
it. Where the values come from is the engine's business.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from learner.errors import InputError


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
    """Generalised advantage estimation, not whitened, and the returns that the critic learns.

    δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  return_t = A_t + V_t
    (Schulman et al. 2016, arXiv 1506.02438, eq. 11-16). t + 1 is the next masked-in token of the
    sequence: what an environment injected is stepped over, as in verl, AReaL and NeMo-RL (OpenRLHF
    takes V = 0 there).

    Args:
        rewards: [N] of each token; those masked out do not count.
        values: [N] of the state before each token.
        mask: [N] bool, tokens that the policy sampled.
        sequence_ids: [N] integers.
        gamma: Discount per masked-in token, in [0, 1].
        lam: λ in [0, 1], or [S] of them: one for each of the S sequences, by ascending id.
        bootstrap: Value of the state after a sequence's last masked-in token, or [S] of them.

    Returns:
        Advantages [N], 0 where `mask` is false, and returns [N], there the value itself (0 where it
        is not finite). Computed in float64; of the dtype of `values`, at least float32.

    Raises:
        InputError: Shapes that differ, or `gamma` or `lam` out of range.
    """
    _check(values, rewards=rewards, mask=mask, sequence_ids=sequence_ids)
    _, row = torch.unique(sequence_ids, return_inverse=True)
    size = int(row.max()) + 1 if row.numel() else 0
    decay = _per_sequence("lam", lam, size, values.device)
    following = _per_sequence("bootstrap", bootstrap, size, values.device)
    if not 0 <= gamma <= 1:
        raise InputError(f"gamma must be in [0, 1], found {gamma}")
    if not ((decay >= 0) & (decay <= 1)).all():
        found = f"{float(decay.min())}..{float(decay.max())}"
        raise InputError(f"lam must be in [0, 1], found {found}")
    reward, value = rewards.detach().double(), values.detach().double()
    at = mask.nonzero().flatten()
    at = at[torch.argsort(row[at], stable=True)]
    lengths = torch.bincount(row[mask], minlength=size)
    # All sequences are walked at once from their ends, the longest first, so that those which are
    # not over yet are a prefix.
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
    """Q_t = Σ_{s ≥ t} γ^(s − t)·r_s over the masked-in tokens of a sequence, 0 where masked out.

    What `gae` is with λ = 1 and without a critic; arguments and errors as there.

    Returns:
        [N], at least float32.
    """
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, mask, sequence_ids, gamma=gamma, lam=1.0)[0]


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """λ = 1 − 1 / (α·n), at least 0: the longer the rollout, the farther a reward reaches.

    VAPO (arXiv 2504.05118, §4.2; α = 0.05 there). NeMo-RL: 1 − 1 / max(α·n, 1), the same.

    Args:
        lengths: [S] sampled tokens of each sequence.
        alpha: α > 0.

    Returns:
        [S] float64 in [0, 1).

    Raises:
        InputError: `alpha` is not positive.

    Example:
        >>> length_adaptive_lambda(torch.tensor([1000, 10]), 0.05).tolist()
        [0.98, 0.0]
    """
    if not alpha > 0:
        raise InputError(f"the α of a length-adaptive λ must be positive, found {alpha}")
    return 1 - 1 / (alpha * lengths.double()).clamp(min=1.0)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float | None = None
) -> Tensor:
    """½·max((V − ret)², (V_old + clamp(V − V_old, ±clip) − ret)²) per token, minimised.

    The clipped form is that of the PPO reference code; without `clip` the first term alone. verl,
    OpenRLHF and AReaL clip at 0.5, TRL and slime at 0.2, NeMo-RL not at all.

    Args:
        values: [N] floating, with gradient.
        old_values: [N] from before the batch's first step, of the version that `returns` were
            computed with.
        returns: [N] as from `gae`.
        clip: Largest change of a value that is still rewarded, or None.

    Returns:
        [N], at least float32; no reduction inside.

    Raises:
        InputError: Shapes that differ, or `clip` is not positive.
    """
    _check(values, old_values=old_values, returns=returns)
    if clip is not None and not clip > 0:
        raise InputError(f"clip of the value loss must be positive or None, found {clip}")
    dtype = torch.promote_types(values.dtype, torch.float32)
    new, old, target = values.to(dtype), old_values.detach().to(dtype), returns.detach().to(dtype)
    squared = (new - target).square()
    if clip is not None:
        near = old + (new - old).clamp(-clip, clip)
        squared = torch.maximum(squared, (near - target).square())
    return 0.5 * squared


def variance_sums(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sums over masked-in tokens from which `explained_variance` follows.

    They add up over micro-batches and ranks. float64 scalars `critic_tokens`, `critic_returns`,
    `critic_returns_squared`, `critic_errors` and `critic_errors_squared`; error: return − value.

    Args:
        values: [N] of the critic.
        returns: [N] that it learns.
        mask: [N] bool.
    """
    target = returns.detach()[mask].double()
    error = target - values.detach()[mask].double()
    return {
        "critic_tokens": mask.sum().double(),
        "critic_returns": target.sum(),
        "critic_returns_squared": target.square().sum(),
        "critic_errors": error.sum(),
        "critic_errors_squared": error.square().sum(),
    }


def explained_variance(sums: Mapping[str, float]) -> float | None:
    """1 − Var(return − value) / Var(return): 1 is a perfect critic, 0 one that knows the mean.

    None where the returns do not vary. Negative where the critic is worse than the mean.

    Args:
        sums: As from `variance_sums`, added up.
    """
    count = sums["critic_tokens"]
    if not count:
        return None
    square = sums["critic_returns_squared"] / count
    variance = square - (sums["critic_returns"] / count) ** 2
    unexplained = sums["critic_errors_squared"] / count - (sums["critic_errors"] / count) ** 2
    # Below this the difference of the two large numbers is rounding.
    return None if variance <= 1e-12 * square else 1 - unexplained / variance


def _per_sequence(name: str, value: float | Tensor, size: int, device: torch.device) -> Tensor:
    given = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
    if given.ndim and given.shape != (size,):
        raise InputError(
            f"{name} must be a number or one for each of {size} sequences, found "
            f"{tuple(given.shape)}"
        )
    return given.expand(size)


def _check(values: Tensor, **others: Tensor) -> None:
    for name, other in others.items():
        if values.ndim != 1 or other.shape != values.shape:
            raise InputError(
                f"{name} and values must be [N], found {tuple(other.shape)} and "
                f"{tuple(values.shape)}"
            )
