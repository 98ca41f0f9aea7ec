"""Cost of a run's control plane with 8 to 1,024 simulated actors.

    headway bench scale [--actors 8 32 128 512 1024] [--rates 200 0]

Broker, broadcaster and metrics are real. For each number of actors and each rate of groups/s (0: as
many as they can) it shows what is accepted, the seconds of calls, cores and memory. The 99th
percentiles of puts and of leases shall be at most 100 ms at 200 groups/s.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.study import Options, Record, Study, number, option

AIM_SECONDS = 0.1
"""Aim for the 99th percentile of a put, and of a lease."""
AIM_SHARE = 0.95
"""Least share of the asked groups/s; with less, calls are fast because they are few."""
COMPARED = ("put", "lease")
SHOWN = (*COMPARED, "heartbeat", "save", "serving", "lease_poll", "announced", "permit")
Setting = Mapping[str, Any]
"""The figures of `scale.measure_setting`."""


def describe(setting: Setting) -> list[str]:
    asked, cores = setting["asked_groups_per_second"], setting["cores"]
    megabytes, count = setting["megabytes"], (setting["seconds"]["put"] or {"count": 0})["count"]
    calls = ", ".join(f"{call} {_milliseconds(setting, call)}" for call in SHOWN)
    lines = [
        f"{setting['actors']:5d} actors, {'at most' if asked is None else f'{asked:g}':>7} asked:"
        f" {setting['accepted_groups_per_second']:6,.0f} groups/s accepted, {setting['refused']}"
        f" refused; broker {cores['broker']:.2f} cores {megabytes['broker']:.0f} MB (so"
        f" {setting['broker_groups_per_core_second']:,.0f} groups/s of a whole core), broadcaster"
        f" {cores['broadcaster']:.2f} cores {megabytes['broadcaster']:.0f} MB, busiest process of"
        f" the crowd {_crowd(setting):.2f} cores",
        f"      ms p50/p99: {calls}; scrape {1e3 * setting['scrape']['max']:.0f} ms at most",
    ]
    if not setting["enough_puts"]:
        lines.append(
            f"      only {count} puts were timed in {setting['measured_seconds']:.0f} s: the 99th"
            " percentiles are of few"
        )
    return lines + [f"      missed: {miss}" for miss in missed(setting)]


def missed(setting: Setting) -> list[str]:
    """Return the missed aims; without an asked rate there are none."""
    asked = setting["asked_groups_per_second"]
    if not asked:
        return []
    accepted, misses = setting["accepted_groups_per_second"], slow_calls(setting)
    if accepted < AIM_SHARE * asked:
        misses.append(f"{accepted:,.0f} groups/s accepted, not {AIM_SHARE:g} of {asked:g}")
    return misses


def slow_calls(setting: Setting) -> list[str]:
    """Return the compared calls whose 99th percentile is above the aim, or unknown."""
    slow = []
    for call in COMPARED:
        seconds = setting["seconds"][call]
        if seconds is None:
            slow.append(f"no {call} was timed")
        elif seconds["p99"] > AIM_SECONDS:
            slow.append(f"{call} p99 {1e3 * seconds['p99']:.0f} ms, above {1e3 * AIM_SECONDS:g}")
    return slow


def verdict(settings: Sequence[Setting]) -> list[str]:
    """Describe up to which rate calls are fast, and the first setting beyond it."""
    fast = [setting for setting in settings if not slow_calls(setting)]
    slow = [setting for setting in settings if slow_calls(setting)]
    reach = "in no setting"
    if fast:
        best = max(fast, key=_accepted)
        reach = f"up to {_accepted(best):,.0f} groups/s, of {best['actors']} actors"
    lines = [f"p99 of puts and of leases at most {1e3 * AIM_SECONDS:g} ms: {reach}"]
    if slow:
        beyond = max(slow, key=_accepted)
        lines.append(
            f"beyond it: {beyond['actors']} actors, {_accepted(beyond):,.0f} groups/s;"
            f" {'; '.join(slow_calls(beyond))}"
        )
    return lines


def _accepted(setting: Setting) -> float:
    return float(setting["accepted_groups_per_second"])


def _crowd(setting: Setting) -> float:
    """Return the cores of the busiest process that simulates actors."""
    crowds = [share for name, share in setting["cores"].items() if name.startswith("crowd")]
    return float(max(crowds))


def _milliseconds(setting: Setting, call: str) -> str:
    known = setting["seconds"][call]
    return "–" if known is None else f"{1e3 * known['p50']:.0f}/{1e3 * known['p99']:.0f}"


def measure(options: Options) -> Iterator[Record]:
    import ray

    from benchmarks.broker.scale_rates import measure_setting

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    settings = []
    with tempfile.TemporaryDirectory(dir=Path(), prefix=".bench-scale-") as name:
        for rate in options.rates:
            for actors in options.actors:
                settings.append(measure_setting(actors, rate, Path(name)))
                print(*describe(settings[-1]), sep="\n", flush=True)
                yield {"settings": settings}
    ray.shutdown()


STUDY = Study(
    name="scale",
    about=__doc__,
    options=(
        option("--actors", [8, 32, 128, 512, 1024], "simulated", type=number(int, 1)),
        option("--rates", [200.0, 0.0], "groups/s; 0: as many as they can", type=number(float, 0)),
    ),
    file="scale.json",
    measure=measure,
    conclude=lambda record: {"verdict": verdict(record["settings"])},
    table=lambda record: "\n".join(record["verdict"]),
    misses=lambda record: [miss for setting in record["settings"] for miss in missed(setting)],
)
