"""The work plan of one optimizer step: which rows each rank computes. Pure functions over lengths.

Every rank must enter the same collectives, so all get the same number of rows.
"""

from collections.abc import Sequence

from learner.batch.packing import balance, pack

BREAK_EVEN_TOKENS = 6144
"""Sequence length at which attention costs as much as everything else. The two are equal at about
6 · hidden size; this is for a hidden size of 1024."""

Rows = list[list[int]]


def workload(length: int) -> int:
    """Cost of training a sequence: linear in its tokens, and quadratic by attention."""
    return length * (BREAK_EVEN_TOKENS + length)


def plan_rows(lengths: Sequence[int], ranks: int, capacity: int) -> list[Rows]:
    """Shares sequences out over ranks by workload, and packs each share into rows.

    The busiest rank has at most the mean workload plus one sequence (see `balance`). Where a rank
    needs fewer rows than another, its largest rows are cut in two; a rank with fewer sequences than
    rows gets dummy rows for the rest. The rows of every rank descend by workload, so that ranks
    that meet at every row have much the same to do there. Deterministic.

    Args:
        lengths: Tokens of each sequence.
        ranks: Number of ranks.
        capacity: Tokens of a row; a longer sequence is alone in one.

    Returns:
        For each rank the same number of rows, at least one, of indices into `lengths`; each index
        once. A dummy row is empty.

    Raises:
        InputError: The capacity or the number of ranks is not positive.

    Example:
        >>> plan_rows([5, 9, 3, 2], ranks=2, capacity=8)
        [[[1], []], [[0, 2], [3]]]
    """
    plan: list[Rows] = []
    for share in balance([workload(length) for length in lengths], ranks):
        rows = pack([lengths[i] for i in share], capacity)
        plan.append([[share[i] for i in row] for row in rows])
    count = max(1, *(len(rows) for rows in plan))
    return [
        sorted(_cut(rows, count, lengths), key=lambda row: _load(row, lengths), reverse=True)
        for rows in plan
    ]


def workloads(lengths: Sequence[int], plan: Sequence[Rows]) -> list[int]:
    """Workload of each rank under a plan; dummy rows cost nothing."""
    return [sum(_load(row, lengths) for row in rows) for rows in plan]


def slowest(lengths: Sequence[int], plan: Sequence[Rows], *, at_rows: bool) -> int:
    """Workload that a step takes as long as: that of the busiest rank.

    Args:
        lengths: Tokens of each sequence.
        plan: The rows of each rank.
        at_rows: Ranks wait for each other at every row; then it is the sum of what the busiest has
            to do at each.

    Example:
        >>> slowest([1, 2], [[[0], []], [[], [1]]], at_rows=False) == workload(2)
        True
        >>> slowest([1, 2], [[[0], []], [[], [1]]], at_rows=True) == workload(1) + workload(2)
        True
    """
    if not at_rows:
        return max(workloads(lengths, plan))
    return sum(max(_load(row, lengths) for row in rows) for rows in zip(*plan, strict=True))


def _load(row: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(workload(lengths[i]) for i in row)


def _cut(rows: Rows, count: int, lengths: Sequence[int]) -> Rows:
    """The same sequences in exactly `count` rows."""
    rows = list(rows)
    while len(rows) < count:
        at = max(
            (i for i, row in enumerate(rows) if len(row) > 1),
            key=lambda i: sum(lengths[j] for j in rows[i]),
            default=None,
        )
        if at is None:
            rows.append([])
            continue
        row = rows[at]
        parts = balance([lengths[i] for i in row], 2)
        rows[at : at + 1] = [[row[i] for i in part] for part in parts]
    return rows
