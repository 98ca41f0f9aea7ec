"""Cost of a run's control plane with 8 to 1,024 simulated actors.

    headway bench scale [--actors 8,32,128,512,1024] [--rates 200,0]

Broker, broadcaster and metrics are real. For each number of actors and each rate of groups/s (0: as
many as they can) it shows what is accepted, the seconds of calls, cores and memory. The 99th
percentiles of puts and of leases shall be at most 100 ms at 200 groups/s.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from benchmarks.harness.processes import local_ray
from benchmarks.harness.record import Record
from benchmarks.harness.study import Options, Study, number, several, text_table

AIM_SECONDS = 0.1
"""Aim for the 99th percentile of a put, and of a lease."""
AIM_SHARE = 0.95
"""Least share of the asked groups/s; with less, calls are fast because they are few."""
COMPARED = ("put", "lease")
SHOWN = (*COMPARED, "heartbeat", "save", "serving", "lease_poll", "announced", "permit")
TOKENS = 100
"""Tokens of a rollout."""
HEAD = (
    *("actors", "asked", "groups/s", "broker: cores", "MB", "broadcaster: cores"),
    "actors: cores of the busiest process",
)
Setting = Mapping[str, Any]
"""The figures of `rates.measure_setting`."""


def row(setting: Setting) -> list[str]:
    """Return the cells of a setting: rates, and medians and 99th percentiles of calls in ms."""
    cores, asked = setting["cores"], setting["asked_groups_per_second"]
    crowd = max(share for name, share in cores.items() if name.startswith("crowd"))
    seconds = [setting["seconds"][call] for call in SHOWN]
    return [
        f"{setting['actors']}",
        f"{asked:g}" if asked else "any",
        f"{setting['accepted_groups_per_second']:,.0f}",
        f"{cores['broker']:.2f}",
        f"{setting['megabytes']['broker']:.0f}",
        f"{cores['broadcaster']:.2f}",
        f"{crowd:.2f}",
        *(f"{1e3 * x['p50']:.0f}/{1e3 * x['p99']:.0f}" if x else "–" for x in seconds),
    ]


def missed(setting: Setting) -> list[str]:
    """Return the missed aims; without an asked rate there are none."""
    asked, accepted = setting["asked_groups_per_second"], setting["accepted_groups_per_second"]
    missed: list[str] = []
    for call in COMPARED if asked else ():
        seconds = setting["seconds"][call]
        if seconds is None:
            missed.append(f"no {call} was timed")
        elif seconds["p99"] > AIM_SECONDS:
            missed.append(f"{call} p99 {1e3 * seconds['p99']:.0f} ms, above {1e3 * AIM_SECONDS:g}")
    if asked and accepted < AIM_SHARE * asked:
        missed.append(f"{accepted:,.0f} groups/s accepted, not {AIM_SHARE:g} of {asked:g}")
    return missed


def table(record: Record) -> str:
    few = [
        f"only {(setting['seconds']['put'] or {'count': 0})['count']} puts of {setting['actors']} "
        f"actors were timed in {setting['measured_seconds']:.0f} s: their percentiles are of few"
        for setting in record["settings"]
        if not setting["enough_puts"]
    ]
    title = "calls of actors, in ms: median and 99th percentile"
    return "\n".join([text_table([*HEAD, *SHOWN], map(row, record["settings"]), title), *few])


class ScaleOptions(Options):
    """Options of `headway bench scale`."""

    actors: Annotated[Sequence[int], several(number(1), "Simulated.")] = (8, 32, 128, 512, 1024)
    rates: Annotated[
        Sequence[float], several(number(0, kind=float), "Groups/s; 0: as many as they can.")
    ] = (200.0, 0.0)


def measure(options: ScaleOptions) -> Iterator[Record]:
    from benchmarks.broker.rates import measure_setting

    settings = []
    with local_ray(cores=4), TemporaryDirectory(dir=Path(), prefix=".bench-scale-") as name:
        for rate, actors in product(options.rates, options.actors):
            settings.append(measure_setting(actors, rate, TOKENS, Path(name)))
            print("  ".join(row(settings[-1])), flush=True)
            yield {"settings": settings}


STUDY = Study(
    name="scale",
    options=ScaleOptions,
    measure=measure,
    table=table,
    misses=lambda record: [
        f"{setting['actors']} actors: {', '.join(lines)}"
        for setting in record["settings"]
        if (lines := missed(setting))
    ],
)
