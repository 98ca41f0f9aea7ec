"""Stored figures as text of a Markdown page; pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.study import Study, markdown_table

COLUMNS = (
    *("run", "greedy", "sampled", "batches", "seconds", "to the first batch", "samples/s"),
    "lag (η)",
)
"""Of a table of runs; the lag is the largest."""


def made(taken: Mapping[str, Any], folder: str = ".", seeds: int = 1) -> str:
    """Return by which commands, when, of which code and where a figure was taken."""
    facts, changed = taken["machine"], taken["uncommitted_changes"]
    commands = [*([] if folder == "." else [f"cd {folder}"]), *taken["commands"]]
    lines = "\n".join(f"    {command}" for command in commands)
    return (
        f"{lines}\n\nTaken on {taken['time'][:10]}"
        f"{f' with SEED from 0 to {seeds - 1}' if seeds > 1 else ''} at commit "
        f"{taken['commit'][:8]}{' with uncommitted changes' if changed else ''}, on "
        f"{facts['cores']} cores ({facts['cpu']}) that had a load of "
        f"{facts['load_average'][0]:.1f} at the start."
    )


def record_block(study: Study[Any], record: Mapping[str, Any]) -> str:
    """Return the main figures of a benchmark's record, and the aims that were missed."""
    missed = "\n".join(f"- aim missed: {miss}" for miss in study.misses(dict(record)))
    if study.brief:
        shown = study.brief(dict(record))
    else:
        shown = f"```text\n{study.table(dict(record)).strip()}\n```"
    return f"{shown}\n\n{missed}".strip()


def summaries_block(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the summaries of runs: scores before and after, seconds and lag."""
    return markdown_table(COLUMNS, map(_row, summaries))


def _row(summary: Mapping[str, Any]) -> list[str]:
    return [
        summary["name"],
        *(_ends(summary.get(key, ())) for key in ("heldout", "heldout_sampled")),
        f"{summary['steps']}",
        f"{summary['seconds']:.0f}",
        f"{summary['seconds_to_first_step']:.0f}",
        f"{summary['samples_per_second']:.3g}",
        f"{summary['max_lag_trained']} ({summary['max_staleness']})",
    ]


def _ends(scores: Sequence[Mapping[str, Any]]) -> str:
    return f"{scores[0]['score']:.3f} → {scores[-1]['score']:.3f}" if scores else "–"
