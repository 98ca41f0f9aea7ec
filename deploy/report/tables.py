"""Tables that commands end with: the figures of a run, its accounts, and selection bias."""

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deploy.runtime.session_process import PIPELINE
from deploy.storage.run_directory import RunDirectory
from deploy.storage.run_record import Score
from headway.errors import InputError
from headway.user_code import cut
from queues.readers.accounting import Accounting, FailedPrompt, failed_prompts
from queues.readers.open_run import open_ledger
from queues.readers.selection_bias import LEFT_OUT, BiasReport
from queues.records import Purpose
from queues.state.groups import UNREACHABLE

SHOWN = 20
"""Most failed prompts in a table."""
NAMED = 5
"""Most prompts that a sentence names."""
LONGEST_ERROR = 1500
"""Characters of an error in a sentence; `headway inspect` shows all of it."""
PREDICTED = {
    "seconds": ("seconds of training", ".0f"),
    "samples_per_second": ("rollouts per second", ".1f"),
    "learner_idle": ("learner idle", ".0%"),
    "lag_mean": ("mean lag", ".2f"),
    "lag_p50": ("median of the lag", "d"),
    "lag_p95": ("95th percentile of the lag", "d"),
    "lag_max": ("largest lag", "d"),
}
"""Label and format of what `deploy.planner.hindsight` predicts, by its key."""
TRACEBACKS = 3
"""Most tracebacks after it."""


def show(summary: dict[str, Any], directory: RunDirectory, console: Console) -> None:
    """Print the figures of a finished run, and the paths of its report and its summary."""
    table = Table(title=f"{summary['name']}: {summary['status']}", show_header=False)
    for label, value in figures(summary).items():
        table.add_row(label, value)
    console.print(table)
    lines = [f"report: {directory.page}", f"figures: {directory.summary_file}"]
    if PIPELINE not in os.environ:  # which goes on by itself
        lines.append(f"go on with: headway rollouts {directory.path}")
        lines.append(f"        or: headway export {directory.path} --to FOLDER")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if _failed(summary["accounting"]):
        with open_ledger(directory.path, verify=False) as database:
            ended = summary["version"] >= summary["steps"]  # and needs none of them
            text = describe_failed(failed_prompts(database), None if ended else directory.path)
        if text:
            console.print(text, markup=False, soft_wrap=True)


def show_runs(runs: Sequence[RunDirectory], console: Console) -> None:
    """Print a line for each of some runs, by the time of its last summary, the newest first."""
    table = Table("run", "status", "steps", "held-out", "minutes", "last summary", box=None)
    for _, cells in sorted(map(_row_of_run, runs), reverse=True):
        table.add_row(*cells)
    console.print(table)


def _row_of_run(run: RunDirectory) -> tuple[float, list[str]]:
    """Return the time of a run's last change, and its cells."""
    name, file = run.path.name, run.summary_file
    if not file.exists():
        return run.recipe_file.stat().st_mtime, [name, run.status(), "–", "–", "–", "–"]
    written = file.stat().st_mtime
    try:
        summary = run.summary("version", "steps", "seconds", "heldout")
        scores = [row["score"] for row in summary["heldout"]]
        cells = [
            run.status(),
            f"{summary['version']} of {summary['steps']}",
            _number(scores[-1], ".3f") if scores else "–",
            f"{summary['seconds'] / 60:.1f}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(written)),
        ]
    except (InputError, KeyError, TypeError):
        cells = ["damaged"]
    return written, [name, *cells]


