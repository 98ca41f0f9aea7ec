"""Speed of an engine inside the loop, beside the same vLLM alone with the same requests.

    headway bench generate [--size 60m --groups 32]

In each round `offline` is `LLM.generate` with all requests at once, and `loop` a rollout actor that
leases groups, decodes and rewards their texts, and puts them, without training. The figure of merit
is the median of loop / offline, at least 0.95. Takes about four minutes.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.harness.processes import local_ray
from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, choice

if TYPE_CHECKING:
    from benchmarks.rollouts.generation_rounds import Sampled

AIM = 0.95


class GenerateOptions(Options):
    """Options of `headway bench generate`."""

    rounds: Annotated[int, typer.Option(min=1, help="Of both engines.")] = 5
    groups: Annotated[int, typer.Option(min=1, help="Of 8 rollouts, in a round.")] = 96
    size: Annotated[str, choice(("demo", "60m"), "Of the model.")] = "demo"


def figures_of(rounds: Sequence[Mapping[str, "Sampled"]]) -> Record:
    """Return medians over rounds, and of the ratios inside each."""
    rates = {
        name: median(row[name].tokens / row[name].seconds for row in rounds)
        for name in ("offline", "loop")
    }
    ratio = median(row["offline"].seconds / row["loop"].seconds for row in rounds)
    raw = [{name: asdict(sampled) for name, sampled in row.items()} for row in rounds]
    return {"tokens_per_second": rates, "of_offline": {"loop": ratio}, "raw": raw}


def measure(options: GenerateOptions) -> Iterator[Record]:
    from benchmarks.rollouts.generation_rounds import measure_rounds

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with local_ray(cores=4), tempfile.TemporaryDirectory() as folder:
        rounds = measure_rounds(options.rounds, options.groups, options.size, Path(folder))
        yield figures_of(asyncio.run(rounds))


def table(record: Record) -> str:
    rates = record["tokens_per_second"]
    return (
        f"loop / offline = {record['of_offline']['loop']:.3f} (aim {AIM}): "
        f"{rates['loop']:,.0f} and {rates['offline']:,.0f} tokens/s"
    )


STUDY = Study(
    name="generate",
    options=GenerateOptions,
    measure=measure,
    table=table,
    misses=lambda record: [
        f"{ratio:.3f} of vLLM alone, at least {AIM}"
        for ratio in record["of_offline"].values()
        if ratio < AIM
    ],
)
