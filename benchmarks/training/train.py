"""Utilisation of the machine by the learner: tokens/s, and operations beside a matrix product's.

    headway bench train [--sizes demo,60m] [--threads 1]

The real learner of one rank trains synthetic batches, each between two measurements of the best
matrix product. "Host" is the updater's time besides computing; "gap" lies between the computing of
two batches in the loop of a run, whose broker has every group already. Then the same batch is
trained in the ways of models that cannot be packed. Takes six minutes.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, cells, name_of, several, text_table
from benchmarks.harness.synthetic_load import SIZES, batch, lognormal_lengths
from learner.batch.microbatch_plan import plan_microbatches, workloads
from learner.batch.packing import pack
from queues.schema import decode_arrays, encode

AIM = {"utilisation": 0.6, "gap": 0.03}
"""At least, by models where arithmetic dominates; and at most."""
LARGE = ("60m", "0.5b")
"""Models whose arithmetic dominates."""
COLUMNS = {
    "M parameters": ("millions", "{:.1f}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"),
    "of peak": ("utilisation", "{:.0%}"),
    "peak, G operations/s": ("peak_giga", "{:,.0f}"),
    "host, of a batch": ("host", "{:.1%}"),
    "gap, of a step": ("gap", "{:.1%}"),
    "side by side, tokens/s": ("beside", "{:,.0f}"),
    "one by one, tokens/s": ("alone", "{:,.0f}"),
}
ROLLOUTS, MEDIAN, LONGEST, CAPACITY, RANKS = 1024, 600, 8192, 16384, 8
PADDED_TOGETHER = 16
"""Sequences of a padded batch."""


class TrainOptions(Options):
    """Options of `headway bench train`."""

    sizes: Annotated[
        Sequence[str],
        several(name_of(("tiny", "demo", "60m", "0.5b")), "Of models; tiny is for a trial."),
    ] = ("demo", "60m")
    rounds: Annotated[int, typer.Option(min=1, help="Batches of each size.")] = 3
    threads: Annotated[int | None, typer.Option(min=1, help="Of torch; else all cores.")] = None


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


def describe_packing(figures: dict[str, float]) -> str:
    return (
        f"{ROLLOUTS} rollouts, {figures['tokens']:,.0f} tokens: microbatches of {CAPACITY} are "
        f"{figures['full_packed']:.3f} full (aim 0.97), shared over {RANKS} ranks "
        f"{figures['full_packed_over_ranks']:.3f}, padded {figures['full_padded']:.3f}\n"
        f"work of the busiest of {RANKS} ranks over the mean: {figures['balance']:.4f} (aim 1.01), "
        f"in turn {figures['balance_in_turn']:.3f}"
    )


def gap_of(batches: Sequence[Mapping[str, float]]) -> Record:
    """Return the median of `learner_loop.gaps`, as a share of a step, which includes the gap."""
    return {"gap": median(row["gap"] / row["step"] for row in batches), "raw": batches}


def described(figures: Record) -> Record:
    """Return the figures of one size that stand in the table."""
    return {
        **figures,
        "millions": figures["parameters"] / 1e6,
        "peak_giga": figures["peak"] / 1e9,
        "host": figures["shares"]["host"],
        "gap": figures["loop"]["gap"],
        **figures["ways"],
    }


def table(record: Record) -> str:
    rows = [[name, *cells(described(size), COLUMNS)] for name, size in record["sizes"].items()]
    measured = text_table(["model", *COLUMNS], rows, f"threads: {record['threads']}")
    return f"{measured}\n{describe_packing(record['packing'])}"


def misses(record: Record) -> list[str]:
    sizes = record["sizes"]
    slow = [
        f"{name} has {size['utilisation']:.0%} of the peak, at least {AIM['utilisation']:.0%}"
        for name, size in sizes.items()
        if name in LARGE and size["utilisation"] < AIM["utilisation"]
    ]
    waits = [
        f"the gap of {name} is {size['loop']['gap']:.2%} of a step, at most {AIM['gap']:.0%}"
        for name, size in sizes.items()
        if size["loop"]["gap"] > AIM["gap"]
    ]
    return slow + waits


def measure_size(name: str, rounds: int) -> Record:
    """Measure a learner of one rank with a model of one size, in this process."""
    from benchmarks.training.learner_loop import clocked_rank, gaps
    from benchmarks.training.utilisation import utilisation_of
    from learner.model.ways import Way

    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        rank, engine = clocked_rank(size, Path(folder))
    groups = batch(size, seed=1)
    payloads = [encode(group) for group in groups]
    batch_of = size, groups, lambda: decode_arrays(payloads)
    figures = utilisation_of(rank.updater, engine, *batch_of, rounds=rounds)
    figures["loop"] = gap_of(gaps(rank, engine, groups, rounds + 1))
    module, figures["ways"] = rank.engine.module, {}
    module.model.set_attn_implementation("sdpa")
    for way in (Way.BESIDE, Way.ALONE):
        module.way = way
        other = utilisation_of(rank.updater, engine, *batch_of, rounds=rounds)
        figures["ways"][way.name.lower()] = other["tokens_per_second"]
    rank.close()
    return figures


def measure(options: TrainOptions) -> Iterator[Record]:
    from benchmarks.training.learner_loop import in_process

    packed = packing_figures()
    threads = options.threads or len(os.sched_getaffinity(0))
    sizes: dict[str, Any] = {}
    for name in options.sizes:
        sizes[name] = in_process(measure_size, name, options.rounds, threads=threads)
        yield {"threads": threads, "packing": packed, "sizes": sizes}


STUDY = Study(name="train", options=TrainOptions, measure=measure, table=table, misses=misses)
