"""What each part of the suite found, or how it ended, on a line. Knows nothing of how it ran."""

import json
from collections.abc import Callable, Mapping
from typing import Any

Found = Mapping[str, Any]


def line(name: str, found: Found) -> str:
    """One part.

    Args:
        name: Of the part, and of the size after it.
        found: Its figures, which may be a few of them and `failed`; or `not_run` alone.
    """
    if "not_run" in found:
        return f"{name}: not run, because {found['not_run']}"
    told = [FIGURES.get(name.split()[0], _as_it_is)(found)]
    if "failed" in found:
        told.append(f"failed: {found['failed']}")
    return f"{name}: {'; '.join(filter(None, told))}"


def _learner(found: Found) -> str:
    kinds = [kind for kind in ("packed", "masked") if kind in found]
    return "; ".join(f"{kind} {_arm(found[kind])}" for kind in kinds)


def _arm(arm: Found) -> str:
    if "failed" in arm:
        return f"failed: {arm['failed']}"
    hosts = [f"{part} {share:.1%}" for part, share in arm["shares"].items() if "host" in part]
    return (
        f"{arm['tokens_per_second']:,.0f} tokens/s, {arm['utilisation']:.0%} of "
        f"{arm['peak'] / 1e12:,.2f} T operations/s ({', '.join(hosts)})"
    )


def _lag(found: Found) -> str:
    rows = [f"{row['lag']}: {1 - row['ess']:.2e}" for row in found.get("by_lag", ())]
    return "1 − ESS " + ", ".join(rows) if rows else ""


def _generation(found: Found) -> str:
    return ", ".join(
        f"{n} at once {each['tokens_per_second']:,.0f} tokens/s ({each['share']:.0%})"
        for n, each in found.get("at_once", {}).items()
    )


def _pause(found: Found) -> str:
    medians = found.get("medians", {})
    shown = [f"{key} {1e3 * medians[key]:.1f} ms" for key in PAUSE if key in medians]
    return ", ".join([*shown, f"ratio {found['ratio']:.2f}"]) if shown else ""


def _as_it_is(found: Found) -> str:
    figures = {key: value for key, value in found.items() if key not in ("part_seconds", "failed")}
    return json.dumps(figures) if figures else ""


PAUSE = ("swap", "empty_pause", "bare_load", "publish_to_serving")
FIGURES: dict[str, Callable[[Found], str]] = {
    "learner": _learner, "lag": _lag, "generation": _generation, "pause": _pause,
}  # fmt: skip
