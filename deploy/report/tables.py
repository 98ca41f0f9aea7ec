"""Tables that commands end with: what a run achieved, and its accounts."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deploy.storage.run_directory import RunDirectory
from queues.readers.accounting import Accounting, FailedPrompt
from queues.readers.selection_bias import BiasReport

SHOWN = 20
"""Failed prompts in a table."""


def show(summary: dict[str, Any], directory: RunDirectory, console: Console) -> None:
    """The figures of a finished run, and where the rest lies."""
    table = Table(title=f"{summary['name']}: {summary['status']}", show_header=False)
    for label, value in figures(summary):
        table.add_row(label, value)
    console.print(table)
    console.print(f"report: {directory.page}", soft_wrap=True)
    console.print(f"figures: {directory.summary_file}", soft_wrap=True)


def figures(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What `show` shows: labels and values of a summary."""
    rows = [
        (f"held-out {label}", _change(summary[key]))
        for label, key in (("greedy", "heldout"), ("sampled", "heldout_sampled"))
        if summary[key]
    ]
    sync, idle = summary["weight_sync"], summary["idle_fraction"]
    overlap = summary["overlap"]
    return [
        *rows,
        ("steps", f"{summary['version']} of {summary['steps']}"),
        (
            "seconds",
            f"{summary['seconds']:.0f} (first step after "
            f"{_number(summary['seconds_to_first_step'], '.0f')})",
        ),
        ("rollouts trained per second", _number(summary["samples_per_second"], ".1f")),
        ("tokens trained", f"{summary['tokens_trained']:,}"),
        *_selection(summary["selection"]),
        ("largest lag trained", f"{summary['max_lag_trained']} (bound {summary['max_staleness']})"),
        ("rollouts of several versions", f"{summary['multi_version_rollouts']:,}"),
        ("effective sample size", _number(summary["ess_mean"], ".3f")),
        ("|behaviour − learner| log-prob, same version", _mismatch(summary, "fresh")),
        ("… across an update, KV kept", _mismatch(summary, "crossed")),
        (
            "idle",
            f"learner {_number(idle['learner'], '.0%')}, actors {_number(idle['actors'], '.0%')}",
        ),
        (
            "weight updates",
            f"{sync['updates']}, pause {_number(sync['pause_seconds_mean'], '.3f')} s,"
            f" serving after {_number(sync['publish_to_serving_seconds_mean'], '.3f')} s",
        ),
        (
            "next step began before the update was served",
            f"{overlap['learner_ahead']} of {overlap['updates']} times, "
            f"{overlap['queue_ready_and_learner_ahead']} of {overlap['queue_ready']} "
            "where its batch was ready",
        ),
        ("accounts", "balanced" if summary["accounting"].get("balanced") else "NOT BALANCED"),
    ]


def _selection(figures: dict[str, int]) -> list[tuple[str, str]]:
    """Lines about what was left out of training, where something was."""
    filtered, let_through = figures["groups_filtered"], figures["groups_let_through"]
    rows = []
    if filtered or let_through:
        text = f"{filtered:,} filtered, {let_through:,} more trained on nothing"
        rows.append(("groups without a signal", text))
    if figures["prompts_retired"]:
        rows.append(("prompts mastered", f"{figures['prompts_retired']:,}"))
    if figures["groups_overdue"]:
        rows.append(("stragglers not waited for", f"{figures['groups_overdue']:,} groups"))
    return rows


def _change(series: list[dict[str, Any]]) -> str:
    first, last = series[0], series[-1]
    said = f"{_risen(series, 'score')} ({last['size']} problems)"
    if "pass_at_k" in first and "pass_at_k" in last:
        said += f", pass@{last['samples']} {_risen(series, 'pass_at_k')}"
    return said


def _risen(series: list[dict[str, Any]], key: str) -> str:
    return f"{_number(series[0][key], '.3f')} → {_number(series[-1][key], '.3f')}"


def _mismatch(summary: dict[str, Any], kind: str) -> str:
    figures = summary["mismatch"][kind]
    value = _number(figures["mean_abs_logprob_difference"], ".1e")
    return f"{value} over {figures['tokens']:,} tokens"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def show_accounting(accounting: Accounting, console: Console) -> None:
    """Every issued group by its state."""
    table = Table("groups", "count", title="accounts")
    for key, value in accounting.to_dict().items():
        if isinstance(value, dict):
            for reason, count in value.items():
                table.add_row(f"{key}: {reason}", str(count))
            table.add_row(key, str(sum(value.values())))
        else:
            table.add_row(key, str(value))
    console.print(table)


def show_failed(failed: Sequence[FailedPrompt], console: Console) -> None:
    """Prompts that failed for good with their error, the newest last; nothing where none has."""
    if not failed:
        return
    table = Table("prompt", "attempts", "reason", "error", title="failed for good")
    for each in failed[-SHOWN:]:
        table.add_row(each.prompt_id, str(each.attempts), each.reason, escape(each.error))
    console.print(table)
    if len(failed) > SHOWN:
        console.print(f"the newest {SHOWN} of {len(failed)}; --json lists them all")


def show_bias(report: BiasReport, console: Console) -> None:
    """What was left out of training or trained late beside what was trained, where something was.

    `queues.readers.selection_bias` says what the numbers mean.
    """
    if not any(count for fate, count in report.groups.items() if fate != "trained"):
        return
    table = Table("groups", "known", "mean", "p50", "p95", "max", title="left out, and trained")
    for fate, measures in report.fates.items():
        for measure, found in measures.items():
            if found.count:
                numbers = (_number(x, ".4g") for x in (found.mean, found.p50, found.p95, found.max))
                table.add_row(f"{fate}: {measure}", str(found.count), *numbers)
    console.print(table)
    if report.groups["dropped"] and report.bias is not None:
        console.print(
            f"what was to be trained took at least {report.bias:.2f} times as long as what was"
        )
    if report.tokens_masked:
        console.print(f"{report.tokens_masked:,} tokens of late groups were masked")
