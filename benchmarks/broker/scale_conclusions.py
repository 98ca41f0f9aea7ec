"""Conclusions of `headway bench scale`: missed aims, and the rate at which calls are slow."""

from collections.abc import Mapping, Sequence
from typing import Any

AIM_SECONDS = 0.1
"""Aim for the 99th percentile of a put, and of a lease."""
AIM_SHARE = 0.95
"""Least share of the asked groups/s; with less, calls are fast because they are few."""
COMPARED = ("put", "lease")
SHOWN = (*COMPARED, "heartbeat", "save", "serving", "lease_poll", "announced", "permit")
Setting = Mapping[str, Any]
"""The figures of `scale.measure_setting`."""


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return count, median, 99th percentile and largest; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[int(len(ordered) * 0.99)],
        "max": ordered[-1],
    }


def describe(setting: Setting) -> list[str]:
    """Return one setting as lines."""
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
    return max(share for name, share in setting["cores"].items() if name.startswith("crowd"))


def _milliseconds(setting: Setting, call: str) -> str:
    known = setting["seconds"][call]
    return "–" if known is None else f"{1e3 * known['p50']:.0f}/{1e3 * known['p99']:.0f}"