def figures(summary: dict[str, Any]) -> dict[str, str]:
    """Return the figures of a summary for people, by label; "–" stands for an unknown figure."""
    sync, idle, overlap = summary["weight_sync"], summary["idle_fraction"], summary["overlap"]
    balanced = summary["accounting"].get("balanced")
    return {
        **{
            f"held-out {label}": _change(summary[key])
            for label, key in (("greedy", "heldout"), ("sampled", "heldout_sampled"))
            if summary[key]
        },
        "steps": f"{summary['version']} of {summary['steps']}",
        "seconds": f"{_number(summary['seconds'], '.0f')} (first step after "
        f"{_number(summary['seconds_to_first_step'], '.0f')})",
        "rollouts trained per second": _number(summary["samples_per_second"], ".1f"),
        "tokens trained": f"{summary['tokens_trained']:,}",
        **_selection(summary["selection"]),
        "largest lag trained": f"{summary['max_lag_trained']} (bound {summary['max_staleness']})",
        "rollouts of several versions": f"{summary['multi_version_rollouts']:,}",
        "effective sample size": _number(summary["ess_mean"], ".3f"),
        "|behaviour − learner| log-prob, same version": _mismatch(summary, "fresh"),
        "… across an update, KV kept": _mismatch(summary, "crossed"),
        "idle": f"learner {_number(idle['learner'], '.0%')}, "
        f"actors {_number(idle['actors'], '.0%')}",
        "weight updates": f"{sync['updates']}, pause {_number(sync['pause_seconds_mean'], '.3f')}"
        f" s, serving after {_number(sync['publish_to_serving_seconds_mean'], '.3f')} s",
        "next step began before the update was served": (
            f"{overlap['learner_ahead']} of {overlap['updates']} times, "
            f"{overlap['queue_ready_and_learner_ahead']} of {overlap['queue_ready']} "
            "where its batch was ready"
        ),
        **_agents(summary.get("agents")),
        **_failed(summary["accounting"]),
        "restarted processes": _restarts(summary["restarts"], summary["lost_seconds"]),
        "accounts": "–" if balanced is None else "balanced" if balanced else "NOT BALANCED",
        **_predicted(summary.get("predicted", {})),
    }


def _predicted(predicted: Mapping[str, Any]) -> dict[str, str]:
    """Return what was predicted, with intervals of 95 %, beside what happened."""
    rows = {}
    for key, figure in predicted.get("figures", {}).items():
        (low, median, high), value = figure["predicted"], figure["happened"]
        label, form = PREDICTED[key]
        inside = "inside" if low <= value <= high else "outside"
        rows[f"{label}, predicted from {predicted['batches']} batches"] = (
            f"{median:{form}} ({low:{form}} to {high:{form}}); it was {value:{form}}, {inside}"
        )
    if doubts := predicted.get("doubts"):
        rows["doubts of what was predicted"] = "; ".join(doubts)
    for role, memory in predicted.get("memory", {}).items():
        needed, peak = (memory[key] / 2**30 for key in ("predicted", "happened"))
        rows[f"memory of {role}, predicted"] = f"{needed:.2f} GiB; at its peak {peak:.2f}"
    return rows


def _agents(counts: Mapping[str, Any] | None) -> dict[str, str]:
    """Return figures of the sessions of agents since the run was resumed last; none without one."""
    if counts is None:
        return {}
    seconds, lost = counts["seconds"], sum(counts["left_out"].values())
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in counts["left_out"].items() if n)
    share, waited = lost / max(1, lost + counts["sampled"]), seconds["model"] + seconds["agent"]
    return {
        "turns of agents": f"{counts['turns']:,}, {counts['segments']:,} began a further segment",
        "tokens of agents left out": f"{share:.1%}" + (f" ({reasons})" if reasons else ""),
        "waiting for agents": f"{seconds['agent'] / waited:.0%} of the time" if waited else "–",
    }


def _restarts(counts: Mapping[str, int], seconds: Mapping[str, float]) -> str:
    """Format as "3 (actors 2, away for 12 s; learner 1, away for 10 s)"."""
    parts = [
        f"{role.replace('_', ' ')} {count}, away for {seconds[role]:.0f} s"
        for role, count in counts.items()
        if count
    ]
    return str(sum(counts.values())) + (f" ({'; '.join(parts)})" if parts else "")


def _selection(counts: dict[str, int]) -> dict[str, str]:
    """Return figures about what was left out of training; none where nothing was."""
    filtered, let_through = counts["groups_filtered"], counts["groups_let_through"]
    shown = {}
    if filtered or let_through:
        text = f"{filtered:,} filtered, {let_through:,} more trained without effect"
        shown["groups without a signal"] = text
    if counts["prompts_retired"]:
        shown["prompts mastered"] = f"{counts['prompts_retired']:,}"
    if counts["groups_overdue"]:
        shown["stragglers not waited for"] = f"{counts['groups_overdue']:,} groups"
    return shown


def _failed(accounting: Mapping[str, Any]) -> dict[str, str]:
    """Return what failed for good, as `headway inspect` counts it; nothing where nothing did."""
    texts = []
    for key, what in (("failed", "training groups"), ("heldout_failed", "held-out rollouts")):
        if counts := accounting.get(key):
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
            texts.append(f"{sum(counts.values()):,} {what} ({reasons})")
    return {"failed for good": ", ".join(texts)} if texts else {}


