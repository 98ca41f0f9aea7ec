"""The figures of each part of the suite, or how it ended, as a line."""

import json
from collections.abc import Callable, Mapping
from typing import Any

Figures = Mapping[str, Any]


def describe(name: str, figures: Figures) -> str:
    """Return the line of one part."""
    if "not_run" in figures:
        return f"{name}: not run, because {figures['not_run']}"
    parts = [FIGURES.get(name.split()[0], _plain)(figures)]
    if "failed" in figures:
        parts.append(f"failed: {figures['failed']}")
    return f"{name}: {'; '.join(filter(None, parts))}"


def _learner(figures: Figures) -> str:
    kinds = [kind for kind in ("packed", "masked") if kind in figures]
    return "; ".join(f"{kind} {_attention(figures[kind])}" for kind in kinds)


def _attention(figures: Figures) -> str:
    if "failed" in figures:
        return f"failed: {figures['failed']}"
    hosts = [f"{part} {share:.1%}" for part, share in figures["shares"].items() if "host" in part]
    return (
        f"{figures['tokens_per_second']:,.0f} tokens/s, {figures['utilisation']:.0%} of "
        f"{figures['peak'] / 1e12:,.2f} T operations/s ({', '.join(hosts)})"
    )


def _lag(figures: Figures) -> str:
    rows = [f"{row['lag']}: {1 - row['ess']:.2e}" for row in figures.get("by_lag", ())]
    return "1 − ESS " + ", ".join(rows) if rows else ""


def _generation(figures: Figures) -> str:
    return ", ".join(
        f"{n} at once {rate['tokens_per_second']:,.0f} tokens/s ({rate['share']:.0%})"
        for n, rate in figures.get("at_once", {}).items()
    )


def _pause(figures: Figures) -> str:
    medians = figures.get("medians", {})
    shown = [f"{key} {1e3 * medians[key]:.1f} ms" for key in PAUSE if key in medians]
    return ", ".join([*shown, f"ratio {figures['ratio']:.2f}"]) if shown else ""


def _plain(figures: Figures) -> str:
    known = {key: value for key, value in figures.items() if key not in ("part_seconds", "failed")}
    return json.dumps(known) if known else ""


PAUSE = ("swap", "empty_pause", "bare_load", "publish_to_serving")
FIGURES: dict[str, Callable[[Figures], str]] = {
    "learner": _learner, "lag": _lag, "generation": _generation, "pause": _pause,
}  # fmt: skip
