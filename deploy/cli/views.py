"""Commands that look at a run, live or ended, and leave it as it is."""

import json
import os
import webbrowser
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.cli.arguments import RunName, RunsDir, complete_runs
from deploy.runtime.safe_console import SafeConsole, echo


def ls(runs_dir: RunsDir = Path("runs")) -> None:
    """List the runs of a folder, the newest first."""
    from deploy.report.tables import show_runs
    from deploy.storage.run_directory import RunDirectory

    if runs := RunDirectory.all(runs_dir):
        show_runs(runs, SafeConsole())
    else:
        echo(f"no runs in {runs_dir}")


def logs(
    run: RunName,
    process: Annotated[
        str | None, typer.Argument(help="Its name, such as driver or actor-0; default: list them.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
    *,
    lines: Annotated[int, typer.Option(min=1, help="Newest lines of each file.")] = 200,
) -> None:
    """Print the output of a process of a run, live or ended, or list what there is."""
    from deploy.cluster.worker_logs import logs_of, newest_lines
    from deploy.storage.run_directory import RunDirectory
    from headway.errors import InputError
    from headway.nearest_name import nearest

    directory = RunDirectory.open(run, runs_dir)
    files = logs_of(directory)
    if not files:
        raise InputError(f"run {run!r} has no output yet, in {directory.logs} or with Ray")
    if process is None:
        for name, file in files:
            echo(f"{file.stat().st_size:10,} bytes  {name:22} {file}")
        return
    chosen = [(name, file) for name, file in files if process in (name, Path(name).stem)]
    if not chosen:
        names = [*dict.fromkeys(Path(name).stem for name, _ in files)]
        raise InputError(
            f"run {run!r} has no output of {process!r}; there is {', '.join(names)}"
            f"{nearest(process, names)}"
        )
    for name, file in chosen:
        echo(f"== {name}: {file}")
        echo(newest_lines(file, lines))


def rollouts(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    *,
    version: Annotated[
        int | None, typer.Option(help="Version that they were trained at; default: the newest.")
    ] = None,
    sort: Annotated[
        Literal["reward", "length"] | None, typer.Option(help="Show the highest first.")
    ] = None,
    lowest: Annotated[
        bool, typer.Option("--lowest", help="Show the lowest first, of rewards by default.")
    ] = False,
    count: Annotated[int, typer.Option(min=1, help="Rollouts to print.")] = 3,
    opened: Annotated[
        str | None,
        typer.Option("--open", metavar="ID", help="Draw this one as a page, and show it."),
    ] = None,
) -> None:
    """Print rollouts of a trained batch with prompts, rewards and lag, as text.

    With --open, draw any recorded rollout, as g00000003/1, as a page and print its path instead.
    """
    from deploy.observability.samples import heading, text_of
    from deploy.offline.rollouts import read_samples
    from deploy.storage.run_directory import RunDirectory

    directory = RunDirectory.open(run, runs_dir)
    if opened is not None:
        from deploy.offline.rollout_page import draw_rollout

        page = draw_rollout(directory, opened)
        typer.echo(page)
        if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
            webbrowser.open(page.as_uri())
        return
    samples = read_samples(directory, version)
    if sort or lowest:
        samples.sort(key=attrgetter("tokens" if sort == "length" else "reward"), reverse=not lowest)
    for sample in samples[:count]:
        echo(f"── {heading(sample)}\n{text_of(sample)}\n")


def inspect(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the accounts as JSON.")] = False,
    parquet: Annotated[
        Path | None, typer.Option(help="Write every journaled rollout to this file.")
    ] = None,
) -> None:
    """Show the accounts of a run, live or ended, its failed prompts and the settings that changed.

    With --parquet, export its rollouts instead.
    """
    from deploy.report.tables import describe_changes, show_accounting, show_bias, show_failed
    from deploy.storage.run_directory import RunDirectory
    from deploy.storage.sessions import read_sessions
    from queues.readers import accounting
    from queues.readers.open_run import open_ledger
    from queues.readers.parquet import export_parquet, removed_groups
    from queues.readers.selection_bias import report_bias
    from queues.storage.state_counts import count_rows

    directory = RunDirectory.open(run, runs_dir)
    if parquet is not None:
        typer.echo(f"{export_parquet(directory.path, parquet)} rollouts in {parquet}")
        if removed := removed_groups(directory.path):
            typer.echo(
                f"rollouts of {removed} groups were deleted, since queues.keep_rollouts = 'needed'"
            )
        return
    with open_ledger(directory.path) as database:
        accounts = accounting.account(count_rows(database))
        failed, bias = accounting.failed_prompts(database), report_bias(database)
    if as_json:
        more = {"failed_prompts": [asdict(prompt) for prompt in failed], "bias": asdict(bias)}
        typer.echo(json.dumps({**accounts.to_dict(), **more}))
    else:
        console = SafeConsole()
        show_accounting(accounts, console)
        show_failed(failed, console)
        show_bias(bias, console)
        for change in describe_changes(read_sessions(directory)):
            console.print(change, markup=False, highlight=False, soft_wrap=True)


def report(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    *,
    compare: Annotated[
        list[str], typer.Option(metavar="RUN", help="A run to compare with; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Draw report.html of a run, live or ended, and print its path."""
    from deploy.report.report import report as draw
    from deploy.storage.run_directory import RunDirectory

    others = [RunDirectory.open(other, runs_dir) for other in compare]
    typer.echo(draw(RunDirectory.open(run, runs_dir), others))


def top(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's folder, its name in --runs-dir, or its metrics' address.",
            autocompletion=complete_runs,
        ),
    ],
    runs_dir: RunsDir = Path("runs"),
    *,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two frames.")] = 1.0,
    once: Annotated[bool, typer.Option(help="Print one frame and end.")] = False,
) -> None:
    """Watch a live run, on this machine or another."""
    from deploy.observability.run_client import RunEnded, show

    console = SafeConsole()
    try:
        show(run, runs_dir, interval=interval, once=once, console=console)
    except RunEnded as ended:
        from deploy.report.summary import KEYS
        from deploy.report.tables import show as show_figures

        run_directory = ended.directory
        figures = {**run_directory.summary(*KEYS), "status": run_directory.status()}
        show_figures(figures, run_directory, console)
