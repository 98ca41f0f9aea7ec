"""How full packed rows are and how even ranks, beside what else could be done. Lengths alone.

headway bench train (prints it), python -m benchmarks.gpu
"""

import math
from collections.abc import Sequence

from benchmarks.harness.synthetic_load import lognormal_lengths
from learner.batch.microbatch_plan import plan_microbatches, workloads
from learner.batch.packing import pack

ROLLOUTS, MEDIAN, LONGEST, CAPACITY, RANKS = 1024, 600, 8192, 16384, 8
PADDED_TOGETHER = 16
"""Sequences of a padded batch."""


def next_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of sequences in the order they come; a row is closed when the next does not fit."""
    rows: list[list[int]] = []
    free = 0
    for index, length in enumerate(lengths):
        if length > free:
            rows.append([])
            free = capacity
        rows[-1].append(index)
        free -= length
    return rows


def fullness(lengths: Sequence[int], rows: Sequence[Sequence[int]], capacity: int) -> float:
    """Share of the rows' room that holds tokens; a longer sequence is its own room."""
    filled = [sum(lengths[i] for i in row) for row in rows if row]
    return sum(filled) / sum(max(capacity, tokens) for tokens in filled)


def padded(lengths: Sequence[int], rows_of: int) -> float:
    """The same where so many sequences make a batch padded to its longest, in their order."""
    parts = [lengths[at : at + rows_of] for at in range(0, len(lengths), rows_of)]
    return sum(lengths) / sum(len(part) * max(part) for part in parts)


def possible(tokens: int, ranks: int, capacity: int) -> float:
    """How full rows can be at best when every rank needs as many rows as the others."""
    return tokens / (ranks * math.ceil(tokens / ranks / capacity) * capacity)


def evenness(loads: Sequence[int]) -> float:
    """The largest over the mean."""
    return max(loads) * len(loads) / sum(loads)


def packing_figures(seed: int = 0) -> dict[str, float]:
    """One large batch of lognormal lengths, packed and shared out in each way."""
    lengths = lognormal_lengths(ROLLOUTS, median=MEDIAN, longest=LONGEST, seed=seed)
    plan = plan_microbatches(lengths, RANKS, CAPACITY)
    in_turn = [list(range(rank, ROLLOUTS, RANKS)) for rank in range(RANKS)]
    return {
        "tokens": float(sum(lengths)),
        "full_packed": fullness(lengths, pack(lengths, CAPACITY), CAPACITY),
        "full_packed_over_ranks": fullness(lengths, [r for rows in plan for r in rows], CAPACITY),
        "full_possible_over_ranks": possible(sum(lengths), RANKS, CAPACITY),
        "full_next_fit": fullness(lengths, next_fit(lengths, CAPACITY), CAPACITY),
        "full_padded": padded(lengths, PADDED_TOGETHER),
        "balance": evenness(workloads(lengths, plan)),
        "balance_tokens": evenness([sum(lengths[i] for r in rows for i in r) for rows in plan]),
        "balance_in_turn": evenness(workloads(lengths, [[share] for share in in_turn])),
    }


def told(figures: dict[str, float]) -> str:
    """Them as text."""
    return (
        f"{ROLLOUTS} rollouts, {figures['tokens']:,.0f} tokens: rows of {CAPACITY} are "
        f"{figures['full_packed']:.3f} full (aim 0.97), shared over {RANKS} ranks "
        f"{figures['full_packed_over_ranks']:.3f} (at best "
        f"{figures['full_possible_over_ranks']:.3f}, since all need as many rows), "
        f"next fit {figures['full_next_fit']:.3f}, padded {figures['full_padded']:.3f}\n"
        f"work of the busiest of {RANKS} ranks over the mean: {figures['balance']:.4f} (aim 1.01; "
        f"of tokens {figures['balance_tokens']:.4f}), in turn {figures['balance_in_turn']:.3f}"
    )
