"""Throughput of the broker, beside what Ray and the disk allow.

    headway bench queue [--soak 600]

For each number of simulated actors and each length, in the current folder: the durable broker, a
Ray actor that only answers the same messages, the same bytes written with as many fdatasyncs, and
`ray.util.queue`. `--soak` adds the broker's memory over so many seconds. Takes about 25 minutes.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, number, several
from benchmarks.harness.tables import medians_over

OF_CEILING = 0.7
OF_RAY_QUEUE = {100: 5.0, 8000: 1.0}
"""Aim for the throughput over that of `ray.util.queue`, by tokens."""
GROWTH = 0.05
"""Aim for the growth of memory from the second quarter of the test to the last."""
COMPARED = ("broker", "empty", "disk", "ray_queue")


@dataclass(frozen=True, kw_only=True)
class QueueOptions(Options):
    """Options of `headway bench queue`."""

    actors: Annotated[Sequence[int], several(number(1), "Simulated.")] = (1, 4, 16, 64)
    tokens: Annotated[Sequence[int], several(number(4), "Of each rollout.")] = (100, 1000, 8000)
    rounds: Annotated[int, typer.Option(min=1, help="Of all measurements.")] = 3
    soak: Annotated[float, typer.Option(help="Seconds of the memory test; 0: none.")] = 0.0


def measure(options: QueueOptions) -> Iterator[Record]:
    import ray

    from benchmarks.broker.rates import FAST_PROCESSES, compare, soak

    ray.init("local", num_cpus=FAST_PROCESSES + 2, include_dashboard=False, log_to_driver=False)
    settings = [(tokens, actors) for tokens in options.tokens for actors in options.actors]
    rounds: dict[tuple[int, int], list[Record]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory(dir=Path(), prefix=".bench-queue-") as name:
        for index in range(options.rounds):
            for tokens, actors in settings:
                measured = compare(tokens, actors, Path(name))
                rounds[tokens, actors].append(measured)
                figures = {"tokens": tokens, "actors": actors, **summarize([measured])}
                print(f"round {index + 1}: {describe(figures)}", flush=True)
        yield {
            "settings": [
                {"tokens": tokens, "actors": actors, **summarize(measured), "rounds": measured}
                for (tokens, actors), measured in rounds.items()
            ]
        }
        yield {"soak": soak(options.soak, Path(name)) if options.soak else None}
    ray.shutdown()


def summarize(rounds: Sequence[Record]) -> Record:
    """Return medians over the rounds of one setting; the ratios are of each round."""
    medians = medians_over(rounds)
    rates = {f"{name}_groups_per_second": medians[name]["groups_per_second"] for name in COMPARED}
    return {
        **rates,
        "broker_megabytes_per_second": medians["broker"]["megabytes_per_second"],
        "of_ceiling": medians["of_ceiling"],
        "of_ray_queue": medians["of_ray_queue"],
    }


def conclude(record: Record) -> Record:
    misses = []
    for setting in record["settings"]:
        name = f"{setting['tokens']} tokens, {setting['actors']} actors"
        if setting["of_ceiling"] < OF_CEILING:
            misses.append(f"{name}: {setting['of_ceiling']:.2f} of the ceiling, aim {OF_CEILING:g}")
        aim = OF_RAY_QUEUE.get(setting["tokens"], 0.0)
        if setting["of_ray_queue"] < aim:
            misses.append(f"{name}: {setting['of_ray_queue']:.1f} × ray.util.queue, aim {aim:g}")
    soaked = record.get("soak")
    if soaked and soaked["growth"] > GROWTH:
        misses.append(f"memory grows by {soaked['growth']:.0%}, aim {GROWTH:.0%}")
    return {"misses": misses}


def describe(figures: Record) -> str:
    """Describe one setting on a line."""
    return (
        f"{figures['tokens']:5d} tokens, {figures['actors']:2d} actors:"
        f" {figures['broker_groups_per_second']:7,.0f}"
        f" groups/s {figures['broker_megabytes_per_second']:6.1f} MB/s"
        f" | Ray allows {figures['empty_groups_per_second']:7,.0f},"
        f" the disk {figures['disk_groups_per_second']:7,.0f}"
        f" | {figures['of_ceiling']:.2f} of the lower,"
        f" {figures['of_ray_queue']:.1f} × ray.util.queue"
    )


def table(record: Record) -> str:
    lines = [f"\nmedians of {record['arguments']['rounds']} rounds, groups of 8 rollouts"]
    lines += [describe(setting) for setting in record["settings"]]
    if soaked := record["soak"]:
        lines.append(f"memory over {soaked['seconds']:g} s: {100 * soaked['growth']:+.1f}%")
    return "\n".join(lines)


STUDY = Study(
    name="queue",
    about=__doc__,
    options=QueueOptions,
    file="queue.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=lambda record: record["misses"],
)
