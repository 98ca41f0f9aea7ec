"""Utilisation of the machine by the learner: tokens/s, and operations beside a matrix product's.

    headway bench train [--sizes demo,60m] [--threads 1]

The real learner of one rank trains synthetic batches, each between two measurements of the best
matrix product. "Host" is the updater's time besides computing; "gap" lies between the computing of
two batches in the loop of a run, whose broker has every group already. Takes four minutes.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, name_of, several
from benchmarks.harness.synthetic_load import SIZES, batch, build, lengths_of, sampled_tokens
from queues.schema import decode_arrays, encode

AIM = {"utilisation": 0.6, "gap": 0.03}
"""At least, where arithmetic dominates; and at most."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """Options of `headway bench train`."""

    sizes: Annotated[
        Sequence[str],
        several(name_of(("tiny", "demo", "60m", "0.5b")), "Of models; tiny is for a trial."),
    ] = ("demo", "60m")
    rounds: Annotated[int, typer.Option(min=1, help="Batches of each size.")] = 3
    threads: Annotated[int | None, typer.Option(min=1, help="Of torch; else all cores.")] = None


def gap_of(batches: Sequence[Mapping[str, float]]) -> Record:
    """Return the median of `learner_loop.gaps`, as a share of a step, which includes the gap."""
    return {"gap": median(row["gap"] / row["step"] for row in batches), "raw": batches}


def describe(name: str, figures: Record) -> str:
    shares = ", ".join(f"{part} {share:.1%}" for part, share in figures["shares"].items())
    return (
        f"{name:5s} {figures['parameters'] / 1e6:8.1f} M:"
        f" {figures['tokens_per_second']:9,.0f} tokens/s, {figures['utilisation']:.0%} of"
        f" {figures['peak'] / 1e9:,.0f} G operations/s ({shares}),"
        f" {figures['cpu']:.2f} CPU seconds a second; gap {figures['loop']['gap']:.1%} of a step"
    )


def measure_size(name: str, rounds: int) -> Record:
    """Measure a learner of one rank with a model of one size, in this process."""
    import torch

    from benchmarks.training.learner_loop import clocked_rank, gaps
    from benchmarks.training.utilisation import (
        Peak,
        figures_of,
        shape_of,
        timed_rounds,
        training_flops,
    )

    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        rank, engine = clocked_rank(size, Path(folder))
    groups = batch(size, seed=1)
    payloads = [encode(group) for group in groups]
    peak = Peak(engine.device, getattr(torch, size.dtype))
    timed = timed_rounds(rank.updater, engine, lambda: decode_arrays(payloads), peak, rounds)
    with torch.device("meta"):
        model = build(size)
    lengths = lengths_of(groups)
    flops = training_flops(shape_of(model), lengths, sampled_tokens(groups))
    loop = gap_of(gaps(rank, engine, groups, rounds + 1))
    rank.close()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **figures_of(timed, flops, sum(lengths)),
        "loop": loop,
    }


def measure(options: TrainOptions) -> Iterator[Record]:
    from benchmarks.training import packing
    from benchmarks.training.learner_loop import in_process

    packed = packing.packing_figures()
    print(packing.describe(packed))
    threads = options.threads or len(os.sched_getaffinity(0))
    sizes: dict[str, Any] = {}
    for name in options.sizes:
        sizes[name] = in_process(measure_size, name, options.rounds, threads=threads)
        print(describe(name, sizes[name]), flush=True)
        yield {"threads": threads, "packing": packed, "sizes": sizes}
    print(f"aims: {AIM['utilisation']:.0%} at 60m, gap at most {AIM['gap']:.0%}")


STUDY = Study(
    name="train",
    about=__doc__,
    options=TrainOptions,
    file="train.json",
    measure=measure,
)
