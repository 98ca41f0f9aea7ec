"""The command `headway`.

Modules of the user are imported from the folder that the command runs in, after everything
installed. Commands import what they need when they run, so that `headway --help` is quick.

Exit codes: 0 done, 1 failed at run time, 2 bad input, 130 interrupted after a checkpoint.
"""

import json
import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.cli.bench import BENCHMARKS, BenchCommand, Group, start
from deploy.cli.options import (
    Command,
    Overrides,
    Recipe,
    Replace,
    RunName,
    RunsDir,
    complete_runs,
    load,
    next_command,
)
from deploy.cli.recipes import plan, presets, validate
from deploy.cli.runs import logs, ls, requeue, rollouts, salvage, scale
from deploy.cli.shadowing import check_not_shadowed, only_informs
from deploy.cli.starter import init
from deploy.cli.training import resume, reward_model, run, sft
from deploy.errors import Interrupted
from deploy.runtime import session_process
from deploy.runtime.output import open_standard_streams
from deploy.runtime.safe_console import SafeConsole, echo, print_uncaught
from deploy.runtime.signals import deferred, raise_interrupts
from headway.errors import HeadwayError, InputError, first_line

INTERRUPTED = Interrupted.exit_code
"""Exit code of a command that the user stopped; typer exits with it on KeyboardInterrupt."""
Address = Annotated[str, typer.Option(help="Address of a cluster's dashboard: http://HEAD:8265.")]
Job = Annotated[str, typer.Argument(help="A job, as `headway submit` printed it.")]

app = typer.Typer(
    help="Asynchronous reinforcement learning of language models, with bounded staleness.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=Group,
)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True)
    ] = False,
) -> None:
    """Asynchronous reinforcement learning of language models, with bounded staleness."""
    if show:
        from importlib.metadata import version as installed

        typer.echo(installed("headway-rl"))
        raise typer.Exit


for command in (init, run, resume, scale, sft, reward_model, ls, logs, rollouts, requeue, salvage):
    app.command(cls=Command)(command)


@app.command(cls=Command)
def submit(
    recipe: Recipe,
    address: Address,
    overrides: Overrides = [],  # noqa: B006
    *,
    replace: Replace = False,
    sft: Annotated[bool, typer.Option(help="Make the recipe's warm start first.")] = False,
    reward_model: Annotated[bool, typer.Option(help="Train its reward models first.")] = False,
    resume: Annotated[
        bool, typer.Option(help="Resume the run if it has begun; follow its job if that lives.")
    ] = False,
    module: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="A module in this folder that yours import; may be repeated."
        ),
    ] = [],  # noqa: B006
    wait: Annotated[
        bool, typer.Option(help="Follow the job, and exit with its exit code.")
    ] = False,
) -> None:
    """Train a recipe as a job of a Ray cluster, with the modules that it names in this folder."""
    config = load(recipe, overrides)
    from deploy.cluster.jobs import Jobs, check, command_of, files_of
    from deploy.config.loader import read_recipe

    check(read_recipe(recipe, overrides))
    preparation = {"sft": sft, "reward-model": reward_model}
    before = [name for name, wanted in preparation.items() if wanted]
    command = command_of(recipe, overrides, replace=replace, resume=resume, before=before)
    modules = files_of(config, module, Path.cwd())
    file = Path(recipe) if Path(recipe).exists() else None
    jobs = Jobs(address)
    live = jobs.live_job(config) if resume else None
    job = live or jobs.submit(config, command, modules, file)
    echo(f"job {job}; follow it by: headway attach {job} --address {address}")
    if wait:
        attach(job, address)


@app.command(cls=Command)
def attach(job: Job, address: Address) -> None:
    """Follow the log of a job and exit with its exit code; Ctrl-C does not stop the job."""
    from deploy.cluster.jobs import Jobs

    raise typer.Exit(Jobs(address).follow(job, lambda text: echo(text, nl=False)))


@app.command(cls=Command)
def cancel(job: Job, address: Address) -> None:
    """Stop a job as Ctrl-C stops a run: it saves a checkpoint first."""
    from deploy.cluster.jobs import Jobs

    echo(f"job {job}: {Jobs(address).cancel(job)}")


app.command(cls=Command)(validate)
app.command(cls=Command)(plan)


@app.command(name="try", cls=Command)
def try_recipe(
    recipe: Recipe,
    overrides: Overrides = [],  # noqa: B006
    *,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to try, once each.")] = 3,
) -> None:
    """Play a few episodes with the model of a recipe and print them; trains nothing."""
    config = load(recipe, overrides)
    with deferred():
        from deploy.offline.try_recipe import before_warm_start, try_recipe
        from deploy.preflight.inputs import load_inputs
    made = config.sft is None or config.warm_start.exists()
    with nullcontext(config) if made else before_warm_start(config, echo) as tried:
        try_recipe(tried, load_inputs(tried), prompts, echo)
    echo(next_command("run" if made else "sft", recipe, overrides))


