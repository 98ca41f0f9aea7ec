"""The plan of one optimizer step: the microbatches of each rank. Pure functions over lengths.

Every rank must enter the same collectives, so all get the same number of microbatches.
"""

from collections import defaultdict
from collections.abc import Sequence

from learner.batch.packing import balance, pack

BREAK_EVEN_TOKENS = 6144
"""Sequence length at which attention costs as much as everything else. The two are equal at about
6 · hidden size; this is for a hidden size of 1024."""

Indices = list[list[int]]
"""Microbatches of one rank, each as indices of its sequences."""


def workload(length: int) -> int:
    """Return the cost of training a sequence: linear in its tokens, and quadratic by attention."""
    return length * (BREAK_EVEN_TOKENS + length)


def plan_microbatches(
    lengths: Sequence[int], ranks: int, capacity: int, owners: Sequence[int] | None = None
) -> list[Indices]:
    """Share sequences out over ranks by workload, and pack each share into microbatches.

    Sequences of one of the `owners` [S], such as a rollout, are on one rank; None: each is its own.

    Where a rank needs fewer microbatches than another, its largest are cut in two, and dummies fill
    up. Microbatches descend by workload, so that ranks that meet at each have much the same to do
    there. Deterministic; see `balance` for the bound.

    Returns:
        For each rank the same number of microbatches, at least one, of indices into `lengths`; each
        index once. A dummy is empty.

    Raises:
        InputError: The capacity or the number of ranks is not positive.

    Example:
        >>> plan_microbatches([5, 9, 3, 2], ranks=2, capacity=8)
        [[[1], []], [[0, 2], [3]]]
    """
    plan: list[Indices] = []
    owned: defaultdict[int, list[int]] = defaultdict(list)
    for i, owner in enumerate(range(len(lengths)) if owners is None else owners):
        owned[owner].append(i)
    units = [*owned.values()]
    for members in balance([_load(unit, lengths) for unit in units], ranks):
        share = sorted(i for unit in members for i in units[unit])
        packed = pack([lengths[i] for i in share], capacity)
        plan.append([[share[i] for i in members] for members in packed])
    count = max(1, *(len(share) for share in plan))
    return [
        sorted(
            _cut(share, count, lengths), key=lambda members: _load(members, lengths), reverse=True
        )
        for share in plan
    ]


def workloads(lengths: Sequence[int], plan: Sequence[Indices]) -> list[int]:
    """Return the workload of each rank under a plan; dummies cost nothing."""
    return [sum(_load(members, lengths) for members in share) for share in plan]


def slowest(lengths: Sequence[int], plan: Sequence[Indices], *, at_microbatches: bool) -> int:
    """Return the workload that a step waits for: that of the busiest rank.

    With `at_microbatches` ranks wait for each other at every microbatch, and it is the sum over
    them of the busiest rank's workload.
    """
    if not at_microbatches:
        return max(workloads(lengths, plan))
    at_each = zip(*plan, strict=True)
    return sum(max(_load(members, lengths) for members in ranks) for ranks in at_each)


def _load(members: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(workload(lengths[i]) for i in members)


def _cut(share: Indices, count: int, lengths: Sequence[int]) -> Indices:
    """Return the same sequences in exactly `count` microbatches."""
    share = list(share)
    while len(share) < count:
        largest = max(
            (i for i, members in enumerate(share) if len(members) > 1),
            key=lambda i: sum(lengths[j] for j in share[i]),
            default=None,
        )
        if largest is None:
            share.append([])
            continue
        members = share[largest]
        parts = balance([lengths[i] for i in members], 2)
        share[largest : largest + 1] = [[members[i] for i in part] for part in parts]
    return share
