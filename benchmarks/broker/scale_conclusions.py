"""What the figures of `headway bench scale` say: what was missed, where it saturates, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

AIM_SECONDS = 0.1
"""99th percentile of a put, and of a lease."""
AIM_SHARE = 0.95
"""Of the groups/s that were asked for; with less, calls were fast because there were few."""
JUDGED = ("put", "lease")
SHOWN = (*JUDGED, "heartbeat", "save", "serving", "lease_poll", "announced", "permit")
FULL = 0.9
"""Of a core."""
WAITING = 0.5
"""Of a core that waits for the disk."""
Setting = Mapping[str, Any]
"""What `scale.measure` returns."""


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Count, median, 99th percentile and largest; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[int(len(ordered) * 0.99)],
        "max": ordered[-1],
    }


def lines(setting: Setting) -> list[str]:
    """One setting."""
    asked, cores = setting["asked_groups_per_second"], setting["cores"]
    megabytes, count = setting["megabytes"], (setting["seconds"]["put"] or {"count": 0})["count"]
    calls = ", ".join(f"{call} {_milliseconds(setting, call)}" for call in SHOWN)
    found = [
        f"{setting['actors']:5d} actors, {'at most' if asked is None else f'{asked:g}':>7} asked:"
        f" {setting['accepted_groups_per_second']:6,.0f} groups/s accepted, {setting['refused']}"
        f" refused; broker {cores['broker']:.2f} cores {megabytes['broker']:.0f} MB (so"
        f" {setting['broker_groups_per_core_second']:,.0f} groups/s of a whole core), broadcaster"
        f" {cores['broadcaster']:.2f} cores {megabytes['broadcaster']:.0f} MB, busiest process of"
        f" the crowd {_crowd(setting):.2f} cores",
        f"      ms p50/p99: {calls}; scrape {1e3 * setting['scrape']['max']:.0f} ms at most",
    ]
    if not setting["enough_puts"]:
        found.append(
            f"      only {count} puts were timed in {setting['measured_seconds']:.0f} s: the 99th"
            " percentiles are of few"
        )
    found += [f"      missed: {each}" for each in missed(setting)]
    return found


def missed(setting: Setting) -> list[str]:
    """What was not reached of what was asked for; nothing was where all that they can was asked."""
    asked = setting["asked_groups_per_second"]
    if not asked:
        return []
    accepted, found = setting["accepted_groups_per_second"], slow_calls(setting)
    if accepted < AIM_SHARE * asked:
        found.append(f"{accepted:,.0f} groups/s accepted, not {AIM_SHARE:g} of {asked:g}")
    return found


def slow_calls(setting: Setting) -> list[str]:
    """Of the judged calls, those whose 99th percentile is above the aim, or unknown."""
    found = []
    for call in JUDGED:
        seconds = setting["seconds"][call]
        if seconds is None:
            found.append(f"no {call} was timed")
        elif seconds["p99"] > AIM_SECONDS:
            found.append(f"{call} p99 {1e3 * seconds['p99']:.0f} ms, above {1e3 * AIM_SECONDS:g}")
    return found


def limit(setting: Setting) -> str:
    """What is full, the broker first; where all cores are, everybody waits for one."""
    cores, machine = setting["cores"], setting["machine"]
    if cores["broker"] >= FULL:
        return f"the broker: {cores['broker']:.2f} of its core"
    if _crowd(setting) >= FULL:
        return (
            f"the simulation, not the broker: a process of the crowd has {_crowd(setting):.2f} of"
            " its core (--processes)"
        )
    for name in ("learner", "broadcaster"):
        if cores[name] >= FULL:
            return f"the {name}: {cores[name]:.2f} of its core"
    if machine["busy"] >= FULL * machine["cores"]:
        return (
            f"the machine: {machine['busy']:.1f} of {machine['cores']} cores busy, of which the"
            f" broker got {cores['broker']:.2f}"
        )
    if machine["waits_for_disk"] >= WAITING:
        return f"the disk: waited for {machine['waits_for_disk']:.2f} of the time"
    return (
        f"nothing that is full (broker {cores['broker']:.2f} cores, crowd {_crowd(setting):.2f},"
        f" machine {machine['busy']:.1f} of {machine['cores']}): calls wait for one another"
    )


def verdict(settings: Sequence[Setting]) -> list[str]:
    """Where it saturates, and what limits it there."""
    fast = [each for each in settings if not slow_calls(each)]
    slow = [each for each in settings if slow_calls(each)]
    aim = f"p99 of puts and of leases at most {1e3 * AIM_SECONDS:g} ms"
    if fast:
        best = max(fast, key=_accepted)
        said = f"{aim}: up to {_accepted(best):,.0f} groups/s, of {best['actors']} actors"
    else:
        said = f"{aim}: in no setting"
    beyond = max(slow, key=_accepted, default=None)
    if beyond is None:
        return [said, "not saturated: calls were fast in every setting"]
    return [
        said,
        f"beyond it ({beyond['actors']} actors, {_accepted(beyond):,.0f} groups/s;"
        f" {'; '.join(slow_calls(beyond))}) the limit is {limit(beyond)}",
    ]


def _accepted(setting: Setting) -> float:
    return float(setting["accepted_groups_per_second"])


def _crowd(setting: Setting) -> float:
    """Cores of the busiest process that simulates actors."""
    return max(share for name, share in setting["cores"].items() if name.startswith("crowd"))


def _milliseconds(setting: Setting, call: str) -> str:
    each = setting["seconds"][call]
    return "–" if each is None else f"{1e3 * each['p50']:.0f}/{1e3 * each['p99']:.0f}"
