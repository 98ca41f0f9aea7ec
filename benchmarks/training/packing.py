"""Fullness of packed microbatches and balance of ranks, beside other packings; by lengths alone.

A part of `headway bench train` and of `python -m benchmarks.gpu`.
"""

from collections.abc import Sequence

from benchmarks.harness.synthetic_load import lognormal_lengths
from learner.batch.microbatch_plan import plan_microbatches, workloads
from learner.batch.packing import pack

ROLLOUTS, MEDIAN, LONGEST, CAPACITY, RANKS = 1024, 600, 8192, 16384, 8
PADDED_TOGETHER = 16
"""Sequences of a padded batch."""


def fullness(lengths: Sequence[int], rows: Sequence[Sequence[int]], capacity: int) -> float:
    """Return the share of the capacity that holds tokens; a longer sequence counts as full."""
    filled = [sum(lengths[i] for i in row) for row in rows if row]
    return sum(filled) / sum(max(capacity, tokens) for tokens in filled)


def padded(lengths: Sequence[int], size: int) -> float:
    """Return the same for batches of so many sequences in order, padded to the longest."""
    parts = [lengths[at : at + size] for at in range(0, len(lengths), size)]
    return sum(lengths) / sum(len(part) * max(part) for part in parts)


def evenness(loads: Sequence[int]) -> float:
    return max(loads) * len(loads) / sum(loads)


def packing_figures(seed: int = 0) -> dict[str, float]:
    """Return the figures of one large batch of lognormal lengths, packed in each way."""
    lengths = lognormal_lengths(ROLLOUTS, median=MEDIAN, longest=LONGEST, seed=seed)
    plan = plan_microbatches(lengths, RANKS, CAPACITY)
    in_turn = [list(range(rank, ROLLOUTS, RANKS)) for rank in range(RANKS)]
    return {
        "tokens": float(sum(lengths)),
        "full_packed": fullness(lengths, pack(lengths, CAPACITY), CAPACITY),
        "full_packed_over_ranks": fullness(lengths, [r for rows in plan for r in rows], CAPACITY),
        "full_padded": padded(lengths, PADDED_TOGETHER),
        "balance": evenness(workloads(lengths, plan)),
        "balance_in_turn": evenness(workloads(lengths, [[share] for share in in_turn])),
    }


def describe(figures: dict[str, float]) -> str:
    return (
        f"{ROLLOUTS} rollouts, {figures['tokens']:,.0f} tokens: microbatches of {CAPACITY} are "
        f"{figures['full_packed']:.3f} full (aim 0.97), shared over {RANKS} ranks "
        f"{figures['full_packed_over_ranks']:.3f}, padded {figures['full_padded']:.3f}\n"
        f"work of the busiest of {RANKS} ranks over the mean: {figures['balance']:.4f} (aim 1.01), "
        f"in turn {figures['balance_in_turn']:.3f}"
    )
