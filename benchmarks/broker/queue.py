"""Throughput of the broker, beside what Ray and the disk allow.

    headway bench queue [--soak 600]

For each number of simulated actors and each length, in the current folder: the durable broker, a
Ray actor that only answers the same messages, the same bytes written with as many fdatasyncs, and
`ray.util.queue`. `--soak` adds the broker's memory over so many seconds. Takes about 25 minutes.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.study import Options, Record, Study, medians_over, number, option

OF_CEILING = 0.7
OF_RAY_QUEUE = {100: 5.0, 8000: 1.0}
"""Aim for the throughput over that of `ray.util.queue`, by tokens."""
GROWTH = 0.05
"""Aim for the growth of memory from the second quarter of the test to the last."""
COMPARED = ("broker", "empty", "disk", "ray_queue")


def measure(options: Options) -> Iterator[Record]:
    import ray

    from benchmarks.broker.queue_rates import PROCESSES, compare, soak

    ray.init("local", num_cpus=PROCESSES + 2, include_dashboard=False, log_to_driver=False)
    settings = [(tokens, actors) for tokens in options.tokens for actors in options.actors]
    rounds: dict[tuple[int, int], list[Record]] = {setting: [] for setting in settings}
    with tempfile.TemporaryDirectory(dir=Path(), prefix=".bench-queue-") as name:
        folder = Path(name)
        for index in range(options.rounds):
            for tokens, actors in settings:
                measured = compare(tokens, actors, folder)
                rounds[tokens, actors].append(measured)
                figures = {"tokens": tokens, "actors": actors, **summarize([measured])}
                print(f"round {index + 1}: {describe(figures)}", flush=True)
        yield {
            "settings": [
                {"tokens": tokens, "actors": actors, **summarize(measured), "rounds": measured}
                for (tokens, actors), measured in rounds.items()
            ]
        }
        yield {"soak": soak(options, folder) if options.soak else None}
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
    from benchmarks.broker.queue_workers import GROUP_SIZE

    lines = [f"\nmedians of {record['arguments']['rounds']} rounds, groups of {GROUP_SIZE}"]
    lines += [describe(setting) for setting in record["settings"]]
    if soaked := record["soak"]:
        lines.append(f"memory over {soaked['seconds']:g} s: {100 * soaked['growth']:+.1f}%")
    return "\n".join(lines)


COUNT = number(int, 1)
STUDY = Study(
    name="queue",
    about=__doc__,
    options=(
        option("--actors", [1, 4, 16, 64], "simulated", type=COUNT),
        option("--tokens", [100, 1000, 8000], "of each rollout", type=number(int, 4)),
        option("--rounds", 3, "of all measurements", type=COUNT),
        option("--soak", 0.0, "seconds of the memory test; 0: none"),
    ),
    file="queue.json",
    measure=measure,
    conclude=conclude,
    table=table,
    misses=lambda record: record["misses"],
)