app.command(cls=Command)(presets)


@app.command(cls=Command)
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
    from deploy.report.tables import show_accounting, show_bias, show_changes, show_failed
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
        more = {"failed_prompts": [asdict(prompt) for prompt in failed], "bias": bias.to_dict()}
        typer.echo(json.dumps({**accounts.to_dict(), **more}))
    else:
        console = SafeConsole()
        show_accounting(accounts, console)
        show_failed(failed, console)
        show_bias(bias, console)
        show_changes(read_sessions(directory), console)


@app.command(cls=Command)
def export(
    run: RunName,
    to: Annotated[Path, typer.Option(help="Folder to write; must not exist.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapter alone, for PEFT, not merged.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of an adapter's model, if it was moved."),
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Copy the newest checkpoint's model and tokenizer into a folder for transformers.

    An adapter is merged into its model, in the dtype that it was trained in.
    """
    from deploy.offline.export import export_model
    from deploy.storage.run_directory import RunDirectory
    from learner.config.lora import stored_form

    exported = export_model(RunDirectory.open(run, runs_dir), to, adapter=adapter, base=base)
    of = f", an adapter of {stored_form(to)[1]}" if adapter else ""
    typer.echo(f"version {exported} in {to}{of}")


@app.command(cls=Command)
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


@app.command(cls=Command)
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
        from deploy.report.tables import FIGURES
        from deploy.report.tables import show as show_figures

        run_directory = ended.directory
        figures = {**run_directory.summary(*FIGURES), "status": run_directory.status()}
        show_figures(figures, run_directory, console)


@app.command(cls=Command)
def replay(
    run: RunName,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Batches A to B−1.")],
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Train recorded batches of a run again and compare the weights; exit code 1 if they differ."""
    from deploy.offline import replay
    from deploy.runtime.console import Terminal
    from deploy.storage.run_directory import RunDirectory

    batches = replay.parse_steps(steps)
    directory = RunDirectory.open(run, runs_dir)
    terminal = Terminal()
    if not replay.replay(directory, batches, terminal, terminal.console):
        raise typer.Exit(1)


@app.command(
    cls=BenchCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="One of the names below.",
            autocompletion=lambda incomplete: [n for n in BENCHMARKS if n.startswith(incomplete)],
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Its own arguments; `--help` lists them.")
    ] = None,
) -> None:
    """Run a benchmark of a checkout; `headway bench NAME --help` describes it."""
    start(name, arguments or [])


def main() -> Any:
    """Run the command line; print expected errors as one message and exit with their code.

    A command that trains runs in a process of its own, which is started again when it crashes.
    """
    try:
        return _run_command()
    except SystemExit as leaving:
        session = session_process.session
        if session is not None and not session.has_failed:
            code = leaving.code or 0
            session.ends(code if isinstance(code, int) else 1)
        raise


def _run_command() -> Any:
    try:
        open_standard_streams()
        raise_interrupts()
        sys.excepthook = print_uncaught
        if not only_informs(sys.argv[1:]):
            _check_not_shadowed()
            if sys.argv[1] in ("run", "resume"):
                session_process.begin_session(_end_leftovers)
        sys.path.append(os.getcwd())
        return app(standalone_mode=True)
    except (KeyboardInterrupt, SystemExit) as leaving:
        if isinstance(leaving, KeyboardInterrupt) or leaving.code == INTERRUPTED:
            _print_error("stopped by the user")
            sys.exit(INTERRUPTED)
        raise
    except Exception as error:
        if not isinstance(error, HeadwayError | OSError):
            raise
        code = error.exit_code if isinstance(error, HeadwayError) else 1
        _print_error(str(error))
        session = session_process.session
        if session is not None and code != INTERRUPTED and session.may_pass(error):
            session.fails(first_line(error))
        sys.exit(code)


def _end_leftovers(run: Path) -> None:
    """End what a killed session of a run has left, unless another command has the run by now."""
    from deploy.cluster.cleanup import end_leftovers
    from headway.file_lock import locked

    with suppress(OSError), locked(run / session_process.DRIVER_LOCK):
        end_leftovers(run)


def _check_not_shadowed() -> None:
    """Exit if a folder shadows a package, which `SafeConsole` could not be imported from."""
    try:
        check_not_shadowed()
    except InputError as error:
        typer.echo(f"headway: {error}", err=True)
        sys.exit(error.exit_code)


def _print_error(message: str) -> None:
    SafeConsole(stderr=True).print(f"headway: {message}", soft_wrap=True)
