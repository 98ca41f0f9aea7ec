"""The cost to the learner of checkpoints that are written beside training, in copies of its state.

    headway bench checkpoint [--size 60m] [--every 10] [--checkpoints 3] [--threads 1]

The loop of `headway bench train` with checkpoints on this machine's disk. A checkpoint costs what
the batch after it takes longer than the median of the others, from the end of the batch before it;
a copy is one of as many bytes as a checkpoint has, in memory that is allocated. The first
checkpoint, which allocates the copy too, is left out of the conclusion.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, choice
from benchmarks.harness.synthetic_load import SIZES, batch, time_copies

AIM = 1.5
"""Copies of the state, at most."""


class CheckpointOptions(Options):
    """Options of `headway bench checkpoint`."""

    size: Annotated[str, choice(("tiny", "60m"), "Of the model; tiny is for a trial.")] = "60m"
    every: Annotated[int, typer.Option(min=2, help="Batches between two checkpoints.")] = 10
    checkpoints: Annotated[int, typer.Option(min=2, help="In all; the first is left out.")] = 4
    threads: Annotated[int, typer.Option(min=1, help="Of torch.")] = 1


def costs(steps: Sequence[float], every: int, copy_seconds: float) -> Record:
    """Return the costs of checkpoints after `every` so many batches of `learner_loop.gaps`."""
    usual = median(step for number, step in enumerate(steps, start=1) if number % every)
    waited = [step - usual for step in steps[every - 1 :: every]]
    return {"waited_seconds": waited, "copies": [seconds / copy_seconds for seconds in waited]}


def measure_loop(name: str, every: int, checkpoints: int) -> Record:
    """Train with checkpoints in this process."""
    from benchmarks.training.learner_loop import clocked_rank, gaps

    size = SIZES[name]
    with tempfile.TemporaryDirectory() as folder:
        rank, engine = clocked_rank(size, Path(folder))
        groups, batches = batch(size, seed=1)[:1], every * checkpoints + 2
        rows = gaps(rank, engine, groups, batches, checkpoint_every=every)
        rank.capture()
        rank.write(f"{folder}/checkpoint")
        files = Path(folder, "checkpoint").rglob("*.safetensors")
        count = sum(file.stat().st_size for file in files)
        rank.close()
    copied = median(time_copies(count, 9))
    return {
        "bytes": count,
        "copy_seconds": copied,
        **costs([row["step"] for row in rows], every, copied),
        "raw": rows,
    }


def measure(options: CheckpointOptions) -> Iterator[Record]:
    from benchmarks.training.learner_loop import in_process

    arguments = (options.size, options.every, options.checkpoints)
    yield in_process(measure_loop, *arguments, threads=options.threads)


def table(record: Record) -> str:
    copies = ", ".join(f"{count:.2f}" for count in record["copies"])
    return (
        f"{record['bytes'] / 1e6:.0f} MB, a copy takes {record['copy_seconds']:.2f} s; the learner "
        f"waited for {copies} copies (aim: at most {AIM:g})"
    )


STUDY = Study(
    name="checkpoint",
    options=CheckpointOptions,
    measure=measure,
    conclude=lambda record: {"waits": {"copies": median(record["copies"][1:])}},
    table=table,
    misses=lambda record: [
        f"{count:.2f} copies" for count in record["waits"].values() if count > AIM
    ],
)
