"""Comparison of the engines that sampled a batch: which one disagrees more with the learner.

    tokens ─▶ units: group × engine × lag ─▶ mismatch of each unit ─▶ ranks within a lag ─▶ figures

All engines are to serve the weights that the learner has published, so their mismatches differ by
chance alone: by numerics, and by the updates since, which are the same for all of one lag. Prompts
differ, so each group counts once, and its mismatch is set in relation to how uncertain its tokens
were. By ranks, the comparison does not depend on how mismatches are distributed. Tokens that a
rollout samples after an update of its engine are left out: how far an old KV cache misleads them
depends on when the update came.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from learner.diagnostics.batch_report import EngineFigures
from learner.sums import Sums

CERTAIN = 0.01
"""Uncertainty that every token is given at least, so that rounding of sure tokens weighs little."""
NEGLIGIBLE = 1e-5
"""Mismatches far below this, in nats, count as equal when their ratio is taken."""


class Unit(NamedTuple):
    """The tokens of a group that one engine sampled by one version."""

    engine: str
    group: int
    lag: int


class Mismatch(NamedTuple):
    """Disagreement with the learner about the tokens of a unit."""

    tokens: float
    difference: float
    """Σ |log ratio| of current / behaviour policy."""
    relative: float
    """The mismatch in nats for each unit of uncertainty."""


def units(
    versions: Tensor, mask: Tensor, sequence_ids: Tensor, group_ids: Tensor,
    engines: Sequence[str], *, version: int,
) -> tuple[list[Unit], Tensor]:  # fmt: skip
    """Return the units of a batch, and the index of the unit of each token, −1 for none, [N] int64.

    Arguments as for `off_policy.origins`; `sequence_ids` count rollouts from 0, and `engines` has
    the engine of each.
    """
    oldest = versions.new_full((len(engines),), version)
    counted = sequence_ids[mask]
    oldest = oldest.scatter_reduce(0, counted, versions[mask], "amin", include_self=False)
    compared = mask & (versions == oldest[sequence_ids])
    names = sorted(set(engines))
    engine = torch.tensor([names.index(name) for name in engines])[sequence_ids]
    groups, lags = int(group_ids.max()) + 1, version - versions
    longest = int(lags[compared].max()) + 1 if compared.any() else 1
    keys, index = torch.unique(
        ((engine * groups + group_ids) * longest + lags)[compared], return_inverse=True
    )
    column = torch.full_like(sequence_ids, -1).masked_scatter(compared, index)
    parts = [(*divmod(key // longest, groups), key % longest) for key in keys.tolist()]
    return [Unit(names[number], group, lag) for number, group, lag in parts], column


@dataclass(frozen=True, kw_only=True)
class UnitSums(Sums):
    """Sums over the trained tokens of each unit of a batch, [units] float64."""

    tokens: Tensor
    difference: Tensor
    uncertainty: Tensor
    """Σ (1 − probability): log-probabilities move in proportion to it when logits do."""


def measure(
    log_ratios: Tensor, mask: Tensor, token_units: Tensor, behavior_logprobs: Tensor, *, count: int
) -> UnitSums:
    """Sum over the masked-in tokens of each of `count` units.

    `log_ratios` [N] are logs of current / behaviour, detached and clamped.
    """
    chosen = mask & (token_units >= 0)
    index, logprobs = token_units[chosen], behavior_logprobs[chosen].double()
    zeros = logprobs.new_zeros(count)
    return UnitSums(
        tokens=zeros.index_add(0, index, torch.ones_like(logprobs)),
        difference=zeros.index_add(0, index, log_ratios.detach()[chosen].double().abs()),
        uncertainty=zeros.index_add(0, index, 1 - logprobs.clamp(max=0.0).exp()),
    )


def figures(
    batch_units: Sequence[Unit], sums: UnitSums, *, passes: int = 1
) -> dict[str, EngineFigures]:
    """Return the figures of each engine; `passes` is how often each token was measured."""
    relative = sums.difference / (sums.uncertainty + CERTAIN * sums.tokens)
    rows = torch.stack([sums.tokens, sums.difference, relative], dim=1).tolist()
    mismatches = {
        unit: Mismatch(*row) for unit, row in zip(batch_units, rows, strict=True) if row[0]
    }
    strata = [*_strata(mismatches)]
    return {
        engine: _figures(engine, mismatches, strata, passes)
        for engine in sorted({unit.engine for unit in mismatches})
    }


def _strata(mismatches: Mapping[Unit, Mismatch]) -> Iterator[list[tuple[str, float]]]:
    """Yield engine and relative mismatch of units of one lag; a group is in the lag of most tokens.

    So every group counts once, and units are independent.
    """
    largest: dict[tuple[str, int], Unit] = {}
    for unit, mismatch in sorted(mismatches.items()):
        key = (unit.engine, unit.group)
        if key not in largest or mismatch.tokens > mismatches[largest[key]].tokens:
            largest[key] = unit
    by_lag: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
    for unit in largest.values():
        by_lag[unit.lag].append((unit.engine, mismatches[unit].relative))
    yield from by_lag.values()


def _figures(
    engine: str,
    mismatches: Mapping[Unit, Mismatch],
    strata: Sequence[Sequence[tuple[str, float]]],
    passes: int,
) -> EngineFigures:
    fresh = [m for unit, m in mismatches.items() if unit.engine == engine and unit.lag == 0]
    tokens = sum(mismatch.tokens for mismatch in fresh)
    own = [[value for name, value in stratum if name == engine] for stratum in strata]
    others = [[value for name, value in stratum if name != engine] for stratum in strata]
    rank_score, ratio = compare([*zip(own, others, strict=True)])
    return EngineFigures(
        mismatch_fresh=sum(m.difference for m in fresh) / tokens if tokens else None,
        tokens_fresh=int(tokens / passes),
        rank_score=rank_score,
        mismatch_ratio=ratio,
    )


def compare(
    strata: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> tuple[float | None, float | None]:
    """Compare the values of one engine with those of the others, stratum by stratum.

    The rank sum is that of Mann and Whitney (1947), strata are combined as by van Elteren (1960).
    If all values of a stratum are exchangeable, the score has mean 0, at most standard deviation 1,
    and E exp(t · score) ≤ exp(t² / 2) for every t, whatever the distribution of the values.

    Returns:
        The score, positive where the engine's values are larger, and the ratio of its values to
        the others', by geometric means; (None, None) if no stratum has values of both.

    Example:
        >>> compare([([4.0, 5.0], [1.0, 2.0])])[0]
        1.5491933384829668
    """
    score = variance = log_ratio = weight = 0.0
    for own, others in strata:
        if not own or not others:
            continue
        pairs, scale = len(own) * len(others), 1 / (len(own) + len(others) + 1)
        larger = sum((x > y) + (x == y) / 2 for x in own for y in others)
        score += scale * (larger - pairs / 2)
        variance += scale * pairs / 12
        log_ratio += len(own) * (_mean_log(own) - _mean_log(others))
        weight += len(own)
    if not weight:
        return None, None
    return score / math.sqrt(variance), math.exp(log_ratio / weight)


def _mean_log(values: Sequence[float]) -> float:
    return sum(math.log(value + NEGLIGIBLE) for value in values) / len(values)