def describe_failed(failed: Sequence[FailedPrompt], run: Path | None) -> str:
    """Name the first prompts that failed for good, the last error, and for a run what to type."""
    texts = []
    for purpose, what in ((Purpose.TRAIN, "training"), (Purpose.EVALUATE, "held-out")):
        prompts = [p for p in failed if p.purpose == purpose and p.reason != UNREACHABLE]
        if not prompts:
            continue
        names, last = list(dict.fromkeys(prompt.prompt_id for prompt in prompts)), prompts[-1]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        texts.append(
            f"failed for good: {len(prompts)} {what} groups, of prompts "
            f"{', '.join(names[:NAMED])}{more}; the last error, of prompt {last.prompt_id}: "
            f"{cut(last.error, LONGEST_ERROR)}"
        )
        if run and purpose is Purpose.TRAIN:
            texts.append(f"to try them again: headway requeue {run}, then headway resume {run}")
    return "\n".join(texts)


def _change(series: list[dict[str, Any]]) -> str:
    first, last = series[0], series[-1]
    text = f"{Score.of(first)} → {Score.of(last)}"
    if not last["failed"]:
        text += f" ({last['size']} problems)"
    if "pass_at_k" in first and "pass_at_k" in last:
        text += f", pass@{last['samples']} {Score.pass_at_k(first)} → {Score.pass_at_k(last)}"
    return text


def _mismatch(summary: dict[str, Any], origin: str) -> str:
    mismatch = summary["mismatch"][origin]
    value = _number(mismatch["mean_abs_logprob_difference"], ".1e")
    return f"{value} over {mismatch['tokens']:,} tokens"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def show_accounting(accounting: Accounting, console: Console) -> None:
    """Print the number of groups in each state."""
    table = Table("groups", "count", title="accounts")
    for key, value in accounting.to_dict().items():
        if isinstance(value, dict):
            for reason, count in value.items():
                table.add_row(f"{key}: {reason}", str(count))
            table.add_row(key, str(sum(value.values())))
        else:
            table.add_row(key, str(value))
    console.print(table)


def describe_changes(sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the settings that changed between sessions, given as rows of `read_sessions`."""
    return [
        f"from version {row['version']} on: {text}" for row in sessions for text in row["changes"]
    ]


def show_failed(failed: Sequence[FailedPrompt], console: Console) -> None:
    """Print the newest prompts that failed permanently, and the tracebacks raised most often."""
    if not failed:
        return
    table = Table("prompt", "attempts", "reason", "error", title="failed permanently")
    for prompt in failed[-SHOWN:]:
        error = prompt.error.partition("\n")[0]
        table.add_row(prompt.prompt_id, str(prompt.attempts), prompt.reason, error)
    console.print(table)
    if len(failed) > SHOWN:
        console.print(f"the newest {SHOWN} of {len(failed)}; --json lists them all")
    tracebacks = Counter(prompt.error.partition("\n")[2] for prompt in failed)
    tracebacks.pop("", None)
    for traceback, count in tracebacks.most_common(TRACEBACKS):
        text = f"{count} of {len(failed)} were raised at\n{traceback}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_bias(report: BiasReport, console: Console) -> None:
    """Print groups that were not trained, or late, beside the trained ones, if there are any."""
    if not any(count for fate, count in report.groups.items() if fate != "trained"):
        return
    table = Table("groups", "known", "mean", "p50", "p95", "max", title="left out, and trained")
    for fate, measures in report.fates.items():
        for measure, spread in measures.items():
            if spread.count:
                values = (spread.mean, spread.p50, spread.p95, spread.max)
                numbers = (_number(value, ".4g") for value in values)
                table.add_row(f"{fate}: {measure}", str(spread.count), *numbers)
    console.print(table)
    if any(report.groups.get(name) for name in LEFT_OUT) and report.bias is not None:
        console.print(
            f"groups meant for training took at least {report.bias:.2f} times as long as the "
            "trained groups"
        )
    if report.tokens_masked:
        console.print(f"{report.tokens_masked:,} tokens of late groups were masked")


def show_scores(document: Mapping[str, Any], console: Console) -> None:
    """Print the scores of an evaluation's document, one line for each score of each set."""
    title = " against ".join(policy["name"] for policy in document["policies"])
    table = Table("set", "score", "mean", "95 % interval", "problems", title=title)
    for name, scores in document["sets"].items():
        for label, score in scores.items():
            ends = " to ".join(_number(score[end], ".3f") for end in ("low", "high"))
            table.add_row(name, label, f"{score['value']:.3f}", ends, str(score["n"]))
            if label == "win_rate":
                counts = f"{score['wins']} won, {score['ties']} tied, {score['losses']} lost"
                table.add_row("", "", counts, f"orders agree in {score['agreement']:.0%}", "")
    console.print(table)
